"""From an image to a stack of blocks and back, with the gradients."""
