"""What has left the stack: by which functions, and what ``outside`` means for it.

An image that is not cut into whole blocks has no blocks that are not active. So there is nothing
to fill, and a network of which that is the result is refused where something is to be filled.
"""

import inspect
import sys

import torch

_IS_COPY = sys.version_info < (3, 13)  # whether the f_locals of a function's frame are one
_SEES_COPY = {"locals", "vars", "dir", "eval", "exec"}  # functions that give it, or read it


def running_module(known=None):
    """Return the innermost module of which a method is running, or None.

    ``known`` are the ids of those that count; None are all.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = _self_of(frame)
        if isinstance(owner, torch.nn.Module) and (known is None or id(owner) in known):
            return owner
        frame = frame.f_back
    return None


def _self_of(frame):
    """Return what a frame calls self, or None.

    The copy of a function's variables, which its frame would keep, is emptied: what waits asks
    whether what it was made of is still there. Not where the function or a debugger may see it.
    """
    variables, code = frame.f_locals, frame.f_code
    owner = variables.get("self")
    is_own = _IS_COPY and code.co_flags & inspect.CO_OPTIMIZED and sys.gettrace() is None
    if is_own and not _SEES_COPY.intersection(code.co_names):
        variables.clear()
    return owner


def watch(table, outside):
    """Note from now on what leaves the stack, if something else than 0 is wanted outside blocks.

    Not always, as that takes time.
    """
    table.left = None if is_zero(outside) else {}


def note(table, name):
    """Note that what a function made, or a part of it, is not on the stack."""
    if table.left is not None:
        table.left[name, running_module()] = None


def is_zero(outside):
    """Whether 0 is wanted outside active blocks, as is the default."""
    return not isinstance(outside, str | torch.Tensor) and outside == 0


def why_not_filled(shapes, functions, model, outside):
    """Return why ``outside`` cannot be in some results that are not on the stack, or None.

    Parameters
    ----------
    shapes : list of shapes
        Those of the results. Values of whole images have nothing outside blocks.
    functions : iterable of (str, Module or None)
        Those by which anything left, and the modules that called them.
    model : Module
        The network.
    outside : number, "bias" or tensor
        What is wanted.
    """
    shapes = [tuple(shape) for shape in shapes if _has_pixels(shape)]
    if not shapes or not functions:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    named = [(func, names.get(id(module))) for func, module in functions]
    made = ", ".join(f"{func} of {name!r}" if name else func for func, name in named)
    got = "a tensor" if isinstance(outside, torch.Tensor) else repr(outside)
    return (
        f"outside must be 0 for a result that is not cut into blocks, got {got} for one of shape "
        f"{shapes[0]}; it left the stack in {made}: use a block_size that is a multiple of all "
        "strides together, or outside=0, and write to the result what it is to hold there"
    )


def _has_pixels(shape):
    """Whether a tensor holds more than a value for each image and channel."""
    return len(shape) > 2 and sum(n > 1 for n in shape[1:]) > 1
