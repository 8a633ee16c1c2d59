"""Stable Diffusion 3: images from text, pictures, masks and control pictures, by a DiT with three text encoders."""
