"""The residual unit at the active blocks."""
