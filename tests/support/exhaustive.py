"""Which of many cases a plain ``pytest`` runs; the others are marked exhaustive."""

import pytest


def thinned(cases, every, first=0):
    """Return the cases as parameters; all but each ``every``-th, from ``first`` on, are exhaustive.

    Give a number that shares no factor with the lengths of the loops that made the cases, so that
    what is left has every dtype and every layout.
    """
    return [
        pytest.param(case, marks=[] if number % every == first else pytest.mark.exhaustive)
        for number, case in enumerate(cases)
    ]


def all_but(cases, chosen):
    """Return the cases as parameters; those that are not among the chosen are exhaustive."""
    return [
        pytest.param(case, marks=[] if case in chosen else pytest.mark.exhaustive) for case in cases
    ]
