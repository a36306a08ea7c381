"""Which of many cases a plain ``pytest`` runs; the others are marked exhaustive.

``sanitized`` adds cases that CI runs under the sanitizers, too, besides what a plain ``pytest``
runs; what these launch is compiled for every architecture.
"""

import collections
import itertools

import pytest


def thinned(cases, every, first=0, sanitized=None):
    """Return the cases as parameters; all but each ``every``-th, from ``first`` on, are exhaustive.

    Each ``sanitized``-th also runs under the sanitizers.

    Give a number that shares no factor with the lengths of the loops that made the cases, so that
    what is left has every dtype and every layout.
    """
    return [
        _parameter(number % every == first, case, sanitized=sanitized and number % sanitized == 0)
        for number, case in enumerate(cases)
    ]


def thinned_product(every, *loops, sanitized=None):
    """Return all combinations, for as many names as there are loops; thinned likewise."""
    return [
        _parameter(number % every == 0, *case, sanitized=sanitized and number % sanitized == 0)
        for number, case in enumerate(itertools.product(*loops))
    ]


def pairs(*loops):
    """Return combinations in which every two values of two loops meet: a small part of all.

    The first have the most pairs. Take them where what matters depends on two of the loops at
    most: a kernel's element and its vectors, a window and a border.
    """
    rows = [tuple(zip(loops, row, strict=True)) for row in _indices_of_pairs(loops)]
    return [tuple(values[i] for values, i in row) for row in rows]


def thinned_pairs(usual, *loops, sanitized=0):
    """Return :func:`pairs` as parameters; all but so many first are exhaustive."""
    return first_of(pairs(*loops), usual, sanitized)


def _indices_of_pairs(loops):
    """Return rows of indices: each has the most pairs that are missing, of the rarest values."""
    rows = list(itertools.product(*(range(len(values)) for values in loops)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen, uses = [], collections.Counter()

    def gain(row):
        return len(missing & _pairs(row)), -sum(uses[place] for place in enumerate(row))

    while missing:
        chosen.append(max(rows, key=gain))
        uses.update(enumerate(chosen[-1]))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(row):
    return set(itertools.combinations(enumerate(row), 2))


def first_of(cases, usual, sanitized=0):
    """Return tuples of arguments as parameters; all but so many first are exhaustive."""
    return [
        _parameter(number < usual, *case, sanitized=number < sanitized)
        for number, case in enumerate(cases)
    ]


def all_but(cases, chosen, sanitized=()):
    """Return the cases as parameters; those that are not among the chosen are exhaustive."""
    return [_parameter(case in chosen, case, sanitized=case in sanitized) for case in cases]


def _parameter(usual, *values, sanitized=False):
    marks = [pytest.mark.exhaustive] + ([pytest.mark.sanitized] if sanitized else [])
    return pytest.param(*values, marks=[] if usual else marks)
