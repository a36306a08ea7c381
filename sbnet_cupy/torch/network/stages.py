"""Which blocks an image has that a function made of whole images: those of a stage, or none.

A size alone does not tell: the lower half of an image is as large as the image at half the scale,
and what lies in its first block is something else. So functions that resample the whole picture are
known by their names. What others make has another size because pixels were cut off or joined, and
no blocks; except by a row or a column, as after padding to an even size, where a stage has its
size.
"""

import operator

# Functions whose result shows the whole picture, in any size.
_WHOLE = {
    "interpolate", "upsample", "upsample_nearest", "upsample_bilinear", "adaptive_avg_pool2d",
    "_adaptive_avg_pool2d", "adaptive_max_pool2d", "adaptive_max_pool2d_with_indices",
    "fractional_max_pool2d", "fractional_max_pool2d_with_indices", "max_unpool2d",
}  # fmt: skip
# Functions of windows, and where their arguments have strides: in front of other places, names.
_WINDOWS = {
    "conv2d": (3, "stride"),
    "max_pool2d": (2, "stride", 1, "kernel_size"),
    "max_pool2d_with_indices": (2, "stride", 1, "kernel_size"),
    "avg_pool2d": (2, "stride", 1, "kernel_size"),
    "lp_pool2d": (3, "stride", 2, "kernel_size"),
}


def block_of(image, like, steps):
    """Return the block of an image that a function made of one with some facts, or None.

    Parameters
    ----------
    image : tensor
        With a dimension of images, and with height and width where ``like`` has them.
    like : (table, block, size, hw, reach)
        Those of an activation that the function was given.
    steps : (int, int), "any" or None
        What :func:`steps_of` returned for the call.
    """
    table, block, size, hw, _ = like
    new = (image.shape[hw[0]], image.shape[hw[1]])
    if new == size:
        return block
    if image.dim() != 4 or hw != (2, 3):
        return None
    if steps is None:
        return block if table.resumes(block, size, new) else None
    if steps == "any":
        return table.stage(block, size, new)
    if any(b % s for b, s in zip(block, steps, strict=True)):
        return None
    after = tuple(b // s for b, s in zip(block, steps, strict=True))
    each = zip(size, steps, new, strict=True)
    is_all = all(n in (old // s, -(-old // s)) for old, s, n in each)
    if not is_all and table.block_of.get(new) != after:
        return None
    return after if table.fits(after, new) else None


def steps_of(name, args, kwargs, like):
    """Return how a function resamples the picture of ``like``.

    That is by how many pixels each pixel of its result is further than the one before, down and
    across; "any" where it shows the whole picture in any size; None where it does something else.
    """
    if (args[0] if args else kwargs.get("input")) is not like:
        return None
    if name in _WHOLE:
        return "any"
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
        return "any" if isinstance(repeats, int) else None
    if name == "deform_conv2d":  # torchvision's, with a number for each side
        return tuple(args[5:7]) if len(args) > 6 else None
    if name == "__getitem__":
        return _steps_of_index(args[1])
    return _strides(args, kwargs, *_WINDOWS[name]) if name in _WINDOWS else None


def _strides(args, kwargs, *places):
    """Return the strides of a call: those given, or the kernel's size, or 1."""
    for at, name in zip(places[::2], places[1::2], strict=True):
        found = args[at] if len(args) > at else kwargs.get(name)
        if found is None:
            continue
        try:
            found = (operator.index(found),)
        except TypeError:  # a sequence
            found = tuple(map(int, found))
        if found:
            return found * (2 // len(found))
    return 1, 1


def _steps_of_index(index):
    """Return the steps of slices of height and width that go on to the ends, or None."""
    if not isinstance(index, tuple) or len(index) != 4:
        return None
    if not all(isinstance(i, slice) and i.stop is None for i in index[2:]):
        return None
    steps = tuple(i.step or 1 for i in index[2:])
    starts = (i.start or 0 for i in index[2:])
    return steps if all(0 <= a < s for a, s in zip(starts, steps, strict=True)) else None
