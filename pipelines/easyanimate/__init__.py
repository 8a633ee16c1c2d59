"""EasyAnimate: videos from text, and into a masked video."""
