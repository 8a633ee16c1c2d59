"""AudioLDM 2 and AudioLDM: sound from text, by a UNet whose pictures are spectrograms."""
