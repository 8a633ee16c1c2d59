"""PixArt: images from text, by a DiT with a T5 as text encoder."""
