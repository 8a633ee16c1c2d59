"""LTX-2: video with sound from text, by a DiT for both."""
