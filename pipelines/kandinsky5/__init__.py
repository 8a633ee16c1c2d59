"""Kandinsky 5: images and videos from text and from a picture, by a DiT with separate blocks for text."""
