"""The demo end to end: what it finds, what it prints, and that it writes its picture."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sbnet_cupy.__main__ import main
from sbnet_cupy.demo import picture_file
from support.demo_files import lidar, sky, write_png, write_scan

PNG_START = b"\x89PNG\r\n\x1a\n"
GRID = ["--x-range", "0", "10", "--y-range", "-4", "4"]


@pytest.fixture(autouse=True, scope="module")
def _extra(require):
    require("demo")


def demo(capsys, tmp_path, *arguments, code=0):
    """Run the demo on the CPU; return its output and the PNG's path, which must exist."""
    out = tmp_path / "out"
    assert main(["demo", *arguments, "--out", str(out), "--device", "cpu"]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    (png,) = out.glob("*.png")
    assert png.read_bytes().startswith(PNG_START)
    assert f"Wrote {png}" in captured.out.replace("\n", "")
    assert "Equal up to rounding" in captured.out
    return captured.out, png


def cells(output, label):
    """The words of a table row after its label."""
    (line,) = (line for line in output.splitlines() if line.strip().startswith(label))
    return line.replace(label, "").split()


def test_demo_without_an_argument_finds_the_sources_of_the_deep_field(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sbnet_cupy", "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error", "COLUMNS": "100"},
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Hubble deep field, 872 x 1000" in done.stdout
    dense, sparse = map(int, cells(done.stdout, "sources found"))
    assert dense > 500
    assert sparse > 0.95 * dense
    assert (tmp_path / "sbnet_demo_hubble.png").read_bytes().startswith(PNG_START)


def test_demo_on_a_picture(tmp_path, capsys):
    picture = write_png(tmp_path / "sky.png", sky())
    output, png = demo(capsys, tmp_path, picture)
    assert png.name == "sbnet_demo_sky.png"
    assert cells(output, "sources found") == ["12", "12"]
    assert cells(output, "... by both") == ["12"]


def test_demo_prints_the_same_every_time_but_for_the_times(tmp_path, capsys):
    picture = write_png(tmp_path / "sky.png", sky(seed=3))
    first, second = (demo(capsys, tmp_path, picture)[0] for _ in range(2))
    for label in ("sources found", "blocks computed", "largest difference"):
        assert cells(first, label) == cells(second, label)


def test_demo_with_a_mask_computes_its_blocks_only(tmp_path, capsys):
    picture = write_png(tmp_path / "sky.png", np.stack([sky()] * 3, axis=-1))
    chosen = np.zeros((64, 90), np.uint8)
    chosen[12, 12] = 1
    mask = write_png(tmp_path / "mask.png", chosen)
    output, _ = demo(capsys, tmp_path, picture, "--mask", mask, "--block-size", "30")
    assert cells(output, "blocks computed (20 x 20 pixels)") == ["all", "1", "of", "20", "(5.0%)"]
    assert cells(output, "sources found") == ["12", "1"]


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((40, 40), np.uint8),
        np.full((30, 50, 4), 255, np.uint8),
        np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40,
    ],
    ids=["black", "white with alpha", "16-bit ramp"],
)
def test_demo_on_pictures_without_sources(pixels, tmp_path, capsys):
    output, _ = demo(capsys, tmp_path, write_png(tmp_path / "picture.png", pixels))
    assert cells(output, "sources found")[1] == "0"


def test_demo_with_an_empty_mask(tmp_path, capsys):
    picture = write_png(tmp_path / "sky.png", sky())
    mask = write_png(tmp_path / "mask.png", np.zeros((64, 90), np.uint8))
    output, _ = demo(capsys, tmp_path, picture, "--mask", mask)
    assert cells(output, "sources found") == ["12", "0"]
    assert cells(output, "largest difference in active blocks") == ["0"]


def test_demo_on_a_scan(tmp_path, capsys):
    scan = write_scan(tmp_path / "scan.bin")
    output, png = demo(capsys, tmp_path, scan, *GRID)
    assert png.name == "sbnet_demo_scan.png"
    assert "scan.bin, 100 x 80" in output
    assert cells(output, "points in the grid") == ["3,997", "of", "3,998"]
    active, _, total, _ = cells(output, "blocks computed (16 x 16 pixels)")[1:]
    assert 0 < int(active) < int(total) == 35


