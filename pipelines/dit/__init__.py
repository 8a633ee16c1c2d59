"""DiT: images of a class, by the first diffusion transformer."""
