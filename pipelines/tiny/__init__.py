"""Tiny components: real model classes with random, seeded weights, and tokenizers made in memory."""