def test_demo_on_a_scan_with_a_mask(tmp_path, capsys):
    scan = write_scan(tmp_path / "scan.bin")
    mask = write_png(tmp_path / "mask.png", np.eye(100, 80, dtype=np.uint8))
    output, _ = demo(capsys, tmp_path, scan, *GRID, "--mask", mask)
    assert cells(output, "blocks computed (16 x 16 pixels)")[1] == "5"


@pytest.mark.parametrize(
    ("name", "options"), [("s.pcd.bin", []), ("s.bin", ["--columns", "5"]), ("s.npy", [])]
)
def test_demo_on_a_scan_of_five_columns(name, options, tmp_path, capsys):
    table = lidar(5)
    if name.endswith(".npy"):
        np.save(tmp_path / name, table)
    else:
        table.tofile(tmp_path / name)
    output, png = demo(capsys, tmp_path, str(tmp_path / name), *options, "--cell", "0.5")
    assert png.name == f"sbnet_demo_{Path(name).stem}.png"
    inside = ((table[:, 0] >= 0) & (table[:, 0] < 70.4) & (abs(table[:, 1]) < 40)).sum()
    assert cells(output, "points in the grid") == [str(inside), "of", "1,920"]


def test_demo_times_pytorch_as_well(tmp_path, capsys, torch):
    picture = write_png(tmp_path / "sky.png", sky())
    scan = write_scan(tmp_path / "scan.bin")
    for arguments in ([picture], [scan, *GRID]):
        output, png = demo(capsys, tmp_path, *arguments)
        png.unlink()
        assert f"dense, PyTorch {torch.__version__.partition('+')[0]}" in output
        assert len(cells(output, "time: convolve")) == 6  # three times in ms
        assert cells(output, "... in the faster layout")[0] in ("NCHW", "channels_last")


def test_demo_without_pytorch(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    output, _ = demo(capsys, tmp_path, write_png(tmp_path / "sky.png", sky()))
    assert "PyTorch" not in output
    assert len(cells(output, "time: convolve")) == 4


def test_demo_on_a_large_picture_says_the_size_it_computed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(picture_file, "MOST_COMPUTED", 60 * 100)
    picture = write_png(tmp_path / "sky.png", sky((130, 190)))
    mask = write_png(tmp_path / "mask.png", np.eye(130, 190, dtype=np.uint8))
    output, _ = demo(capsys, tmp_path, picture, "--mask", mask)
    assert "130 x 190, computed at 33 x 48: means of 4 x 4 pixels" in " ".join(output.split())
    assert cells(output, "blocks computed (12 x 12 pixels)")[1:4] == ["3", "of", "12"]


HIGHEST = """
import sys
from pathlib import Path
from sbnet_cupy.__main__ import main
code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text()
print("peak", status.partition("VmHWM:")[2].split()[0])
sys.exit(code)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_demo_on_a_picture_of_a_hundred_million_pixels_takes_bounded_memory(tmp_path):
    from PIL import Image

    picture = np.random.default_rng(0).integers(0, 9, (1, 12_000, 3), np.uint8).repeat(9000, axis=0)
    for row in range(50, 9000, 400):
        picture[row : row + 20, row : row + 20] = 255
    Image.fromarray(picture).save(tmp_path / "big.png", compress_level=1)
    del picture
    done = subprocess.run(
        [sys.executable, "-c", HIGHEST, "demo", str(tmp_path / "big.png"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "9000 x 12000, computed at 2250 x 3000" in " ".join(done.stdout.split())
    assert int(cells(done.stdout, "peak")[0]) < 2_000_000  # kB
    assert (tmp_path / "sbnet_demo_big.png").read_bytes().startswith(PNG_START)


def test_demo_reports_a_disagreement_with_exit_code_1(tmp_path, capsys, monkeypatch):
    from sbnet_cupy.demo import picture

    right = picture.sparse_conv2d
    monkeypatch.setattr(picture, "sparse_conv2d", lambda *args: right(*args) * 1.01)
    path = write_png(tmp_path / "sky.png", sky())
    assert main(["demo", path, "--out", str(tmp_path), "--device", "cpu"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
