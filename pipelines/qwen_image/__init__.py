"""Qwen-Image: images from text, by a DiT with a vision-language model as text encoder."""
