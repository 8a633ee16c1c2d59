"""Stable Diffusion XL: images from text and pictures, by a UNet with two text encoders."""
