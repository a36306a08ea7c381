"""Where kernels write their results: side by side, where a network joins them along channels."""

from . import cuda


def place(like, table, block, channels):
    """Return memory for a result, a stack ``[M, C, *block]`` of the dtype of ``like``.

    Its pixels may lie further apart than it has channels: :func:`cuda.pitch_of` it.
    """
    return cuda.new_stack(like, like.shape[0], block, channels)
