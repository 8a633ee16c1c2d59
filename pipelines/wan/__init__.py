"""Wan: videos from text, and from text and a picture, by one DiT or by two that share the steps."""
