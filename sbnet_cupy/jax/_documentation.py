"""Docstrings of functions for JAX, completed from the core's."""

import functools

from ..core.documentation import PACKED_ONCE, documented_as

_WITHOUT = (  # XLA's own operations on arrays that are always contiguous
    r"^Source: .*?\n\n",
    r" C-contiguous\.(?=\n)",
    r",? or (``x`` is )?not contiguous",
    PACKED_ONCE,
    r" and library(?= of)",
)
documented = functools.partial(documented_as, array="jax.Array", without=_WITHOUT)
