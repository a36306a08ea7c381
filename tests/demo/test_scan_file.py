"""Scans of every format and number of columns: read as they are, or refused with the reason."""

import numpy as np
import pytest

from sbnet_cupy.demo.inputs import DemoError
from sbnet_cupy.demo.scan_columns import likely_columns
from sbnet_cupy.demo.scan_file import is_scan, read_points
from support.assertions import assert_same
from support.demo_files import lidar, write_scan


def with_intensity(table):
    """What a reader returns for a table of finite points: four columns."""
    points = np.zeros((len(table), 4), table.dtype)
    points[:, : min(table.shape[1], 4)] = table[:, :4]
    return points


# --- raw float32 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "columns"), [("a.bin", 4), ("b.pcd.bin", 5), ("C.PCD.BIN", 5)])
def test_the_name_decides_the_columns(name, columns, tmp_path):
    table = lidar(columns)
    table.tofile(tmp_path / name)
    assert is_scan(tmp_path / name)
    assert_same(read_points(tmp_path / name), table[:, :4])


@pytest.mark.parametrize(("name", "columns"), [("a.bin", 5), ("a.bin", 3), ("a.pcd.bin", 4)])
def test_a_scan_of_other_columns_is_not_read_in_stripes(name, columns, tmp_path):
    lidar(columns).tofile(tmp_path / name)
    with pytest.raises(DemoError, match=rf"does not look like .* try --columns {columns} "):
        read_points(tmp_path / name)


@pytest.mark.parametrize("columns", range(3, 7))
def test_columns_are_read_as_asked(columns, tmp_path):
    table = lidar(columns)
    table.tofile(tmp_path / "scan.bin")
    assert_same(read_points(tmp_path / "scan.bin", columns), with_intensity(table))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("given", [4, 5])
@pytest.mark.parametrize("columns", range(3, 7))
def test_the_columns_show_in_the_values(columns, given, seed):
    table = lidar(columns, seed=seed)
    table[::7, 1] = np.nan  # no return
    assert likely_columns(table.ravel().astype(float), given) == columns
    if columns > 3:  # without intensities, points in random order differ less
        np.random.default_rng(seed).shuffle(table)
        assert likely_columns(table.ravel().astype(float), given) == columns


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((5000, 4)),
        np.full((5000, 4), np.nan),
        np.random.default_rng(0).normal(size=(5000, 4)),
        np.random.default_rng(0).uniform(0, 1e4, (300, 4)),
        lidar(4, turns=2),
        lidar(4) * [1, 1, 1, 0],
        lidar(4)[np.argsort(lidar(5)[:, 4] % 2, kind="stable").reshape(2, -1).T.ravel()],
    ],
    ids=["zeros", "nan", "one law", "one law, few", "few", "no intensity", "two sensors in turns"],
)
def test_points_of_four_columns_are_believed(table):
    assert likely_columns(np.ravel(table).astype(float), 4) == 4


def test_points_that_are_not_finite_are_left_out(tmp_path):
    assert len(read_points(write_scan(tmp_path / "scan.bin"))) == 3998


def random_bits(folder):
    np.random.default_rng(0).integers(0, 2**32, 8000, np.uint32).tofile(folder / "s.bin")


def doubles(folder):
    lidar(4).astype(np.float64).tofile(folder / "s.bin")


@pytest.mark.parametrize("write", [random_bits, doubles])
def test_other_data_is_no_scan(write, tmp_path):
    write(tmp_path)
    with pytest.raises(DemoError, match=r"s\.bin does not look like points of 4 float32 columns"):
        read_points(tmp_path / "s.bin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold whole points of 16 bytes .*, got 0 bytes$"),
        (bytes(1001), "must hold whole points of 16 bytes .*, got 1001 bytes$"),
        (bytes(20 * 13), "got 260 bytes; --columns 5 would divide it"),
        (b"x,y,z\n1,2,3\n" * 4, "must hold raw float32 values, got text"),
        (np.full((5, 4), np.nan, "f4").tobytes(), "finite x, y and z, got 5 points, all with a"),
        (np.full((5, 4), np.inf, "f4").tobytes(), "finite x, y and z, got 5 points, all with a"),
    ],
)
def test_a_bad_raw_file_says_why(content, message, tmp_path):
    (tmp_path / "s.bin").write_bytes(content)
    with pytest.raises(DemoError, match=message):
        read_points(tmp_path / "s.bin")


# --- NumPy files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [3, 4, 5, 6])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<f2", "<i4", "u1"])
def test_npy(columns, dtype, tmp_path):
    table = np.asfortranarray(abs(lidar(columns)).astype(dtype))
    np.save(tmp_path / "s.npy", table)
    wanted = np.float64 if np.dtype(dtype).itemsize > 4 else np.float32
    assert_same(read_points(tmp_path / "s.npy"), with_intensity(table.astype(wanted)))


def test_npy_with_fields(tmp_path):
    table = np.zeros(9, [("t", "f8"), ("z", "f4"), ("x", "f4"), ("y", "f4"), ("intensity", "u1")])
    table["x"], table["y"], table["z"], table["intensity"] = 1, 2, 3, 4
    np.save(tmp_path / "s.npy", table)
    assert_same(read_points(tmp_path / "s.npy"), np.tile(np.float32([1, 2, 3, 4]), (9, 1)))


@pytest.mark.parametrize(
    "arrays",
    [
        {"anything": lidar(4)},
        {"points": lidar(4), "labels": np.zeros(3)},
        {**dict(zip(("x", "y", "z", "intensity"), lidar(4).T, strict=True)), "t": np.zeros(2)},
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(arrays, save, tmp_path):
    save(tmp_path / "s.npz", **arrays)
    assert_same(read_points(tmp_path / "s.npz"), lidar(4))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (lidar(4)[:, :2], r"must hold an array \[points, 3 or more columns\], got \(1920, 2\)"),
        (lidar(4)[:, 0], "3 or more columns"),
        (np.zeros((4, 5, 3)), r"3 or more columns\], got \(4, 5, 3\)"),
        (lidar(4).T.copy(), r"a row for each point, got \(4, 1920\); transpose"),
        (lidar(4) > 0, "must hold numbers, got bool"),
        (np.array([{}, {}]), "cannot read .* as a scan: Object arrays cannot be loaded"),
        (lidar(4)[:0], "must hold points, got none"),
        (lidar(4) * np.nan, "got 1,920 points, all with a NaN"),
        ({"a": lidar(4), "b": lidar(4)}, "or one named points, or x, y and z, got a, b"),
        ({}, "got none"),
    ],
)
def test_a_bad_numpy_file_says_why(arrays, message, tmp_path):
    path = tmp_path / ("s.npz" if isinstance(arrays, dict) else "s.npy")
    if isinstance(arrays, dict):
        np.savez(path, **arrays)
    else:
        np.save(path, arrays)
    with pytest.raises(DemoError, match=message):
        read_points(path)


@pytest.mark.parametrize("name", ["s.npy", "s.npz", "s.pcd"])
@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04 cut off", bytes(4000)])
def test_a_broken_file_is_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DemoError, match=rf"{name} "):
        read_points(tmp_path / name)
