"""Which kernel instantiations the tests have run: the list that CI compiles for real GPUs."""

import json
import os

INSTANTIATIONS = {}  # (stem, kernel, template) -> None: an ordered set


def record(stem, kernel, template):
    """Record an instantiation, also in the file that ``SBNET_RECORD_INSTANTIATIONS`` names.

    Each is written at once, as one line, so processes that run in parallel or crash lose nothing.
    """
    key = (stem, kernel, tuple(template))
    if key in INSTANTIATIONS:
        return
    INSTANTIATIONS[key] = None
    path = os.environ.get("SBNET_RECORD_INSTANTIATIONS")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(key, default=int) + "\n")


def read_instantiations(path):
    """Return the distinct (stem, kernel, template) in a recorded file, sorted."""
    with open(path, encoding="utf-8") as file:
        keys = {(stem, kernel, tuple(template)) for stem, kernel, template in map(json.loads, file)}
    return sorted(keys, key=repr)
