"""Chroma: images from text, pictures and masks, by a Flux DiT that a small network steers in place of guidance and pooled text."""
