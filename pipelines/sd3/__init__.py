"""Stable Diffusion 3: images from text, by a DiT with three text encoders."""
