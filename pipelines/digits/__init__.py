"""A small Flux pipeline that was trained for this project: it draws digits of 8 x 8 pixels, and can be judged."""
