"""CogView: images from text, by a DiT of joint blocks; CogView 4 with a GLM text encoder, CogView 3 Plus with a T5."""
