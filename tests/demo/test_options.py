"""Options that have no effect on the input are refused by name."""

import argparse

import pytest

from sbnet_cupy.demo.inputs import DemoError
from sbnet_cupy.demo.options import check_options, grid_of

NONE = {"x_range": None, "y_range": None, "cell": None, "columns": None}


def options(path, **given):
    return argparse.Namespace(input=path, **NONE | given)


@pytest.mark.parametrize("path", [None, "sky.png", "bin", "scan.txt"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("x_range", [0, 1]), ("y_range", [0.0, 70.4]), ("cell", 0.1), ("cell", 0.0), ("columns", 4)],
)
def test_options_of_scans_do_not_go_with_pictures(path, name, value):
    flag = "--" + name.replace("_", "-")
    what = path or "the Hubble deep field"
    with pytest.raises(DemoError, match=f"^{flag} applies to a scan, and {what} is read as a pict"):
        check_options(options(path, **{name: value}))


@pytest.mark.parametrize("path", ["scan.pcd", "scan.npy", "scan.npz", "SCAN.PCD"])
def test_columns_do_not_go_with_files_that_say_them(path):
    with pytest.raises(DemoError, match=rf"^--columns applies to \.bin files; {path} says"):
        check_options(options(path, columns=4))


@pytest.mark.parametrize("columns", [2, 0, -1])
def test_points_have_three_columns_at_least(columns):
    with pytest.raises(DemoError, match=f"^--columns must be at least 3, .* got {columns}$"):
        check_options(options("scan.bin", columns=columns))


@pytest.mark.parametrize("path", [None, "sky.png", "scan.bin", "scan.pcd.bin", "scan.pcd"])
def test_what_is_not_given_is_not_refused(path):
    check_options(options(path))
    assert grid_of(options(path)) == {"x_range": (0.0, 70.4), "y_range": (-40.0, 40.0), "cell": 0.1}


def test_given_ranges_are_used():
    given = options("scan.bin", x_range=[1.0, 2.0], cell=0.0, columns=3)
    check_options(given)
    assert grid_of(given) == {"x_range": [1.0, 2.0], "y_range": (-40.0, 40.0), "cell": 0.0}
