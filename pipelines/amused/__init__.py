"""Amused: images from text, by a transformer that fills in the tokens of a picture."""
