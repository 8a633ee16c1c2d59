"""Marigold: depth, normals and intrinsics of pictures, by the components of Stable Diffusion."""
