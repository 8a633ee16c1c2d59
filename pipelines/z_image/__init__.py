"""Z-Image: images from text, pictures, masks and control pictures, by a DiT of single blocks with a Qwen3 text encoder."""
