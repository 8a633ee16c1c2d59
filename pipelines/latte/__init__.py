"""Latte: videos from text, by a DiT whose blocks take turns between space and time."""
