"""Mochi: videos from text, by a DiT with two streams and an asymmetric VAE."""
