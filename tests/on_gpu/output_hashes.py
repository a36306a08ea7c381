"""Hash the results of a fixed table of calls, to compare two states of the package bit for bit.

``python -m tests.on_gpu.output_hashes --write FILE`` runs the table and writes a JSON file;
``--compare FILE`` runs it again and lists every difference. Only public names are called, so the
same script runs on both states: ``PYTHONSAFEPATH=1 PYTHONPATH=OTHER:. python -m ...`` takes the
package from the folder OTHER. Compare on one machine: vendor libraries differ between machines.
"""
# ruff: noqa: E402 - the environment is set before NumPy and the frameworks read it

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import zlib

for _name in ("OMP", "OPENBLAS", "MKL"):  # one thread: matrix products add up in one order
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault(  # no choice by timing, so that two processes choose alike
    "XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"
)

import numpy as np

import sbnet_cupy as sb

from .output_calls import TABLE
from .output_libraries import LIBRARIES, Missing
from .output_modules import MODULES


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--write", metavar="FILE", help="write the hashes to this JSON file")
    target.add_argument("--compare", metavar="FILE", help="compare with this JSON file")
    parser.add_argument("--only", default=",".join(LIBRARIES), help="libraries, by comma")
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the calls")
    options = parser.parse_args(arguments)
    print("sbnet_cupy is", os.path.dirname(sb.__file__))
    first, parts = map(int, options.part.split("/"))
    names, skipped = names_of(options.only.split(","))
    names = dict(list(names.items())[first - 1 :: parts])
    found, unstable = run(names)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    for name, outputs in found.items():
        if len(outputs) == 1 and "Error: " in outputs[0]:
            print(f"refused {name}: {outputs[0]}")
    for name in unstable:
        print(f"a second call gave other bits: {name}")
    if options.write:
        with open(options.write, "w") as file:
            json.dump({"calls": found, "skipped": skipped}, file, indent=0, sort_keys=True)
        print(f"{len(found)} calls written to {options.write}")
        return 1 if unstable else 0
    with open(options.compare) as file:
        known = json.load(file)["calls"]
    if parts == 1:  # calls that are gone count too
        libraries = {name.partition(" ")[0] for name in found}
        names |= {name: None for name in known if name.partition(" ")[0] in libraries}
    known = {name: known[name] for name in names if name in known}
    different = compare(known, found)
    print(f"{len(found)} calls, {different} different from {options.compare}")
    return 1 if different or unstable else 0


def names_of(libraries):
    """Return (library, call, options) by name, and why libraries are skipped."""
    names, skipped = {}, {}
    for library in libraries:
        try:
            lib = LIBRARIES[library]()
        except Missing as missing:
            skipped[library] = str(missing)
            continue
        for call, options in [*TABLE, *MODULES]:
            if lib.takes(call, options):
                words = (library, call.__name__, *(f"{k}={v}" for k, v in options.items()))
                assert " ".join(words) not in names, words
                names[" ".join(words)] = lib, call, options
    return names, skipped


def run(names):
    """Return the hashes by call, and the calls that gave other bits the second time."""
    found, unstable = {}, []
    for name, (lib, call, options) in names.items():
        found[name], again = (hashes(lib, call, name, options) for _ in range(2))
        if again != found[name]:  # the second time what was prepared is used again
            unstable.append(name)
    return found, unstable


def hashes(lib, call, name, options):
    """Return one line for each output of a call, or its error; inputs depend on the name alone."""
    seed = zlib.crc32(name.partition(" ")[2].encode())
    try:
        outputs = call(lib, Draw(seed), **options)
        return [line(lib.to_numpy(output)) for output in flat(outputs)]
    except Exception as error:  # what a call refuses is part of the table: both states must alike
        return [f"{type(error).__name__}: {error}"]


def line(array):
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{digest} {array.shape} {array.dtype}"


def flat(value):
    """Yield the arrays in tuples and dataclasses."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from flat(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from flat(getattr(value, field.name))
    elif isinstance(value, int):
        yield np.int64(value)
    elif value is not None:
        yield value


def compare(known, found):
    """Print what differs, also what only one side has; return how many calls do."""
    different = 0
    for name in sorted(known.keys() | found.keys()):
        before, after = known.get(name), found.get(name)
        if before != after:
            different += 1
            print(f"DIFFERENT {name}\n  before {before}\n  after  {after}")
    return different


class Draw:
    """Inputs from a seed: every bit of the mantissas is used, so that sums show their order."""

    def __init__(self, seed):
        self._bits = np.random.PCG64(seed)

    def __call__(self, *shape, dtype="float32", low=-2.0, high=2.0):
        words = self._bits.random_raw(int(np.prod(shape))).reshape(shape)
        if dtype == "bool":
            return words % 10 < 2
        unit = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        values = low + (high - low) * unit
        if dtype == "bfloat16":
            import ml_dtypes

            return values.astype(ml_dtypes.bfloat16)
        if np.dtype(dtype).kind in "iu":
            values = np.abs(values * 30) if np.dtype(dtype).kind == "u" else values * 60
        return values.astype(dtype)


if __name__ == "__main__":
    sys.exit(main())
