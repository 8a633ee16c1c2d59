"""Flux 2: images from text and pictures, by a DiT of double and single blocks with a language model as text encoder."""
