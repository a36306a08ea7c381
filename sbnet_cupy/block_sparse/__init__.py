"""SBNet: convolution at the active blocks of an image."""
