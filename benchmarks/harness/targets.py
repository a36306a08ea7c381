"""What the rows should show, and whether they do."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.rows import GIVEN, WITH_MASK, Row
from benchmarks.harness.target_numbers import (
    LAYERS,
    NETWORKS,
    SITE_CONVOLUTIONS,
    SITE_MAPS,
    SITE_NETWORKS,
    TORCH_HOST,
)

COPIES = ("sparse_gather", "sparse_scatter")
FUSED = {  # images of the four stages
    "fused_conv": ("1x400x700x24", "1x200x350x48", "1x100x175x64", "1x50x88x96"),
    "fused_bottleneck": ("1x400x700x96", "1x200x350x192", "1x100x175x256", "1x50x88x384"),
}
EVEN = "2x800x1400x32"  # the even channel count that odd ones are held against
EVEN_BLOCK = "18x18"


class Run:
    """The rows of one run, by what they are."""

    def __init__(self, rows):
        self.rows = rows
        self.ours = [row for row in rows if row.ours]
        self.by_workload = {}
        for row in rows:
            self.by_workload.setdefault(row.workload, []).append(row)

    @property
    def empty_us(self):
        """Time of an empty kernel in a graph, 0 when it is not known."""
        return min((row.us for row in self.rows if row.op == "empty"), default=0.0)

    def best_other(self, row):
        """Return the fastest row of the same workload by someone else, or None."""
        others = [r for r in self.by_workload[row.workload] if not r.ours]
        return min(others, key=lambda r: r.us, default=None)

    def given_blocks(self, row):
        """Return our row of the same case without reduce_mask, or None."""
        workload = (*row.workload[:-1], GIVEN)
        return next((r for r in self.by_workload.get(workload, ()) if r.ours), None)


@dataclass(frozen=True)
class Target:
    """A number that each of some rows must reach."""

    text: str
    applies: Callable[[Row, Run], bool]
    value: Callable[[Row, Run], float | None]  # None: cannot be told from this run
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    excuse: Callable[[Row, Run], bool] = lambda row, run: False  # good enough all the same

    def met(self, row, run, value):
        """Whether a row with this value reaches it."""
        reached = value >= self.at_least if self.at_most is None else value <= self.at_most
        return reached or self.excuse(row, run)


@dataclass(frozen=True)
class Verdict:
    """What became of a target on one row."""

    target: Target
    row: Row
    value: float
    met: bool

    @property
    def margin(self):
        """How far the value is on the good side; negative on the bad one."""
        if self.target.at_most is None:
            return self.value - self.target.at_least
        return self.target.at_most - self.value


def _suite(name, ops=COPIES, variants=None):
    def applies(row, run):
        wanted = variants is None or row.variant in variants
        return row.suite == name and row.op in ops and wanted

    return applies


def _percent(row, run):
    return row.percent_of_copy


def _times_original(row, run):
    return row.ratio_to_original


def _nearly_empty(row, run):
    return bool(run.empty_us) and row.us <= run.empty_us + 1


def _per_byte(row, run):
    """Time per byte over that of the even channel count and square block of the same run."""
    for even in run.ours:
        same = (even.op, even.suite, even.dtype, even.variant) == (
            row.op, row.suite, row.dtype, row.variant,
        )  # fmt: skip
        if same and (even.shape, even.block) == (EVEN, EVEN_BLOCK):
            return (row.us / row.bytes) / (even.us / even.bytes)
    return None


def _large_uint8(row, run):
    return row.op == "reduce_mask" and row.suite == "large" and row.dtype == "uint8"


def _mask_costs(row, run):
    given = run.given_blocks(row)
    return given and row.us - given.us


# Times faster than the best dense time of the same run and precision, stage by stage.
RATIOS_TO_DENSE = [
    ("fused_conv", "10% active", "float16", (10, 6, 3.2, 2.7)),
    ("fused_conv", "10% active", "tf32", (10, 6, 3, 2.5)),
    ("fused_conv", "all active", "float16", (2, 1.7, 1.3, 1.2)),
    ("fused_bottleneck", "10% active", "float16", (22, 14, 7, 5)),
    ("fused_bottleneck", "10% active", "tf32", (20, 12, 6, 4)),
    ("fused_bottleneck", "all active", "float16", (3.5, 2.5, 2, 1.5)),
]


def _against_dense():
    """Yield a target for each number of the table."""
    for op, mask, dtype, ratios in RATIOS_TO_DENSE:
        for shape, ratio in zip(FUSED[op], ratios, strict=True):
            yield _ratio_to_dense(op, mask, dtype, shape, ratio)


def _ratio_to_dense(op, mask, dtype, shape, ratio):
    wanted = (op, "stages", shape, dtype, GIVEN)
    masks = (mask, f"top-left, {mask}")

    def applies(row, run):
        found = (row.op, row.suite, row.shape, row.dtype, row.variant)
        return found == wanted and row.mask in masks

    text = f"{op} {shape} {dtype}, {mask}, against dense"
    return Target(text, applies, lambda row, run: row.ratio_to_dense, " x dense", at_least=ratio)


def _of_own_number(text, number, ratio):
    """Return a target of rows that each have a number of their own, or None: ``number(row)``.

    ``ratio`` says whether rows are times faster than dense; else they are microseconds.
    """

    def share(row, run):
        return row.ratio_to_dense / number(row) if ratio else number(row) / row.us

    def applies(row, run):
        timed = row.ratio_to_dense if ratio else row.timed_by in ("graph", "host")
        return bool(timed) and number(row) is not None

    return Target(text, applies, share, " x the target", at_least=1)


def _image_of(row):
    """Return the image of a row at sites, where its scene has several."""
    return row.shape.partition(",")[0] if row.suite.startswith("blobs") else ""


def _site_conv(row):
    channels, _, what = row.variant.partition(" channels, ")
    if (row.op, row.dtype, what) != ("submanifold_conv", "float16", "forward, weights packed"):
        return None
    return SITE_CONVOLUTIONS.get((row.suite, _image_of(row)), {}).get(int(channels))


def _site_maps(row):
    if (row.op, row.variant, row.timed_by) != ("kernel_map", "same", "graph"):
        return None
    return SITE_MAPS.get((row.suite, _image_of(row)))


def _networks():
    """Yield the targets of whole networks, of layers and of sites, and of calls in PyTorch."""
    for network, numbers in NETWORKS.items():

        def of(row, network=network, numbers=numbers):
            is_of = (row.op, row.suite, row.variant) == ("network", *network)
            return numbers.get(row.density) if is_of and row.dtype != "float32" else None

        shares = ", ".join(f"{share:.0%}: {times:g}x" for share, times in numbers.items())
        yield _of_own_number(f"{', '.join(network)}, of blocks {shares} against dense", of, True)
    for op in ("stack_conv2d", "fused_conv"):

        def of(row, op=op):
            return LAYERS.get(row.density) if (row.op, row.suite) == (op, "resnet50") else None

        yield _of_own_number(f"{op}, layers of ResNet-50: a tenth 2x of cuDNN, all 0.9x", of, True)
    yield _of_own_number("submanifold_conv, weights packed", _site_conv, False)
    yield _of_own_number("coordinate_map and kernel_map of a 3^d kernel", _site_maps, False)

    def of_networks(row):
        return SITE_NETWORKS.get((row.suite, row.variant)) if row.op == "site_network" else None

    yield _of_own_number("Networks at sites", of_networks, False)

    def of_calls(row):
        return TORCH_HOST.get((row.op, row.variant)) if row.suite == "torch host" else None

    calls = "25 us a gather, 35 a convolution, 40 a unit, 45 SparseConv2d"
    yield _of_own_number(f"Host cost of sbnet_cupy.torch: {calls}", of_calls, False)


TARGETS = [
    Target("Large stacks, plain", _suite("large", variants=("plain",)), _percent,
           "% of copy", at_least=80),
    Target("Large stacks, fused", _suite("large", variants=("fused",)), _percent,
           "% of copy", at_least=80),
    Target("Large stacks, transposed", _suite("large", variants=("transposed",)), _percent,
           "% of copy", at_least=70),
    Target("Large stacks, add", _suite("large", variants=("add",)), _percent,
           "% of copy", at_least=75),
    Target("Stage rows: 2x the original, or within 1 us of an empty kernel",
           lambda row, run: row.op in COPIES and row.ratio_to_original is not None,
           _times_original, " x the original", at_least=2, excuse=_nearly_empty),
    Target("reduce_mask, stage rows: 2x the original",
           lambda row, run: row.op == "reduce_mask" and row.ratio_to_original is not None,
           _times_original, " x the original", at_least=2),
    Target("reduce_mask, 8x4096x4096 uint8",
           lambda row, run: _large_uint8(row, run) and row.shape == "8x4096x4096",
           _percent, "% of copy", at_least=50),
    Target("Odd channel counts and rectangular blocks, time per byte",
           lambda row, run: _suite("channels")(row, run)
           and (row.shape, row.block) != (EVEN, EVEN_BLOCK),
           _per_byte, " x the even ones", at_most=1.5),
    Target("Host cost of a call",
           lambda row, run: row.suite == "host" and row.timed_by == "host"
           and row.op in ("reduce_mask", *COPIES) and "waits" not in row.variant,
           lambda row, run: row.us, " us", at_most=12),
    *_against_dense(),
    Target("Fused ops, reduce_mask in the same graph",
           lambda row, run: row.op in FUSED and row.variant == WITH_MASK,
           _mask_costs, " us more", at_most=1.5),
    Target("Host cost of a call of a fused op",
           lambda row, run: row.suite == "host" and row.timed_by == "host" and row.op in FUSED,
           lambda row, run: row.us, " us", at_most=15),
    Target("Host cost of other calls of sbnet_cupy.torch",
            lambda row, run: row.suite == "torch host" and row.op in ("reduce_mask", *COPIES)
            and (row.op, row.variant) not in TORCH_HOST
            and "waits" not in row.variant and "recorded" not in row.variant,
            lambda row, run: row.us, " us", at_most=30),
    *_networks(),
]  # fmt: skip


def evaluate(rows):
    """Return a verdict for each target and each of our rows that it applies to."""
    run = Run(rows)
    verdicts = []
    for target in TARGETS:
        for row in run.ours:
            if target.applies(row, run):
                value = target.value(row, run)
                if value is not None:
                    verdicts.append(Verdict(target, row, value, target.met(row, run, value)))
    return verdicts
