"""DDPM and its kin: images by a UNet, without a prompt."""
