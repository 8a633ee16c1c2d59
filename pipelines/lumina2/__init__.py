"""Lumina: images from text, by a DiT with a Gemma text encoder; Lumina-Image 2.0, and Lumina-Next before it."""
