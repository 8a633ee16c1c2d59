"""DeepFloyd IF: images from text by UNets on pixels, small ones first, then larger ones."""
