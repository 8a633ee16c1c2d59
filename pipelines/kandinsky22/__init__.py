"""Kandinsky 2.2: images by a prior, which makes an image embedding of text, and a UNet that makes pictures of embeddings."""
