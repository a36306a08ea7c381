"""The layers by SparseConvNet's names, against numbers that SparseConvNet itself computed.

Places, features, all gradients and running statistics, by the same names of parameters. Sums of
multiples of 1/4 are exact in any order; where a layer divides, results differ by rounding.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest

from support.assertions import assert_close, assert_same
from support.scn_cases import CASES

RECORDED = Path(__file__).with_name("sparseconvnet.npz")
# Sums of at most 9 taps of 10 channels, or statistics of fewer points, in ten layers at most.
TERMS = 10 * 9 * 10


@pytest.fixture(scope="module")
def recorded():
    """Return {case: {part: array}}."""
    found = {}
    with np.load(RECORDED) as arrays:
        for key in arrays.files:
            case, _, part = key.partition("/")
            found.setdefault(case, {})[part] = arrays[key]
    return found


@pytest.fixture(scope="module")
def scn(torch):
    return importlib.import_module("sbnet_cupy.torch.scn")


def test_every_case_is_recorded(recorded):
    assert set(recorded) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_what_sparseconvnet_computes(torch, scn, device, recorded, name):
    case, expected = CASES[name], recorded[name]
    found = case.run(name, torch, scn, device)
    assert set(found) == set(expected)
    assert any(expected[part].any() for part in expected if part != "places")
    for part, wanted in expected.items():
        if case.exact or part == "places" or not wanted.size:
            assert_same(found[part], wanted, signed_zero=False)
        else:
            assert_close(found[part], wanted, terms=TERMS, dtype="float32")
