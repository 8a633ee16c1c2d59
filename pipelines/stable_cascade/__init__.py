"""Stable Cascade: images from text, by a prior on very small latents and a decoder to larger ones."""
