"""Kernels that overlap with those ahead of them end, however often they are launched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).resolve().parent.parent
LAUNCHES = 20_000  # of each plan; one in which a lane waited alone hung after 6,000 to 35,000


def test_thousands_of_launches_end(require):
    """In a process of their own: nothing ends a kernel that hangs but the end of its process."""
    require("gpu")
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "on_gpu.launch_chain", str(LAUNCHES)], capture_output=True,
        text=True, timeout=240, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.stdout.split()[-1:] == ["done"], done.stdout + done.stderr
