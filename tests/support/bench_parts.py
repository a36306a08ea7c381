"""The benchmarks as their tests see them: their modules, and rows."""

import importlib
import math
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def part(name):
    """Import a module of the benchmarks, such as ``harness.rows``."""
    return importlib.import_module(f"benchmarks.{name}")


def make_row(**changes):
    values = dict.fromkeys(part("harness.rows").COLUMNS, "")
    numbers = {
        "density": 0.1, "blocks": 9, "us": 10.0, "us_p10": 9.0, "us_p90": 11.0, "bytes": 10**7,
        "gb_per_s": 1000.0, "percent_of_copy": 50.0, "original_us": None, "ratio_to_original": None,
        "dense_us": None, "ratio_to_dense": None,
    }  # fmt: skip
    fixed = {"gpu": "NVIDIA H200", "implementation": "sbnet_cupy", "timed_by": "graph"}
    return part("harness.rows").Row(**values | numbers | fixed | changes)


def verdicts(*rows):
    return [(v.target.text, v.value, v.met) for v in part("harness.targets").evaluate(rows)]


def check_rows(rows, implementations):
    """Every number is finite and positive, and rates are bytes over time."""
    for row in rows:
        for name in ("us", "us_p10", "us_p90", "bytes", "gb_per_s", "percent_of_copy"):
            value = getattr(row, name)
            if value is not None:
                assert math.isfinite(value) and value > 0, (name, row)
        assert row.us_p10 <= row.us <= row.us_p90
        assert row.gpu and row.numpy == np.__version__ and row.commit
        if row.bytes and row.op != "copy":
            assert row.gb_per_s == pytest.approx(row.bytes / row.us / 1e3, rel=1e-3)
    assert implementations <= {row.implementation for row in rows}
