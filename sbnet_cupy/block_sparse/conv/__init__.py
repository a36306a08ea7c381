"""Convolution at the active blocks."""
