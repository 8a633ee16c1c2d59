"""HiDream: images from text, by a DiT of experts with four text encoders."""
