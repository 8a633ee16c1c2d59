"""Stable Audio: sound from text, by a DiT with an autoencoder of waves."""
