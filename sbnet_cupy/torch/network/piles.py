"""Images that ``torch.stack`` put behind one another, along a new first dimension.

Networks add up the levels of a pyramid so: ``torch.stack(levels).sum(0)``. The first dimension is
not that of images any more, as a StackTensor's is. A Pile knows what reduces the new one, and
becomes whole images for all else.
"""

import torch

from .._dispatch_state import plainly, without_memory
from . import tensor as T
from .aten import public
from .handlers import is_of_shape
from .trees import tree_map

_REDUCTIONS = {
    getattr(space, name)
    for name in ("sum", "mean", "prod", "amax", "amin", "max", "min")
    for space in (torch, torch.Tensor)
}


class Pile(torch.Tensor):
    """Stands for ``[K, N, C, H, W]``, K images as those of the StackTensor ``like``.

    ``value`` is ``[K, M, C, h, w]``, a copy of their stacks. There is no other memory.
    """

    @staticmethod
    def __new__(cls, value, like, reach):
        """Make one of stacks."""
        shape = (value.shape[0], *T.shape(like))
        self = without_memory(cls, shape, value.dtype, value.device, value.requires_grad)
        self._value, self._like, self._reach, self._images = value, like, reach, None
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Run a function of PyTorch that was called with one."""
        func, args, kwargs = public(func, args, kwargs or {})
        if is_of_shape(func):
            return plainly(func, *args, **kwargs)
        pile = args[0] if args else None
        if type(pile) is Pile and pile._takes(func, *args[1:], **kwargs):
            return pile._reduced(func, *args[1:], **kwargs)
        return func(*tree_map(as_images, args), **tree_map(as_images, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Run an operator that was called below PyTorch's functions."""
        return func(*tree_map(as_images, args), **tree_map(as_images, kwargs or {}))

    def _takes(self, func, *args, **kwargs):
        """Whether it knows a function: of the stacks, while the call that made it runs."""
        if func not in _REDUCTIONS or self._images is not None or T.is_kept(self._like):
            return False
        return _is_first(1 + T.dims(self._like), *args, **kwargs)

    def _reduced(self, func, *args, **kwargs):
        table = T.facts(self._like)[0]

        def reduce(*_):
            return table.compute(func, self._value, *args, **kwargs)

        if table.trace is None:
            result = reduce()
        else:
            result = table.trace.around(func.__name__, reduce, func, (self._like,), {})
        if isinstance(result, torch.Tensor):
            return T.wrap(result, self._like, reach=self._reach)
        return type(result)([T.wrap(part, self._like, reach=self._reach) for part in result])

    def images(self):
        """Return the whole images, which it stands for from now on, whatever is written to them."""
        if self._images is None:
            table = T.facts(self._like)[0]
            parts = table.compute(torch.Tensor.unbind, self._value)
            parts = [T.wrap(part, self._like) for part in parts]
            self._images = T.on_image(torch.stack, "stack", (parts,), {})
        return self._images


def as_images(x):
    """Return the images of a Pile; anything else as it is."""
    return x.images() if type(x) is Pile else x


def _is_first(count, dim=None, keepdim=False, *, dtype=None, axis=None, **rest):
    """Whether a reduction of ``count`` dimensions is one along the first, which it leaves out."""
    dim = axis if dim is None else dim
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return type(dim) is int and dim in (0, -count) and keepdim is False and not rest
