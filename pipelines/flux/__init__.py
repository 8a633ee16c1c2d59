"""Flux: images from text, by a DiT of double and single blocks with two text encoders."""
