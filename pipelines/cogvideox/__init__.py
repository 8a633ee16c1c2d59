"""CogVideoX: videos from text, from a picture, from a video, and by a video that controls."""
