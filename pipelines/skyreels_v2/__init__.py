"""SkyReels V2: videos from text, pictures and videos, of any length, by a DiT of the Wan kind."""
