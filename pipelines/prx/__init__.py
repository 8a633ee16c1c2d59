"""PRX: images from text, in a latent space or in pixels, by a DiT of single blocks."""
