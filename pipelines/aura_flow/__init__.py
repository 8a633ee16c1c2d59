"""AuraFlow: images from text, by a DiT of joint and single blocks."""
