"""HunyuanVideo 1.5: videos from text and from a picture, by a DiT with an encoder for the letters that are to be seen."""
