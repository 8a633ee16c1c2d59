"""Stable Diffusion XL: images from text, pictures, masks and control pictures, by a UNet with two text encoders."""
