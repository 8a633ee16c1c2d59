"""Allegro: videos from text, by a DiT with a VAE that works on tiles."""
