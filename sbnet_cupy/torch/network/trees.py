"""The tensors in what a call takes and returns, in lists, tuples and dicts, as PyTorch finds them.

A ``torch.Size`` is no tuple of parts here: functions such as ``Tensor.new`` tell one from a tuple.
"""

import functools

import torch
from torch.utils import _pytree
from torch.utils._pytree import tree_unflatten  # noqa: F401  (for those who flatten)


def _is_size(value):
    return isinstance(value, torch.Size)


tree_map = functools.partial(_pytree.tree_map, is_leaf=_is_size)
tree_leaves = functools.partial(_pytree.tree_leaves, is_leaf=_is_size)
tree_flatten = functools.partial(_pytree.tree_flatten, is_leaf=_is_size)
