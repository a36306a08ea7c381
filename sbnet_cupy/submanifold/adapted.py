"""What an adapter computes in place of the core, for arrays of its library."""

from ..core.arrays import library_of

ADAPTED = {}  # (name of a library, of a function) -> the adapter's function, which enters it


def adapted(name, function, array):
    """Return the function of this name that is for an array: the core's, or its adapter's."""
    library = library_of(array)
    return function if library is None else ADAPTED.get((library.name, name), function)
