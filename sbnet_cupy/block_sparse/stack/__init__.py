"""A stack of blocks as the activations of a network."""
