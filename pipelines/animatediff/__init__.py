"""AnimateDiff: videos from a Stable Diffusion UNet that is given layers for time, from text, videos and control pictures."""
