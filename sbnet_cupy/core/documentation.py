"""Docstrings of an adapter's functions, completed from those of the core's."""

import inspect
import re
from typing import TypeVar

_INSERTED = re.compile(r"^Parameters\n-+$.*?(?=^Examples\n-+$)", re.MULTILINE | re.DOTALL)
_PARAMETER = r"^{} :[^\n]*\n(?:    [^\n]*\n)+"
_LISTED = r", {}(?=(?:, \w+)*$)"
_EXAMPLES = re.compile(r"^Examples\n-+$", re.MULTILINE)
PACKED_ONCE = r"\s+On a\s+GPU an array is[^.]*:class:`PackedWeights` once[^.]*\."
NO_PACKED = (  # for ``without``: of an adapter that takes weights as arrays alone
    r",? or PackedWeights",
    PACKED_ONCE,
    r"; None where ``w`` is\s+a PackedWeights, which has its own",
    r"\s+That and the format of a\s+PackedWeights hold without being given\.",
)
_Function = TypeVar("_Function")
_WORDS = {  # a space is any white space
    r"C-contiguous; a NumPy array that is not is copied\.": "Copied if it is not contiguous.",
    ",? (or )?(an array|the mask) is not contiguous": "",
    ", in the library and": " and",
    "In the library and on": "On",
    "different libraries or": "different",
    "CuPy array": "CUDA array",
    ":(func:`(?=conv2d|fused_)|(class|meth|attr):`)": r":\1sbnet_cupy.",
}


def documented_as(core, array, without=()):
    """Return a decorator that completes a docstring from that of a function of the core.

    A docstring of the adapter says what differs, and ends in examples. All that stands between
    these two in the core's (parameters, result, errors, source) is put between them, in words for
    arrays of one library, which are copied where they are not contiguous. Parameters that the
    adapter's function does not have are left out.

    Parameters
    ----------
    core : function
        That of the same name and signature.
    array : str
        What the library calls an array.
    without : sequence of str
        Regular expressions of what the core's docstring says and the adapter's does not.

    Examples
    --------
    >>> def double(x):
    ...     '''Double an array.
    ...
    ...     Parameters
    ...     ----------
    ...     x : array
    ...
    ...     Examples
    ...     --------
    ...     '''
    >>> @documented_as(double, "tensor")
    ... def double(x):
    ...     '''Double a tensor.
    ...
    ...     Examples
    ...     --------
    ...     '''
    >>> print(double.__doc__.replace("-", "~"))
    Double a tensor.
    <BLANKLINE>
    Parameters
    ~~~~~~~~~~
    x : tensor
    <BLANKLINE>
    Examples
    ~~~~~~~~
    """

    def complete(function: _Function) -> _Function:
        if function.__doc__ is None:  # python -OO
            return function
        own, inserted = inspect.getdoc(function), _INSERTED.search(inspect.getdoc(core)).group()
        own_names = inspect.signature(function).parameters
        missing = inspect.signature(core).parameters.keys() - own_names.keys()
        for phrase in (*map(_PARAMETER.format, missing), *map(_LISTED.format, missing), *without):
            inserted = re.sub(phrase, "", inserted, flags=re.MULTILINE | re.DOTALL)
        words = {
            **_WORDS,
            r"\ban array\b(?!-like)": f"a {array}",
            # These are of NumPy, whatever the library.
            r"(NumPy array|array-like)|\barray": lambda found: found.group(1) or array,
        }
        for phrase, instead in words.items():
            inserted = re.sub(phrase.replace(" ", r"\s+"), instead, inserted)
        function.__doc__ = _EXAMPLES.sub(lambda found: inserted + found.group(), own)
        return function

    return complete
