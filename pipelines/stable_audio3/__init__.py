"""Stable Audio 3: sound from text and from sound, whole or in parts, by a DiT with an autoencoder of transformers."""
