"""HunyuanVideo: videos from text and from a picture, whole or in sections, by a DiT of double and single blocks."""
