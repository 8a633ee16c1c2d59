"""The components of a pipeline: declared as dotted paths, or found by well-known names."""
