"""One row for each timing: what ran on what, how long it took, and what that means."""

import csv
from dataclasses import astuple, dataclass, fields
from pathlib import Path

OURS = "sbnet_cupy"
GATHER = f"{OURS} gather"  # a layer of ours, through a stack of blocks
GIVEN, WITH_MASK, DENSE = "given blocks", "with reduce_mask", "dense"  # variants of a fused op
SAME_INPUTS = "from the same inputs"  # note of others that nothing was prepared for


# What was computed, whoever did it; and what tells cases apart.
WORKLOAD = ("op", "suite", "shape", "dtype", "block", "mask", "variant")
CASE = (*WORKLOAD, "density", "implementation")


@dataclass(frozen=True)
class Row:
    """One line of a CSV file; what does not apply is None, and empty in the file."""

    gpu: str  # or the CPU's name
    driver: str
    cuda: str  # runtime
    cupy: str
    torch: str
    numpy: str
    commit: str
    op: str
    suite: str
    shape: str  # of the image, NxHxWxC, or of the mask, NxHxW
    dtype: str
    block: str  # HxW, halo included
    mask: str
    density: float | None  # share of the mask's pixels that are set
    blocks: int | None  # active
    variant: str
    implementation: str
    timed_by: str  # graph (replays), events (around eager calls), host or wall (clock)
    us: float  # median for one call
    us_p10: float
    us_p90: float
    bytes: int | None
    gb_per_s: float | None
    percent_of_copy: float | None
    original_us: float | None  # the original SBNet kernel on an H200
    ratio_to_original: float | None  # original_us / us: above 1, this is faster
    note: str = ""
    dense_us: float | None = None  # the best time for the whole image, same run and precision
    ratio_to_dense: float | None = None  # dense_us / us: above 1, this is faster

    @property
    def spread(self):
        """The 10th and the 90th percentile, as tables have them."""
        return f"{self.us_p10:,.2f}..{self.us_p90:,.2f}"

    @property
    def ours(self):
        """Whether this library was timed."""
        return self.implementation == OURS

    @property
    def workload(self):
        """What was computed, whoever did it."""
        return tuple(getattr(self, name) for name in WORKLOAD)


COLUMNS = tuple(field.name for field in fields(Row))
RATIOS_FILE = "ratios.csv"  # what a run on a CPU says: its times depend on the machine too much


@dataclass(frozen=True)
class Ratio:
    """Our time for a workload over that of someone else in the same rounds of a run on a CPU."""

    cpu: str
    torch: str
    numpy: str
    commit: str
    op: str
    suite: str
    shape: str
    dtype: str
    block: str
    mask: str
    variant: str
    implementation: str  # the other one
    note: str  # whether anything was prepared for it
    ratio: float  # median over rounds; below 1, this library is faster
    ratio_p90: float

    @property
    def workload(self):
        """What was computed."""
        return tuple(getattr(self, name) for name in WORKLOAD)


def block_bytes(blocks, bsize, channels, itemsize):
    """Bytes of a stack."""
    return blocks * bsize[0] * bsize[1] * channels * itemsize


def moved_bytes(variant, stack_bytes):
    """Bytes that a gather or a scatter reads and writes; adding also reads the image."""
    return stack_bytes * (3 if variant == "add" else 2)


def gigabytes_per_second(count, us):
    """Return 10^9 bytes per second."""
    return count / us / 1e3


def times_sign(sizes):
    """Spell sizes: ``1x400x700x24``."""
    return "x".join(map(str, sizes))


class Writer:
    """A CSV file that grows row by row, so that a run cut short leaves what it measured.

    With ``keep``, what is in the file already stays, but for cases that are measured again: for
    runs of chosen cases.
    """

    def __init__(self, path, kind=Row, keep=False):
        self._path = Path(path)
        self._columns = [field.name for field in fields(kind)]
        self._case = [self._columns.index(name) for name in CASE if name in self._columns]
        self._lines = self._kept() if keep and self._path.exists() else []
        self._earlier = set(map(self._case_of, self._lines))
        self._save()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass  # all is written

    def write(self, row):
        """Add a row, in the place of those of the same case of earlier runs."""
        line = [str(_spell(value)) for value in astuple(row)]
        case, place = self._case_of(line), len(self._lines)
        if case in self._earlier:
            self._earlier.discard(case)
            old = [i for i, other in enumerate(self._lines) if self._case_of(other) == case]
            self._lines = [other for i, other in enumerate(self._lines) if i not in old]
            place = old[0]
        self._lines.insert(place, line)
        self._save()

    def _case_of(self, line):
        return tuple(line[i] for i in self._case)

    def _kept(self):
        """Return the lines of the file, if its columns are those of today."""
        with self._path.open(newline="", encoding="utf-8") as file:
            columns, *lines = [*csv.reader(file)] or [[]]
        return lines if columns == self._columns else []

    def _save(self):
        new = self._path.with_name(f"{self._path.name}.new")
        with new.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([self._columns, *self._lines])
        new.replace(self._path)


def read(path, kind=Row):
    """Return the rows of a CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        return [_row(line, kind) for line in csv.DictReader(file)]


def _spell(value):
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else value


def _row(line, kind):
    return kind(
        **{field.name: _parse(line.get(field.name, ""), field.type) for field in fields(kind)}
    )


def _parse(text, kind):
    if kind is str:
        return text
    if not text:
        return None
    return int(text) if "int" in str(kind) else float(text)
