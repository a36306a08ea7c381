"""What a result shows outside active blocks: written with the weights, by one kernel, or before."""

from ..core.arrays import same_memory
from ..core.copy_image import copy_image
from ..core.device import sm_count
from ..core.packed import Packed

_EACH = 256 * 4 * 16  # bytes that a thread block writes at once, as in background.cuh
_RESIDENT = 8  # thread blocks of a multiprocessor


def with_background(grid, nbytes):
    """Return a grid of two numbers with more rows, of thread blocks that write so many bytes."""
    columns, rows = grid
    more = min(-(-nbytes // _EACH), _RESIDENT * sm_count())
    return columns, rows + -(-more // columns)


def fill_background(base, out):
    """Write the base to ``out``, or zeros; nothing where they are the same memory."""
    if base is None:
        out.fill(0)
    elif base is not out and not same_memory(out, base):
        copy_image(base, out)


def background_of_pack(plan, weights, base, out):
    """Return what the kernel that packs weights is to write, (base, out) or None; else write it."""
    in_place = base is not None and (out is base or same_memory(out, base))
    if plan.background and not in_place and not isinstance(weights, Packed):
        return base, out
    fill_background(base, out)
    return None


def is_aligned(*specs):
    """Whether arrays of these specs, of which some may be None, begin at whole vectors."""
    return not any(spec is not None and spec.alignment for spec in specs)
