"""Sana: images from text, by a DiT of linear attention with a Gemma as text encoder and a deep-compression autoencoder."""
