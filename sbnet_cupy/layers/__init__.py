"""Compositions of the ops: block-sparse convolution, the residual unit, and masks."""
