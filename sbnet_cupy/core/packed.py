"""Packed: weights that are laid out for a kernel once, and kept for many calls."""

import functools
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import DeviceError
from .arrays import ArrayContainer, array_function, device_of_all, empty, namespace, whole_pieces
from .graph_memory import is_capturing, keep_if_capturing
from .launch import enqueue
from .operator import Plan
from .spec import group_of, spec_of

_LOCK = threading.RLock()  # of threads that pack the same weights at once, one packs


class Packed(ArrayContainer):
    """Base of PackedWeights and PackedBottleneck: what was packed, by how it was packed."""

    instead = "pass the arrays that it was made of"  # what the error says of one that is no array

    def __init__(self):
        self._packed = {}  # how -> (packed, function that packs)
        self._entered = None  # these weights as the door lets them in, if they are not native

    def refresh(self):
        """Pack again, into the same memory, on the current stream; return nothing.

        Graphs that were captured with these weights use the new values from then on.
        """
        _refresh(self)

    @functools.cached_property
    def _device(self):
        """Where the arrays are, which does not change."""
        return device_of_all(self._arrays())

    @functools.cached_property
    def specs(self):
        """The specs of the arrays to pack, which do not change, as a SpecGroup."""
        return group_of(tuple(map(spec_of, self._given())))

    def _given(self):
        """Return the arrays to pack; some may be None."""
        raise NotImplementedError

    def _entered_with(self, function):
        """Return the same weights with ``function`` applied to their arrays."""
        raise NotImplementedError

    def _arrays(self):
        return tuple(array for array in self._given() if array is not None)

    def _map_arrays(self, function):
        """Map the arrays once: what is packed must outlive the call."""
        if self._entered is None:
            with _LOCK:
                if self._entered is None:
                    self._entered = self._entered_with(lambda a: a if a is None else function(a))
        return self._entered

    def kept(self, how):
        """Return what was packed in this form, or None."""
        return self._packed[how][0] if how in self._packed else None

    def keep(self, how, packed):
        """Take what was packed in this form elsewhere, of these arrays."""
        self._packed[how] = packed, None

    def packed(self, how, pack):
        """Return what ``pack`` makes of the weights: the same memory every time."""
        if how not in self._packed:
            with _LOCK:
                if how not in self._packed:
                    self._packed[how] = self._pack(pack), pack
        return self._packed[how][0]

    def _pack(self, pack):
        """Pack for the first time."""
        first = self._given()[0]
        if is_capturing(first):
            raise DeviceError(
                f"the {type(self).__name__} must be packed before a graph is captured; make "
                "the same call once before"
            )
        packed = pack(*self._given())
        xp = namespace(first)
        if xp is not np:  # once, so that other streams may use them too
            xp.cuda.get_current_stream().synchronize()
        return packed


@dataclass(eq=False, slots=True)
class PackedPlan(Plan):
    """The plan of a call whose weights are packed before they are read.

    Among the ``operands`` of the launch, the packed weights come after the last array.

    Parameters
    ----------
    pack : Pack
        What packs them.
    how : tuple
        Names the form: what was packed for one plan will do for any plan of the same form.
    weights : tuple of int
        Positions of the arrays that ``pack`` takes, in its order.
    early_launch : object, optional
        The same launch for a call that packs, which begins before the kernel that packs has ended.
    background : bool
        Whether ``pack`` can write on the way what must be in the result before ``launch``.
    """

    pack: "Pack | None" = None
    how: tuple = ()
    weights: tuple = ()
    early_launch: Any = None
    background: bool = False


class Pack:
    """A kernel that packs weights: ``kernels`` arrays of their own dtype, then tables of one.

    That is float32, unless the kernel reads another (:func:`dtype_of_tables`).

    A kernel with ``background`` also takes two pointers, which may be null: what lies below the
    result, and the result. It copies the one to the other, or writes zeros.
    """

    def __init__(self, launch, nbytes, kernels, tables, dtype=np.float32, background=False):
        self.launch = launch  # of all these arrays, contiguous, and the memory to pack into
        self.nbytes, self.kernels, self.dtype = nbytes, kernels, np.dtype(dtype)
        self.background = background
        self._dtypes = (None,) * kernels + (dtype,) * tables

    def scratch(self, *specs):
        """Return the bytes that a call allocates on arrays of these specs: result and copies."""
        total = whole_pieces(self.nbytes)
        for spec, dtype in zip(specs, self._dtypes, strict=True):
            if spec is not None and _is_copied(spec.dtype, spec.contiguous, dtype):
                total += whole_pieces(spec.size * np.dtype(dtype or spec.dtype).itemsize)
        return total

    def __call__(self, *arrays, background=None):
        """Pack arrays, of which tables may be None; return the bytes.

        One more array is the memory to use; without it there is fresh memory. ``background`` is
        what lies below the result, or None, and the result, if the kernel is to write it.
        """
        given = arrays[: len(self._dtypes)]
        if len(arrays) > len(given):
            packed = arrays[-1]
        else:
            packed = empty((self.nbytes,), np.uint8, given[0])
            keep_if_capturing(packed)
        read = (_laid_out(a, dtype) for a, dtype in zip(given, self._dtypes, strict=True))
        if self.background:
            background = background or (None, None)
        self.launch(*read, packed, *(background or ()))
        return packed


def dtype_of_tables(own, tables):
    """Return the dtype in which a kernel reads tables, which are specs or None, as they are.

    It is that of the weights, their ``own``, if all tables have it, otherwise float32.
    """
    return own if all(t is None or t.dtype == own for t in tables) else np.dtype(np.float32)


def _laid_out(array, dtype):
    """Return an array as a kernel that packs reads it: itself, or a C-contiguous copy.

    ``dtype`` None is the array's own.

    A copy that a captured graph reads is kept.
    """
    if array is None or not _is_copied(array.dtype, array.flags.c_contiguous, dtype):
        return array
    copy = empty(array.shape, dtype or array.dtype, array)
    keep_if_capturing(copy)
    enqueue(copy.__setitem__, ..., array)
    return copy


def _is_copied(own, contiguous, dtype):
    """Whether an array of a dtype of its ``own`` is copied to be read in ``dtype``, or in that."""
    return not contiguous or (dtype is not None and own != dtype)


@partial(array_function, takes_strided=True)
def _refresh(weights):
    """Pack again all that was packed, where it is."""
    for packed, pack in weights._packed.values():
        pack(*weights._given(), packed)
