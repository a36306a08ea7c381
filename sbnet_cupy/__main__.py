"""The command line: ``sbnet-cupy`` or ``python -m sbnet_cupy``."""

import argparse
import importlib.util
import os
import platform
import shutil
import sys
import textwrap
from importlib import metadata
from pathlib import Path

from . import __version__
from .errors import DeviceError

EXAMPLES = """\
examples:
  sbnet-cupy info                       what is installed here, and what is not
  sbnet-cupy demo                       find sources in the Hubble deep field
  sbnet-cupy demo sky.png               ... in a picture of your own
  sbnet-cupy demo sky.png --mask m.png  ... where m.png is not black
  sbnet-cupy demo scan.bin --out /tmp   a residual unit over a LiDAR scan
  sbnet-cupy bench                      time the operations on the GPU
  sbnet-cupy bench --cpu --quick        ... some of them, on the CPU
"""

DEMO = """\
Run a convolution densely and block-sparsely, compare the two, and time them.
Where PyTorch is installed, its dense convolution is timed as well.

Without an argument: the Hubble deep field, which ships inside scikit-image.
Blocks that hold light are active; a source detector (differences of Gaussians)
runs over them only.

IMAGE: the same on a picture of your own, in any format that Pillow reads. One
of more than 16.8 million pixels is reduced, and the table says to what size.

POINTS: a LiDAR scan. Blocks of the ground that hold points are active; a
residual unit runs over them only. The name decides how it is read:
  .bin          float32 x, y, z, intensity for each point, as in KITTI
  .pcd.bin      the same and a fifth value, as in nuScenes
  .pcd          ascii, binary or binary_compressed, with fields x, y and z
  .npy, .npz    an array [points, 3 or more columns], or arrays x, y and z

Prints a table and writes one PNG: the picture with its active blocks, the
mask, the response, and the difference from the dense run. The exit code is 0
when the two agree, 1 when they do not, 2 when the demo could not run, and 130
when it was interrupted.
"""

BENCH = """\
Check and time the operations, next to what PyTorch, CuPy or NumPy indexing
takes for the same.

On a GPU: CUDA-graph replays with cold caches, held against the copy bandwidth
that this very run measures. benchmarks/README.md has the method. Needs a
checkout of the sources.

Prints tables; writes a CSV file for each benchmark, and pictures. The exit
code is 0 when all results were right, 1 when one of this library's was not,
and 2 when nothing could run.
"""

CUDA = 'pip install "sbnet-cupy[cuda13x]" (CUDA 12: [cuda12x])'

# what it is for, distributions that provide it, how to get it
PARTS = [
    ("arrays on the CPU", ["numpy"], "pip install numpy"),
    ("bfloat16 on the CPU", ["ml_dtypes"], "pip install ml_dtypes"),
    (
        "arrays on the GPU",
        ["cupy-cuda13x", "cupy-cuda12x", "cupy"],
        CUDA,
    ),
    (
        "compiling CUDA kernels",
        ["nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"],
        CUDA,
    ),
    ("faster GPU convolutions", ["nvidia-cudnn-frontend"], 'pip install "sbnet-cupy[cudnn]"'),
    (
        "  and their library",
        ["nvidia-cudnn-cu13", "nvidia-cudnn-cu12"],
        'pip install "sbnet-cupy[cudnn]"',
    ),
    ("PyTorch tensors", ["torch"], 'pip install "sbnet-cupy[torch]"'),
    ("JAX arrays", ["jax"], 'pip install "sbnet-cupy[jax]"'),
    (
        "TensorFlow tensors",
        ["tensorflow", "tensorflow-cpu"],
        'pip install "sbnet-cupy[tensorflow]"',
    ),
    ("sbnet-cupy demo", ["scikit-image"], 'pip install "sbnet-cupy[demo]"'),
    ("", ["matplotlib"], 'pip install "sbnet-cupy[demo]"'),
    ("", ["rich"], 'pip install "sbnet-cupy[demo]"'),
]


UNLIMITED = 10_000  # columns, where there is no terminal
INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell reports SIGINT and SIGPIPE


