"""Run pytest with the kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.host_cuda.sanitized -q tests/block_sparse/gather_scatter/test_sparse_gather.py

A finding of a sanitizer ends the process: pytest prints which test ran, this module prints the
report, and the exit status is not 0. ``environment`` is for tests that start such a process.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from .compiler import plain_environment

_FLAGS = {
    "abort_on_error": "1",  # raises a signal, at which pytest prints the Python stack
    "print_stacktrace": "1",
    "handle_segv": "2",  # replaces pytest's handler
}
_ADDRESS_FLAGS = {
    "detect_leaks": "0",  # Python leaks
    "alloc_dealloc_mismatch": "0",  # other libraries in the process mismatch
    "use_sigaltstack": "0",  # fibers have their own stacks
}
_FINDINGS = ("ERROR: AddressSanitizer", "runtime error:")


def environment(reports=None):
    """Return the environment variables that load the sanitizers into a Python process.

    ``reports`` is a folder for the reports; without it they go to stderr.
    """
    log = {"log_path": f"{reports}/report"} if reports else {}
    # Preload libstdc++ too: the sanitizer looks for it when it starts, before anyone loads it.
    preload = [_library("libasan.so"), _library("libstdc++.so"), os.environ.get("LD_PRELOAD")]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    return {
        **inherited,  # but the new pytest is not an xdist worker
        "SBNET_SANITIZE": "1",
        "LD_PRELOAD": " ".join(filter(None, preload)),
        "ASAN_OPTIONS": _joined({**_FLAGS, **_ADDRESS_FLAGS, **log}),
        "UBSAN_OPTIONS": _joined({**_FLAGS, **log}),
    }


def _joined(flags):
    return ":".join(f"{name}={value}" for name, value in flags.items())


def _library(name):
    path = subprocess.run(
        ["g++", f"-print-file-name={name}"],
        capture_output=True,
        text=True,
        check=True,
        env=plain_environment(),
    ).stdout.strip()
    if not os.path.isabs(path):
        raise FileNotFoundError(f"g++ has no {name}; install the sanitizer libraries of GCC")
    return os.path.realpath(path)


def main(arguments):
    """Run pytest with ``arguments``; return its exit status, not 0 if something was found."""
    command = [sys.executable, "-m", "pytest", *arguments]
    print("sanitized:", shlex.join(command), flush=True)
    with tempfile.TemporaryDirectory() as reports:
        status = subprocess.run(command, env=environment(reports)).returncode
        for path in sorted(Path(reports).iterdir()):
            report = path.read_text(errors="replace")
            print(report, file=sys.stderr)
            if any(finding in report for finding in _FINDINGS):
                status = status or 1
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
