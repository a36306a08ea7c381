"""Fail unless two wheels hold the same files: python .ci/compare_wheels.py WHEEL WHEEL."""

import sys
import zipfile


def contents(path):
    """Return {name: bytes}."""
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


first, second = map(contents, sys.argv[1:])
differing = sorted(
    name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
)
if differing:
    sys.exit(f"{sys.argv[1]} (by way of the sdist) and {sys.argv[2]} differ in {differing}")
print(f"{len(first)} files in the wheel, the same by way of the sdist")