def main(argv=None):
    """Run the command line; return its exit code."""
    try:
        try:
            return _run(_parser().parse_args(argv))
        finally:
            sys.stdout.flush()  # where the reader of a pipe has gone, this is where it shows
    except KeyboardInterrupt:
        print("sbnet-cupy: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return PIPE_CLOSED


def _run(options):
    if options.command == "info":
        return info()
    if options.command == "bench":
        return bench(options)
    from .demo import DemoError, run

    try:
        return run(options)
    except (DemoError, DeviceError) as error:
        print(f"sbnet-cupy demo: {error}", file=sys.stderr)
        return 2


def info():
    """Print the device, the versions of what is installed, and how to get the rest."""
    print(f"sbnet-cupy {__version__}")
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    _print_folded("GPU: ", _gpu())
    print()
    for purpose, distributions, command in PARTS:
        found = [(name, _version(name)) for name in distributions if _version(name)]
        shown = ", ".join(f"{name} {version}" for name, version in found)
        _print_folded(f"  {purpose:<24}  ", shown or f"-  {command}")
    return 0


def _print_folded(head, text):
    """Print ``head`` and ``text``, folded under itself where a terminal is narrower."""
    width = max(shutil.get_terminal_size(fallback=(UNLIMITED, 24)).columns, len(head) + 20)
    indent = " " * len(head)
    lines = textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
    print("\n".join(lines))


CHECKOUT = Path(__file__).resolve().parent.parent


def bench(options):
    """Run the benchmarks, which lie beside the package in a checkout; return the exit code."""
    if not (CHECKOUT / "benchmarks" / "harness" / "run.py").is_file():
        message = "benchmarks come with the source checkout, and this is an installed package"
        print(f"sbnet-cupy bench: {message}", file=sys.stderr)
        return 2
    if sys.path[0] != str(CHECKOUT):  # before any other package of that name
        sys.path.insert(0, str(CHECKOUT))
    from benchmarks.harness import run

    return run.run(options)


def _gpu():
    """Describe the device that CuPy uses, or why there is none."""
    if importlib.util.find_spec("cupy") is None:
        return "none, CuPy is not installed; everything runs on the CPU with NumPy"
    try:
        import cupy
    except ImportError as error:
        return f"none, CuPy cannot be imported: {error}"
    if not cupy.cuda.is_available():
        return "none, CuPy finds no CUDA device; everything runs on the CPU with NumPy"
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    driver = cupy.cuda.runtime.driverGetVersion()
    return (
        f"{properties['name'].decode()}, compute capability {device.compute_capability[:-1]}."
        f"{device.compute_capability[-1]}, {properties['totalGlobalMem'] / 2**30:.0f} GiB, "
        f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
    )


def _version(distribution):
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _parser():
    parser = argparse.ArgumentParser(
        prog="sbnet-cupy",
        description="Block-sparse convolution on NumPy and CuPy arrays.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | demo | bench")
    commands.add_parser("info", help="the device, the versions, what is available")
    demo = commands.add_parser(
        "demo",
        help="block-sparse against dense on a picture or a point cloud: a table and a PNG",
        description=DEMO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("input", nargs="?", metavar="IMAGE|POINTS", help="a picture or a scan")
    demo.add_argument("--mask", metavar="M", help="a picture, as large: where not 0, it matters")
    demo.add_argument("--out", metavar="DIR", default=".", help="folder of the PNG (default: here)")
    demo.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where to compute (default: on the GPU when there is one)",
    )
    demo.add_argument(
        "--block-size",
        type=int,
        metavar="B",
        help="side of a block in pixels, halo included (default: 22, for POINTS 18)",
    )
    scan = demo.add_argument_group("POINTS, and their grid in metres")
    scan.add_argument(
        "--columns",
        type=int,
        metavar="N",
        help="values for each point in a .bin file (default: 4, for .pcd.bin 5)",
    )
    for axis, default in (("x", "0 70.4"), ("y", "-40 40")):
        scan.add_argument(
            f"--{axis}-range",
            type=float,
            nargs=2,
            metavar=("LOW", "HIGH"),
            help=f"what the grid covers along {axis} (default: {default})",
        )
    scan.add_argument("--cell", type=float, help="side of a cell (default: 0.1)")
    bench = commands.add_parser(
        "bench",
        help="time the operations: tables, CSV files and pictures",
        description=BENCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (default: all)")
    bench.add_argument("--list", action="store_true", help="say which there are")
    bench.add_argument("--quick", action="store_true", help="few and small cases")
    bench.add_argument("--cpu", action="store_true", help="on NumPy arrays")
    bench.add_argument("--points", metavar="FILE", help="add the mask of a KITTI scan, a .bin file")
    bench.add_argument(
        "--out",
        metavar="DIR",
        help="folder of the CSV files (default: that of the device in benchmarks/results)",
    )
    bench.add_argument("--commit", metavar="TEXT", help="what rows name as commit (default: git's)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
