"""Networks on a stack of blocks: the table, the tensor that modules see, and what runs on it."""

from . import (  # noqa: F401  (they register handlers)
    norms,
    pointwise,
    resample,
    scales,
    shapes,
    windows,
)
from .tensor import StackTensor

__all__ = ["StackTensor"]
