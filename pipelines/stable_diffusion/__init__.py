"""Stable Diffusion 1 and 2: images from text, pictures, masks and control pictures, by a UNet with one text encoder."""
