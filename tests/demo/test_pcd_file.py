"""PCD files in their three encodings, and the compression of one of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy.demo.inputs import DemoError
from sbnet_cupy.demo.lzf import decompress
from sbnet_cupy.demo.scan_file import read_points
from support.assertions import assert_same
from support.demo_files import lidar

FIELDS = [("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("intensity", "<f4")]
WIDE = [
    ("label", "<u2"), ("_", "u1", 3), ("z", "<f8"), ("Y", "<f8"), ("x", "<f8"), ("normal", "<f4", 3)
]  # fmt: skip


def records(fields):
    """Points as records of the given fields; what is no coordinate is 7."""
    table = lidar(4)
    points = np.full(len(table), 7, fields)
    for column, name in enumerate(("x", "y", "z", "intensity")):
        for own in points.dtype.names:
            if own.lower() == name:
                points[own] = table[:, column]
    return points


def header(points, data, **changes):
    kinds = [points.dtype[name].base for name in points.dtype.names]
    lines = {
        "VERSION": "0.7",
        "FIELDS": " ".join(points.dtype.names),
        "SIZE": " ".join(str(kind.itemsize) for kind in kinds),
        "TYPE": " ".join(kind.kind.upper() for kind in kinds),
        "COUNT": " ".join(str(int(np.prod(points[n].shape[1:]))) for n in points.dtype.names),
        "WIDTH": str(len(points)),
        "HEIGHT": "1",
        "VIEWPOINT": "0 0 0 1 0 0 0",
        "POINTS": str(len(points)),
        "DATA": data,
    }
    text = "# .PCD v0.7 - Point Cloud Data file format\n"
    lines |= changes
    return (text + "".join(f"{k} {v}\n" for k, v in lines.items() if v is not None)).encode()


def body(points, data):
    columns = [points[name].reshape(len(points), -1) for name in points.dtype.names]
    if data == "ascii":
        rows = zip(*(column.tolist() for column in columns), strict=True)
        lines = (" ".join(repr(v) for values in row for v in values) for row in rows)
        return ("\n".join(lines) + "\n").encode()
    if data == "binary":
        return points.tobytes()
    plain = b"".join(column.tobytes() for column in columns)
    packed = compress(plain)
    return np.array([len(packed), len(plain)], "<u4").tobytes() + packed


def compress(data):
    """Compress by repeating the longest run that starts with the same three bytes."""
    seen, result, literal, i = {}, bytearray(), bytearray(), 0

    def flush():
        for start in range(0, len(literal), 32):
            piece = literal[start : start + 32]
            result.extend(bytes([len(piece) - 1]) + piece)
        literal.clear()

    while i < len(data):
        start = seen.get(data[i : i + 3], -1)
        seen[data[i : i + 3]] = i
        length = 0
        if start >= 0 and i - start <= 1 << 13:
            longest = min(264, len(data) - i)
            while length < longest and data[start + length] == data[i + length]:
                length += 1
        if length < 3:
            literal.append(data[i])
            i += 1
            continue
        flush()
        back, code = i - start - 1, length - 2
        long = [code - 7] if code >= 7 else []
        result.extend([min(code, 7) << 5 | back >> 8, *long, back & 255])
        i += length
    flush()
    return bytes(result)


@pytest.mark.parametrize("data", ["ascii", "binary", "binary_compressed"])
@pytest.mark.parametrize("fields", [FIELDS, FIELDS[:3], WIDE], ids=["xyzi", "xyz", "many"])
def test_every_encoding(data, fields, tmp_path):
    points = records(fields)
    (tmp_path / "s.pcd").write_bytes(header(points, data) + body(points, data))
    expected = lidar(4).astype(np.float64 if fields is WIDE else np.float32)
    if len(fields) != 4:
        expected[:, 3] = 0
    assert_same(read_points(tmp_path / "s.pcd"), expected)


def test_lines_that_may_be_missing(tmp_path):
    points = records(FIELDS)
    start = header(points, "binary", COUNT=None, POINTS=None, VIEWPOINT=None, WIDTH=960, HEIGHT=2)
    (tmp_path / "s.pcd").write_bytes(start + body(points, "binary"))
    assert_same(read_points(tmp_path / "s.pcd"), lidar(4))


def test_lines_that_end_as_on_windows(tmp_path):
    points = records(FIELDS)
    content = (header(points, "ascii") + body(points, "ascii")).replace(b"\n", b"\r\n")
    (tmp_path / "s.pcd").write_bytes(content)
    assert_same(read_points(tmp_path / "s.pcd"), lidar(4))


@pytest.mark.parametrize(
    ("data", "changes", "cut", "message"),
    [
        ("ascii", {}, 100, "must hold 7680 values, as its header says, got"),
        ("binary", {}, 100, "must hold 30720 bytes, as its header says, got 30620"),
        ("binary_compressed", {}, 100, "compressed bytes, as its header says, got"),
        ("binary_compressed", {"WIDTH": 9, "POINTS": 9}, 0, "must hold 144 bytes of points, got"),
        ("binary_zipped", {}, 0, "must have DATA ascii, binary or binary_compressed, got"),
        ("binary", {"FIELDS": "a b c d"}, 0, "must have fields x, y and z, got a b c d"),
        ("binary", {"FIELDS": "x y z"}, 0, "must have a PCD header, got a broken one"),
        ("binary", {"SIZE": "4 4 4 3"}, 0, "must have a PCD header, got a broken one"),
        ("binary", {"TYPE": "F F F S"}, 0, "must have a PCD header, got a broken one"),
        ("binary", {"COUNT": "1 1 1 0"}, 0, "must have a PCD header, got a broken one"),
        ("binary", {"WIDTH": "many"}, 0, "must have a PCD header, got a broken one"),
        ("binary", {"POINTS": -1}, 0, "must have a PCD header, got a broken one"),
        ("binary", {"POINTS": 10**15}, 0, "must hold 16000000000000000 bytes"),
        ("", {}, 0, "must have a PCD header, got a broken one"),
        ("binary", {"DATA": None}, 0, "must be a PCD file, got no line DATA"),
    ],
)
def test_a_bad_file_says_why(data, changes, cut, message, tmp_path):
    points = records(FIELDS)
    content = body(points, data if data.endswith("compressed") or data == "ascii" else "binary")
    path = tmp_path / "s.pcd"
    path.write_bytes(header(points, data, **changes) + content[: len(content) - cut])
    with pytest.raises(DemoError, match=message):
        read_points(path)


@given(st.lists(st.sampled_from([b"a", b"ab", b"abc" * 40, bytes(300)]), max_size=30).map(b"".join))
def test_lzf_gives_back_what_was_compressed(data):
    assert decompress(compress(data), len(data)) == data


@given(st.binary(max_size=80), st.integers(0, 500))
def test_damaged_lzf_is_refused(data, size):
    try:
        result = decompress(data, size)
    except DemoError:
        return
    assert len(result) == size
