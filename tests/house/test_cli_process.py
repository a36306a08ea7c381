"""The command line as a process: pipes that close, Ctrl-C, narrow terminals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.demo_files import sky, write_png
from support.exhaustive import thinned, thinned_product

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTIBLE = """
import importlib, signal, sys, time
from sbnet_cupy import __main__ as command
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path.insert(0, sys.argv[1])
place = importlib.import_module(sys.argv[2])
*holders, name = sys.argv[3].split(".")
for holder in holders:
    place = getattr(place, holder)
def work(*args, **options):
    print("working", flush=True)
    time.sleep(600)
setattr(place, name, work)
sys.exit(command.main(sys.argv[4:]))
"""


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), **options},
    )  # fmt: skip


def run(*arguments, **options):
    with start("-m", "sbnet_cupy", *arguments, **options) as process:
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err


@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [
        ("sbnet_cupy.__main__", "_gpu", ["info"]),
        ("sbnet_cupy.demo.compare", "best_times", ["demo", "sky.png", "--device", "cpu"]),
        ("benchmarks.harness.session", "Session.measure_ceilings", ["bench", "--cpu"]),
    ],
)
def test_an_interrupt_is_one_line_and_exit_code_130(
    module, function, arguments, tmp_path, require, monkeypatch
):
    if arguments[0] != "info":
        require("demo")
        write_png(tmp_path / "sky.png", sky())
        arguments = [*arguments, "--out", "."]
    monkeypatch.chdir(tmp_path)
    with start("-c", INTERRUPTIBLE, str(ROOT), module, function, *arguments) as process:
        for line in process.stdout:
            if line.strip() == "working":
                process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "sbnet-cupy: interrupted\n"
        assert process.wait(timeout=60) == 130


def run_into_a_closed_pipe(*arguments, **options):
    """Return the exit code and what goes to standard error."""
    with start("-m", "sbnet_cupy", *arguments, **options) as process:
        process.stdout.close()  # before anything is written
        err = process.stderr.read()
        return process.wait(timeout=300), err


@pytest.mark.parametrize(
    "arguments, unbuffered", thinned_product(3, [["info"], ["bench", "--list"]], ["", "1"])
)
def test_a_pipe_may_close(arguments, unbuffered):
    assert run_into_a_closed_pipe(*arguments, PYTHONUNBUFFERED=unbuffered) == (141, "")


def test_a_pipe_may_close_on_the_help():
    assert run_into_a_closed_pipe("--help", PYTHONUNBUFFERED="") == (141, "")


def test_the_demo_writes_its_picture_though_the_pipe_closed(tmp_path, require):
    require("demo")
    picture = write_png(tmp_path / "sky.png", sky())
    arguments = ["demo", picture, "--device", "cpu", "--out", str(tmp_path)]
    assert run_into_a_closed_pipe(*arguments, PYTHONUNBUFFERED="1") == (141, "")
    assert (tmp_path / "sbnet_demo_sky.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments",
    thinned(
        [["info"], ["bench", "--list"], ["--help"], ["demo", "--help"], ["bench", "--help"]], 3
    ),
)
def test_text_fits_a_terminal_of_80_columns(arguments):
    code, out, err = run(*arguments, COLUMNS="80")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80


def test_info_folds_below_the_text_and_nowhere_else():
    code, narrow, _ = run("info", COLUMNS="60")
    assert code == 0
    lines = narrow.splitlines()
    assert max(map(len, lines)) <= 60
    piped = dict(os.environ)
    piped.pop("COLUMNS", None)
    whole = subprocess.run(
        [sys.executable, "-m", "sbnet_cupy", "info"],
        capture_output=True, text=True, env=piped | {"PYTHONPATH": str(ROOT)}, timeout=300,
    ).stdout  # fmt: skip
    assert narrow.split() == whole.split()
    assert len(whole.splitlines()) < len(lines)
