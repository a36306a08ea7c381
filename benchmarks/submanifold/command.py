"""The command line that the benchmarks of features at sites share."""

import argparse
from pathlib import Path

from benchmarks.harness import machine
from benchmarks.submanifold import scenes


def parser_of(doc, file):
    """Return the parser of a benchmark that writes a file of rows."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="against PyTorch on a CPU: ratios")
    parser.add_argument("--scan", type=Path, help="also a scan: float32 x, y, z, intensity")
    parser.add_argument("--quick", action="store_true", help="small scenes, few rounds")
    parser.add_argument("--threads", type=int, help="of PyTorch, on a CPU [one for each core]")
    parser.add_argument("--out", type=Path, help=f"folder of {file}")
    return parser


def start(options, listed, needs_torch):
    """Return the scenes, CuPy or None, PyTorch or None, the columns of all rows, and their folder.

    Exits with what PyTorch is needed for, if anything, where it is missing.
    """
    if options.scan is not None:
        listed = [*listed, *scenes.from_file(options.scan)]
    torch = machine.import_torch(options.cpu)
    if torch is None and needs_torch:
        what = "install torch" if options.cpu else "install torch with CUDA, or pass --cpu"
        raise SystemExit(f"{needs_torch}: {what}")
    if torch is not None and options.threads:
        torch.set_num_threads(options.threads)
    cupy = None if options.cpu else __import__("cupy")
    columns = machine.describe(cupy, torch)
    return listed, cupy, torch, columns, machine.results_folder(columns, options.cpu, options.out)
