"""The table fits terminals of any usual width, and every number is in it."""

import numpy as np
import pytest

from sbnet_cupy.demo.compare import Comparison, Peer
from sbnet_cupy.demo.report import Report
from sbnet_cupy.demo.table import print_table

LABELS = [
    "blocks computed (12 x 12 pixels)",
    "time: list the blocks",
    "time: convolve",
    "dense time / block-sparse time",
    "sources found",
    "largest difference in active blocks",
]


@pytest.fixture(autouse=True, scope="module")
def _extra(require):
    require("demo")


def report(peer=None, error=0.0):
    """A report with large numbers."""
    nothing = np.zeros((1, 1, 1, 1))
    result = Comparison(
        dense=nothing, sparse=nothing, difference=nothing[0, 0], inside=nothing[0] > 0,
        tile=(12, 12), blocks=(140_892, 1_750_000), dense_ms=130_780.4, list_ms=10.95,
        sparse_ms=989.05, error=error, tolerance=1e-3, peer=peer,
    )  # fmt: skip
    return Report(
        name="a picture [of a name] that is long.png",
        task="3 differences of Gaussians, 11 x 11, float32",
        picture=nothing[0, 0],
        picture_label="",
        mask=np.zeros((2250, 3000), bool),
        mask_label="",
        response=nothing[0, 0],
        response_label="",
        result=result,
        rows=[("sources found", 16_045, 15_820), ("... by both", "", 15_820)],
        reduced_from=(9000, 12000, 4),
    )


def printed(capsys, monkeypatch, columns, **options):
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    print_table(report(**options), "CPU (NumPy 2.4.6)")
    return capsys.readouterr().out.splitlines()


PEER = Peer("PyTorch 2.13.0", "channels_last", 26_156.08, 1e-6)


@pytest.mark.parametrize("columns", [70, 80, 100, 200, None])
@pytest.mark.parametrize("peer", [None, PEER], ids=["alone", "with PyTorch"])
def test_nothing_is_cut_or_folded(peer, columns, capsys, monkeypatch):
    lines = printed(capsys, monkeypatch, columns, peer=peer)
    assert all(len(line) <= (columns or 120) for line in lines)
    for label in LABELS:
        assert any(line.strip().startswith(label) for line in lines), label
    text = " ".join(" ".join(lines).split())
    for words in ("a picture [of a name] that is long.png", "computed at 2250 x 3000",
                  "140,892 of 1,750,000 (8.1%)", "130,780 ms", "989.05 ms", "10.95 ms", "130.78",
                  "16,045", "15,820", "which explains 0.001."):  # fmt: skip
        assert words in text
    for words in ("dense, PyTorch 2.13.0", "26,156 ms", "channels_last", "26.16"):
        assert (words in text) == (peer is not None)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_wrong_result_of_pytorch_is_said_and_not_timed(columns, capsys, monkeypatch):
    peer = Peer("PyTorch 2.13.0", None, None, 0.25)
    lines = printed(capsys, monkeypatch, columns, peer=peer)
    (line,) = (line for line in lines if "... not timed: differs from dense by" in line)
    assert line.split()[-1] == "0.25"


def test_a_wrong_result_of_ours_is_said(capsys, monkeypatch):
    assert "DIFFERENT" in " ".join(printed(capsys, monkeypatch, 80, error=0.1))
    assert "DIFFERENT" in " ".join(printed(capsys, monkeypatch, 80, error=np.nan))
