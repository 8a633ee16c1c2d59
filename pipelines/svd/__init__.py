"""Stable Video Diffusion: videos from a picture, by a UNet with layers for time."""
