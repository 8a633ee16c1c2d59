"""LTX-Video: videos from text, from pictures and videos among their frames, and larger ones from latents."""
