"""ModelScope's text-to-video and I2VGen-XL: videos from text, from a video and from a picture, by UNets with layers for time."""
