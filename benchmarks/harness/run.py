"""``sbnet-cupy bench``: runs the benchmarks, prints tables, writes CSV files and pictures."""

import importlib
import importlib.util
import os
import shutil
import sys
import textwrap
import time
from pathlib import Path

from benchmarks.harness import machine, plot, table
from benchmarks.harness.rows import RATIOS_FILE, Ratio, Writer
from benchmarks.harness.session import Session

BENCHMARKS = Path(__file__).resolve().parents[1]
PIPED_WIDTH = 190  # columns, where no terminal says how wide it is
FOLDERS = {
    "reduce_mask": "block_sparse",
    "sparse_gather": "block_sparse",
    "sparse_scatter": "block_sparse",
    "fused_conv": "block_sparse",
    "fused_bottleneck": "block_sparse",
    "host_cost": "block_sparse",
    "torch_host_cost": "adapters",
    "jax_host_cost": "adapters",
}
NAMES = tuple(FOLDERS)


class BenchError(Exception):
    """Something the user can put right; the command line prints it as one line."""


def run(options):
    """Run what the command line asks for; return the exit code."""
    if options.list:
        for name in NAMES:
            _print_folded(f"{name:<18}", _module(name).__doc__.splitlines()[0])
        return 0
    try:
        names = _chosen(options.names)
        _check_environment(options)
        session = Session(
            cpu=options.cpu, quick=options.quick, points=options.points, commit=options.commit
        )
        folder = _folder(options.out, session, names)
    except BenchError as error:
        print(f"sbnet-cupy bench: {error}", file=sys.stderr)
        return 2
    with session:
        return _run_all(names, session, folder, chosen=bool(options.names))


def _print_folded(head, text):
    """Print ``head`` and ``text``, folded under itself where a terminal is narrower."""
    width = shutil.get_terminal_size(fallback=(table.UNLIMITED, 24)).columns
    indent = " " * len(head)
    lines = textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
    print("\n".join(lines))


def _chosen(names):
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise BenchError(f"there is no benchmark {unknown[0]!r}; there are: {', '.join(NAMES)}")
    return [name for name in NAMES if not names or name in names]


def _check_environment(options):
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(f'needs {", ".join(missing)}; pip install "sbnet-cupy[demo]"')
    if options.points is not None:
        from sbnet_cupy.demo.inputs import DemoError
        from sbnet_cupy.demo.scan_file import read_points

        try:
            read_points(options.points)
        except DemoError as error:
            reason = str(error).partition(";")[0]  # without the demo's options
            raise BenchError(f"--points: {reason}") from error
    if options.cpu:
        return
    try:
        import cupy
    except ImportError as error:
        raise BenchError(f"CuPy cannot be imported ({error}); --cpu runs on NumPy") from error
    if not cupy.cuda.is_available():
        raise BenchError("CuPy finds no CUDA device; --cpu runs on NumPy")


def _folder(path, session, names):
    """Create the folder to write to; raise BenchError unless the files can be written there."""
    name = "cpu" if session.cpu else machine.folder_name(session.columns["gpu"])
    folder = Path(path or BENCHMARKS / "results" / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
        for path in (folder / f"{name}.csv" for name in (*names, Path(RATIOS_FILE).stem)):
            if path.exists():
                path.open("ab").close()
    except OSError as error:
        place = error.filename or folder
        raise BenchError(f"--out: cannot write to {place}: {error.strerror}") from error
    return folder


def _run_all(names, session, folder, chosen):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    console, start = Console(highlight=False), time.perf_counter()
    console.on_broken_pipe = _pipe_closed
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    columns = session.columns
    versions = (f"{name} {columns[name]}" for name in ("driver", "cuda", "cupy", "torch", "numpy"))
    present = ", ".join(text for text in versions if not text.endswith(" "))
    console.print(f"{columns['gpu']}: {present}; commit {columns['commit']}")
    look = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed()
    with Progress(*look, console=console, transient=True) as progress:
        task = progress.add_task("copy bandwidth", total=None)
        session.measure_ceilings()
        for row in session.ceilings:
            rate = f" ({row.gb_per_s:,.0f} GB/s)" if row.gb_per_s else ""
            console.print(f"{row.op}: {row.us:,.2f} us{rate} by {row.implementation}")
        work = {name: (_module(name), _module(name).cases(session)) for name in names}
        progress.update(task, total=sum(len(cases) for _, cases in work.values()))
        for name, (module, cases) in work.items():
            if cases:
                rows = _run_one(name, module, cases, session, folder, progress, task)
                console.print(table.fitting(name, rows, console))
            elif chosen:
                where = "with --cpu" if session.cpu else "on this machine"
                session.warnings.append(f"{name} has nothing to time {where}")
    if session.cpu and session.torch and machine.is_busy():
        session.warnings.append("the machine is busy: PyTorch's threads wait for each other")
    if session.cpu:
        with Writer(folder / RATIOS_FILE, Ratio) as writer:
            for ratio in session.ratios:
                writer.write(ratio)
    for line in plot.draw(folder):
        console.print(line)
    for line in session.warnings:
        console.print(f"[yellow]{_plain(line)}[/]")
    for line in session.failures:
        console.print(f"[bold red]{_plain(line)}[/]")
    console.print(f"Wrote {folder} in {time.perf_counter() - start:.0f} s")
    return 1 if session.failures else 0


def _pipe_closed():
    """Leave it to the command line: rich would end the process with the exit code of a failure."""
    raise BrokenPipeError


def _run_one(name, module, cases, session, folder, progress, task):
    """Run the cases of one benchmark; every row is in the file as soon as it is known."""
    rows = []
    with Writer(folder / f"{name}.csv") as writer:
        for row in session.ceilings:
            writer.write(row)
        if hasattr(module, "prepare"):
            progress.update(task, description=f"{name}: compiling kernels")
            module.prepare(session, cases)
        for case in cases:
            progress.update(task, description=_plain(f"{name}: {case.label}"))
            for row in _rows(module, case, session):
                writer.write(row)
                rows.append(row)
            session.release()
            progress.advance(task)
    return rows


def _rows(module, case, session):
    """Yield the rows of a case. What stops it (memory, say) is noted, and the run goes on."""
    try:
        for density, blocks, work in module.works(case, session):
            if blocks:
                yield from session.measure(case, density, blocks, work)
            elif case.mask == "empty":
                yield from session.measure(case, density, 0, work)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        session.failures.append(f"{case.op}: {case.label}: {reason}")


def _plain(text):
    """Protect text from being read as markup."""
    from rich.markup import escape

    return escape(text)


def _module(name):
    return importlib.import_module(f"benchmarks.{FOLDERS[name]}.bench_{name}")
