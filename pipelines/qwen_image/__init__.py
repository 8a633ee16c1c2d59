"""Qwen-Image: images from text, pictures, masks and control pictures, by a DiT with a vision-language model as text encoder."""
