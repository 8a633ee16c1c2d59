"""Sana Video: videos from text and from a picture, by a DiT of linear attention."""
