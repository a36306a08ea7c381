"""The examples in docstrings."""

import doctest
import inspect

import sbnet_cupy


def doctests_of(module):
    """Every example of a module; decorated functions too, which doctest would pass over."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    globs = vars(sbnet_cupy) | vars(module)
    yield from finder.find(module, globs=globs)
    for name, value in vars(module).items():
        if hasattr(value, "__wrapped__") and value.__module__ == module.__name__:
            yield from finder.find(inspect.unwrap(value), f"{module.__name__}.{name}", globs=globs)
