"""Networks on a stack of blocks: the table, the tensor that modules see, and what runs on it."""

from . import norms, pointwise, resample, shapes, windows  # noqa: F401  (they register handlers)
from .tensor import StackTensor

__all__ = ["StackTensor"]
