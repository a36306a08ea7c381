"""Read the points of a LiDAR scan: raw float32 (.bin), NumPy (.npy, .npz) or PCD files."""

from pathlib import Path

import numpy as np

from .inputs import DemoError, check_file
from .pcd_file import points_of_pcd
from .scan_columns import check_plausible, check_whole

DEFAULT_COLUMNS = {".pcd.bin": 5, ".bin": 4}  # by the end of the name: nuScenes, KITTI
SUFFIXES = (".bin", ".npy", ".npz", ".pcd")
_MOST_COLUMNS = 64  # an array with more is taken for one that lies on its side


def is_scan(path):
    """Whether a file is read as a scan, which its name decides."""
    return str(path).lower().endswith(SUFFIXES)


def is_raw(path):
    """Whether a scan is raw float32, whose number of columns no file header tells."""
    return str(path).lower().endswith(".bin")


def read_points(path, columns=None):
    """Read a scan as float [P, 4]: x, y, z in metres, and intensity, 0 where there is none.

    ``columns`` is the number of values that a .bin file has for each point. Without it, the name
    decides, and the values must look like it. Points that are not finite are left out.
    """
    check_file(path)
    try:
        if is_raw(path):
            table = _raw(path, columns)
        elif str(path).lower().endswith(".pcd"):
            table = points_of_pcd(Path(path).read_bytes())
        else:
            table = _table(_numpy_array(path))
    except DemoError as error:
        raise DemoError(f"{path} {error}") from error
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # np.load raises anything at all for a broken file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DemoError(f"cannot read {path} as a scan: {reason}") from error
    return _finite(path, table)


def _raw(path, columns):
    data = Path(path).read_bytes()
    default = columns is None
    if default:
        columns = next(n for end, n in DEFAULT_COLUMNS.items() if str(path).lower().endswith(end))
    check_whole(data, columns, default)
    values = np.frombuffer(data, "<f4")
    if default:
        check_plausible(values, columns)
    return _table(values.reshape(-1, columns))


def _numpy_array(path):
    """Return the array of a .npy file, or the one of a .npz file that holds the points."""
    with Path(path).open("rb") as file:  # np.load does not close what it cannot read
        loaded = np.load(file, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else _points_of(loaded)


def _points_of(arrays):
    """Return the points among the arrays of a .npz file."""
    names = set(arrays.files)
    if len(names) == 1 or "points" in names:
        return arrays["points" if "points" in names else names.pop()]
    if {"x", "y", "z"} <= names:
        return np.stack([arrays[name].ravel() for name in _present(names)], axis=1)
    raise DemoError(
        "must hold one array, or one named points, or x, y and z, "
        f"got {', '.join(sorted(names)) or 'none'}"
    )


def _present(names):
    return [name for name in ("x", "y", "z", "intensity") if name in names]


def _table(array):
    """Return an array of points as float [P, 3 or 4]."""
    if array.dtype.names and {"x", "y", "z"} <= set(array.dtype.names):
        array = np.stack([array[name].ravel() for name in _present(array.dtype.names)], axis=1)
    if array.dtype.kind not in "fiu":
        raise DemoError(f"must hold numbers, got {array.dtype}")
    if array.ndim != 2 or array.shape[1] < 3:
        raise DemoError(f"must hold an array [points, 3 or more columns], got {array.shape}")
    if array.shape[1] > _MOST_COLUMNS:
        raise DemoError(f"must hold a row for each point, got {array.shape}; transpose the array")
    dtype = np.float64 if array.dtype.itemsize > 4 else np.float32
    return array[:, :4].astype(dtype)


def _finite(path, table):
    """Return the rows whose values are all finite, with a column for the intensity."""
    finite = np.isfinite(table).all(axis=1)
    if not finite.any():
        raise DemoError(
            f"{path} must hold points with finite x, y and z, got {len(table):,} points, all with "
            "a NaN or an infinity"
            if len(table)
            else f"{path} must hold points, got none"
        )
    points = np.zeros((np.count_nonzero(finite), 4), table.dtype)
    points[:, : table.shape[1]] = table[finite]
    return points
