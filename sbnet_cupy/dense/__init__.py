"""Dense convolution and activation of images and stacks, with their gradients."""
