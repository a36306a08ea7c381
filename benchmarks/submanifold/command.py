"""The command line that the benchmarks of features at sites share."""

import argparse
from pathlib import Path

from benchmarks.harness import machine
from benchmarks.harness.rows import SAME_INPUTS, Ratio, Row, Writer
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


def compare(doc, file, arguments, cases_of, on_cpu, on_gpu):
    """Time operations beside PyTorch's; print and write their rows.

    ``cases_of`` makes the cases of a list of scenes. Of each one ``on_cpu`` or ``on_gpu`` yields
    the rows: of CuPy or None, PyTorch, the case, the columns of all rows, and whether to be quick.
    """
    options = parser_of(doc, file).parse_args(arguments)
    listed, cupy, torch, columns, folder = start(
        options, scenes.standard(options.quick), "this compares with PyTorch"
    )
    measure, kind = (on_cpu, Ratio) if options.cpu else (on_gpu, Row)
    with Writer(folder / file, kind, keep=True) as writer:
        for case in cases_of(listed):
            for row in measure(cupy, torch, case, columns, options.quick):
                writer.write(row)
    return 0


def ratio_columns(torch, columns):
    """Return what all ratios of a run on a CPU say: of what machine, and by how many threads."""
    threads = torch.get_num_threads()
    note = f"{SAME_INPUTS}; {threads} thread{'s' * (threads > 1)}"
    shown = {key: columns[key] for key in ("torch", "numpy", "commit")}
    return {"cpu": columns["gpu"], **shown, "note": note}
