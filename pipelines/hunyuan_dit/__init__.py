"""HunyuanDiT: images from text, by a DiT with skips between its blocks, with a BERT and a T5 as text encoders."""
