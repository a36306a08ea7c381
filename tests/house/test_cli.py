"""The command line: info, help, and one clear line for every mistake."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy.__main__ import main
from support.demo_files import lidar, sky, write_png, write_scan


@pytest.fixture(autouse=True)
def _extra(request, require):
    if request.node.name.startswith("test_demo"):
        require("demo")


def test_info_names_versions_and_what_to_install(capsys):
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert f"numpy {np.__version__}" in output
    assert "GPU: " in output
    for part in ("cupy", "CUDA kernels", "cudnn", "torch", "jax", "tensorflow", "scikit-image"):
        assert part in output
    for line in output.splitlines():
        if "  -  " in line:
            assert "pip install" in line


def test_info_imports_no_framework():
    code = (
        "import sys, sbnet_cupy.__main__ as m; m.info(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'jax', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_tells_what_there_is(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    output = capsys.readouterr().out
    assert "demo" in output
    assert ("examples:" in output) == (arguments == ["--help"])


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sbnet-cupy {sbnet_cupy.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["dance"], ["demo", "--cell", "wide"]])
def test_usage_errors_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: sbnet-cupy" in capsys.readouterr().err


# --- bad files, bad options -----------------------------------------------------------------------


def broken_png(folder):
    whole = Path(write_png(folder / "whole.png", sky()))
    (folder / "broken.png").write_bytes(whole.read_bytes()[:200])
    return [str(folder / "broken.png")]


def text_as_png(folder):
    (folder / "text.png").write_text("not a picture")
    return [str(folder / "text.png")]


def empty_png(folder):
    (folder / "empty.png").touch()
    return [str(folder / "empty.png")]


def scan_of(count):
    def make(folder):
        (folder / "scan.bin").write_bytes(bytes(count))
        return [str(folder / "scan.bin")]

    return make


def five_columns(name, *options):
    def make(folder):
        lidar(5).tofile(folder / name)
        return [str(folder / name), *options]

    return make


def all_nan(folder):
    np.full((5, 4), np.nan, np.float32).tofile(folder / "nan.bin")
    return [str(folder / "nan.bin")]


def text_as_bin(folder):
    (folder / "text.bin").write_text("x y z\n1 2 3\n")
    return [str(folder / "text.bin")]


def far_away(folder):
    np.full((5, 4), 900, np.float32).tofile(folder / "far.bin")
    return [str(folder / "far.bin")]


def with_mask(pixels):
    def make(folder):
        picture = write_png(folder / "sky.png", sky())
        return [picture, "--mask", write_png(folder / "mask.png", pixels)]

    return make


def with_options(*options, scan=False):
    def make(folder):
        path = write_scan(folder / "s.bin") if scan else write_png(folder / "sky.png", sky())
        return [path, *options]

    return make


def out_in_a_file(folder):
    (folder / "file").touch()
    return [write_png(folder / "sky.png", sky()), "--out", str(folder / "file" / "out")]


def out_taken(folder):
    (folder / "sbnet_demo_sky.png").mkdir()
    return [write_png(folder / "sky.png", sky())]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [str(folder / "missing.png")], "missing.png does not exist"),
        (lambda folder: [str(folder / "missing.bin")], "missing.bin does not exist"),
        (lambda folder: [str(folder)], "is not a file"),
        (broken_png, "cannot read"),
        (text_as_png, "cannot read"),
        (empty_png, "cannot read"),
        (lambda folder: [write_png(folder / "s.png", sky((9, 40)))], "at least 22 x 22 pixels"),
        (scan_of(0), "got 0 bytes"),
        (scan_of(1001), "whole points of 16 bytes"),
        (far_away, "got none of 5, which have x 900..900 and y 900..900; see --x-range"),
        (all_nan, "nan.bin must hold points with finite x, y and z, got 5 points, all with a NaN"),
        (text_as_bin, "text.bin must hold raw float32 values, got text"),
        (five_columns("s.bin"), "s.bin does not look like points of 4 float32 columns"),
        (five_columns("s.bin", "--columns", "7"), "must hold whole points of 28 bytes"),
        (five_columns("s.bin", "--columns", "2"), "--columns must be at least 3"),
        (five_columns("s.npy", "--columns", "5"), "--columns applies to .bin files"),
        (with_options("--x-range", "0", "1"), "--x-range applies to a scan, and"),
        (with_options("--cell", "0.1"), "--cell applies to a scan, and"),
        (with_options("--columns", "4"), "--columns applies to a scan, and"),
        (with_mask(np.ones((64, 91), np.uint8)), "--mask must be as large"),
        (with_options("--mask", "nowhere.png"), "nowhere.png does not exist"),
        (with_options("--block-size", "10"), "--block-size must be at least the kernel, 11"),
        (with_options("--block-size", "-3", scan=True), "--block-size must be at least"),
        (with_options("--block-size", "65"), "at least 65 x 65 pixels"),
        (with_options("--cell", "0", scan=True), "--cell must be a positive number"),
        (with_options("--cell", "nan", scan=True), "--cell must be a positive number"),
        (with_options("--cell", "1e-6", scan=True), "--cell 1e-06 makes"),
        (with_options("--cell", "10", scan=True), "the grid must be at least 18 x 18"),
        (with_options("--x-range", "5", "5", scan=True), "--x-range must be two numbers"),
        (with_options("--y-range", "0", "inf", scan=True), "--y-range must be two numbers"),
        (out_in_a_file, "--out: cannot create"),
        (out_taken, "--out: cannot write"),
    ],
)
def test_demo_answers_a_mistake_with_one_line(make, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--device", "cpu", *make(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sbnet-cupy demo: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("block", ["a folder", "a file", "read-only"])
def test_demo_finds_out_before_it_computes_that_it_cannot_write(
    block, tmp_path, capsys, monkeypatch
):
    from sbnet_cupy.demo import compare

    monkeypatch.setattr(compare, "best_times", lambda *args: pytest.fail("it has computed"))
    picture, out = write_png(tmp_path / "sky.png", sky()), tmp_path / "out"
    target = out / "sbnet_demo_sky.png"
    if block == "a file":
        out.touch()
    else:
        out.mkdir()
    if block == "a folder":
        target.mkdir()
    if block == "read-only":  # as for a user who is not root
        monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["demo", picture, "--out", str(out), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("sbnet-cupy demo: --out: cannot ")


def test_demo_leaves_an_old_picture_when_it_fails(tmp_path, capsys):
    (tmp_path / "sky.png").write_text("not a picture")
    target = tmp_path / "sbnet_demo_sky.png"
    for old in (None, b"an old one"):
        if old:
            target.write_bytes(old)
        assert main(["demo", str(tmp_path / "sky.png"), "--out", str(tmp_path)]) == 2
        assert (target.read_bytes() if target.exists() else None) == old
    capsys.readouterr()


def test_demo_in_a_process_prints_no_traceback(tmp_path):
    command = [sys.executable, "-m", "sbnet_cupy", "demo", str(tmp_path / "missing.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == f"sbnet-cupy demo: {tmp_path / 'missing.png'} does not exist\n"


def test_demo_asks_for_a_gpu_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["demo", "--device", "gpu", "--out", str(tmp_path)]) == 2
    assert "--device gpu: CuPy cannot be imported" in capsys.readouterr().err


def test_demo_names_the_missing_extra(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert 'pip install "sbnet-cupy[demo]"' in capsys.readouterr().err
