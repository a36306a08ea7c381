"""Read PCD files, the point clouds of the Point Cloud Library: ascii, binary, binary_compressed.

Source: pointclouds.org, "The PCD (Point Cloud Data) file format", version 0.7.
"""

from dataclasses import dataclass

import numpy as np

from .inputs import DemoError
from .lzf import decompress

_WANTED = ("x", "y", "z", "intensity")


@dataclass(frozen=True)
class Header:
    """What the header of a PCD file says."""

    fields: list  # of names, lower case
    formats: list  # of NumPy dtypes, one for each field
    counts: list  # of values of a field in a point
    points: int
    data: str

    @property
    def offsets(self):
        """Bytes of a point before each field, and of the whole point."""
        sizes = [f.itemsize * n for f, n in zip(self.formats, self.counts, strict=True)]
        return np.cumsum([0, *sizes]).tolist()

    def wanted(self):
        """Return the indices of x, y, z and, where there is one, the intensity."""
        return [self.fields.index(name) for name in _WANTED if name in self.fields]


def points_of_pcd(content):
    """Return float [P, 3 or 4]: x, y, z, and the intensity if there is one, of a PCD file."""
    header, body = _split(content)
    if header.data not in _READERS:
        raise DemoError(f"must have DATA ascii, binary or binary_compressed, got {header.data!r}")
    missing = [name for name in _WANTED[:3] if name not in header.fields]
    if missing:
        raise DemoError(f"must have fields x, y and z, got {' '.join(header.fields)}")
    columns = _READERS[header.data](header, body)
    dtype = np.result_type(np.float32, *columns)
    return np.stack([column.astype(dtype) for column in columns], axis=1)


def _split(content):
    """Return the header and the bytes after it."""
    entries, start = {}, 0
    while "DATA" not in entries:
        end = content.find(b"\n", start)
        if end < 0 or end - start > 10_000:
            raise DemoError("must be a PCD file, got no line DATA in its header")
        name, *words = content[start:end].decode("ascii", "replace").split() or [""]
        entries[name.upper()] = words
        start = end + 1
    return _header(entries), content[start:]


def _header(entries):
    try:
        fields = [name.lower() for name in entries["FIELDS"]]
        counts = [int(count) for count in entries.get("COUNT", ["1"] * len(fields))]
        kinds = zip(entries["TYPE"], entries["SIZE"], strict=True)
        formats = [np.dtype(f"<{kind.lower()}{int(size)}") for kind, size in kinds]
        size = int(entries["WIDTH"][0]) * int(entries["HEIGHT"][0])
        points = int(entries.get("POINTS", [size])[0])
        right = len(fields) == len(counts) == len(formats) and min(counts, default=0) > 0
        if not right or points < 0 or any(dtype.kind not in "fiu" for dtype in formats):
            raise ValueError("its lines contradict each other")
        return Header(fields, formats, counts, points, entries["DATA"][0].lower())
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise DemoError(f"must have a PCD header, got a broken one ({error})") from error


def _from_ascii(header, body):
    values = np.array(body.split(), dtype="S").astype(np.float64)
    width = sum(header.counts)
    _check_length(len(values), header.points * width, "values")
    table = values[: header.points * width].reshape(header.points, width)
    first = np.cumsum([0, *header.counts])
    return [table[:, first[i]].astype(header.formats[i]) for i in header.wanted()]


def _from_binary(header, body):
    """Read points one after another."""
    offsets, wanted = header.offsets, header.wanted()
    _check_length(len(body), header.points * offsets[-1], "bytes")
    record = np.dtype(
        {
            "names": [header.fields[i] for i in wanted],
            "formats": [header.formats[i] for i in wanted],
            "offsets": [offsets[i] for i in wanted],
            "itemsize": offsets[-1],
        }
    )
    table = np.frombuffer(body, record, header.points)
    return [table[name] for name in record.names]


def _from_compressed(header, body):
    """Read fields one after another, compressed together."""
    _check_length(len(body), 8, "bytes")
    packed, size = (int(n) for n in np.frombuffer(body, "<u4", 2))
    _check_length(len(body) - 8, packed, "compressed bytes")
    if size != header.points * header.offsets[-1]:
        raise DemoError(
            f"must hold {header.points * header.offsets[-1]} bytes of points, got {size}"
        )
    plain = decompress(body[8 : 8 + packed], size)
    columns = []
    for i in header.wanted():
        start = header.points * header.offsets[i]
        count = header.points * header.counts[i]
        values = np.frombuffer(plain, header.formats[i], count, start)
        columns.append(values[:: header.counts[i]])
    return columns


def _check_length(found, needed, what):
    if found < needed:
        raise DemoError(f"must hold {needed} {what}, as its header says, got {found}")


_READERS = {"ascii": _from_ascii, "binary": _from_binary, "binary_compressed": _from_compressed}
