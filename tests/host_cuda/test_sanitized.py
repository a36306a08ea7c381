"""The sanitizers find the bugs planted in toys/planted.cu, and nothing in right kernels."""

import subprocess
import sys
from pathlib import Path

import pytest

import host_cuda
from host_cuda import sanitized

pytestmark = pytest.mark.exhaustive
TESTS = Path(__file__).resolve().parents[1]
TOYS = Path(host_cuda.__file__).parent / "toys"

# kernel -> (template, its arguments when right, when wrong, dynamic shared bytes, the report)
PLANTED = {
    "write_global": ((), "x, 2", "x, 3", 0, "heap-buffer-overflow"),
    "read_global": ((), "x, y, 0", "x, y, -1", 0, "heap-buffer-overflow"),
    "shared_index": ((5,), "x, 4", "x, 5", 0, "index 5 out of bounds for type 'float [5]'"),
    "shared_pointer": ((5,), "x, 4", "x, 5", 0, "global-buffer-overflow"),
    "dynamic_overflow": ((), "x, 4", "x, 5", 20, "heap-buffer-overflow"),
    "local_overflow": ((), "x, 3", "x, 4", 0, "stack-buffer-overflow"),
    "late_copy": ((), "x, y, 2", "x, y, 3", 0, "heap-buffer-overflow"),
    "signed_overflow": ((), "i, 2**30 - 1", "i, 2**30", 0, "signed integer overflow"),
    "misaligned": ((), "b, i, 4", "b, i, 5", 0, "misaligned address"),
}
SCRIPT = """
import sys
import numpy as np
from host_cuda import launch, prepare

planted = {planted!r}
prepare([("planted", name, row[0]) for name, row in planted.items()], source_dir={toys!r})
x, y = np.zeros(3, np.float32), np.zeros(1, np.float32)
i, b = np.zeros(1, np.int32), np.zeros(8, np.uint8)
for name in sys.argv[1:]:
    template, right, wrong, shared, _ = planted[name]
    for arguments in (right, wrong):
        launch("planted", name, template, 1, 1, eval(arguments), shared, source_dir={toys!r})
        print(name, arguments, "passed", flush=True)
"""


@pytest.fixture(autouse=True)
def _gpp(require):
    require("g++")


def run(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**sanitized.environment(), **environment},
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_ends_the_process(name):
    _, right, _, _, report = PLANTED[name]
    result = run(SCRIPT.format(planted=PLANTED, toys=str(TOYS)), name)
    assert result.stdout == f"{name} {right} passed\n", result.stderr
    assert result.returncode != 0
    assert report in result.stderr
    assert "planted.cu" in result.stderr


@pytest.mark.parametrize("ucontext", ["0", "1"])
def test_right_kernels_and_reported_errors_pass(ucontext):
    options = ["-q", "-p", "no:cacheprovider", "host_cuda/test_shim.py"]
    code = f"import pytest, sys; sys.exit(pytest.main({options}))"
    result = run(code, SBNET_HOST_UCONTEXT=ucontext)
    assert result.returncode == 0, result.stdout + result.stderr


def test_sanitized_pytest_fails_and_shows_the_report(tmp_path):
    lines = [
        "import numpy as np",
        "from host_cuda import launch",
        "def test_it():",
        "    args = (np.zeros(3, np.float32), 3)",
        f"    launch('planted', 'write_global', (), 1, 1, args, source_dir={str(TOYS)!r})",
    ]
    (tmp_path / "test_wrong.py").write_text("\n".join(lines))
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-m", "host_cuda.sanitized", *options],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 134  # aborted
    assert "heap-buffer-overflow" in result.stderr
    assert "in test_it" in result.stderr


def test_sanitizers_must_be_there_from_the_start():
    code = SCRIPT.format(planted=PLANTED, toys=str(TOYS))
    result = run(code, "write_global", LD_PRELOAD="")
    assert "tests.host_cuda.sanitized" in result.stderr
