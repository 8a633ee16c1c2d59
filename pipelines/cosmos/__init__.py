"""Cosmos: videos of a world and images, from text, from pictures and videos."""
