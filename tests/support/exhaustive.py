"""Which of many cases a plain ``pytest`` runs; the others are marked exhaustive."""

import itertools

import pytest


def thinned(cases, every, first=0):
    """Return the cases as parameters; all but each ``every``-th, from ``first`` on, are exhaustive.

    Give a number that shares no factor with the lengths of the loops that made the cases, so that
    what is left has every dtype and every layout.
    """
    return [_parameter(number % every == first, case) for number, case in enumerate(cases)]


def thinned_product(every, *loops):
    """Return all combinations, for as many names as there are loops; thinned likewise."""
    return [
        _parameter(number % every == 0, *case)
        for number, case in enumerate(itertools.product(*loops))
    ]


def all_but(cases, chosen):
    """Return the cases as parameters; those that are not among the chosen are exhaustive."""
    return [_parameter(case in chosen, case) for case in cases]


def _parameter(usual, *values):
    return pytest.param(*values, marks=[] if usual else pytest.mark.exhaustive)
