"""Compile kernels for every architecture, without a GPU; list what spills, and fail then.

Those whose wgmma instructions the assembler makes wait for each other are listed and fail too.

    python .ci/compile_kernels.py [--all] INSTANTIATIONS [ARCHITECTURE ...]

INSTANTIATIONS is a file that the tests wrote: run them with SBNET_RECORD_INSTANTIATIONS naming it.
Each of these is compiled for one architecture, which share them out so that every kernel is
compiled for every architecture that runs it; with --all, for all of them. To these come, for each
architecture, those of planned.py, each for the first of the architectures with the same
instructions that plan it. A kernel of cuda_src that is not in the file at all is a failure.
"""

import concurrent.futures
import functools
import os
import re
import sys
import time
from pathlib import Path

import planned

from sbnet_cupy.core import compile as compiling

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from host_cuda import read_instantiations  # noqa: E402

ARCHITECTURES = tuple(planned.DEVICES)
ALIKE = ("sm_80", "sm_86", "sm_89"), ("sm_100", "sm_120")  # by the instructions that kernels use
PER_PROGRAM = 24  # instantiations compiled together: a header is then read once for all
FUNCTION = re.compile(
    r"Function properties for (\S+)\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads"
)
WAITING = re.compile(r"wgmma\.mma_async instructions are serialized .* the function '(\S+)'")
KERNEL = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\([^()]*(?:\([^()]*\)[^()]*)*\)\s+)?(\w+)\("
)


def main(path, *architectures, everything=False):
    """Compile for each architecture what it has of the instantiations; return the exit status."""
    recorded = read_instantiations(path)
    if not recorded:
        sys.exit(f"{path} lists no instantiations")
    failed = False
    for kernel in sorted(all_kernels() - {kernel for _, kernel, _ in recorded}):
        print(f"  {kernel} is launched by none of the tests that wrote {path}")
        failed = True
    programs, shared = {}, shares(recorded)
    for arch in architectures or ARCHITECTURES:
        here = set(recorded if everything else shared[arch])
        here = {key for key in here if planned.launched(arch, *key)}
        here |= set(planned.instantiations(arch))
        if not everything:
            here -= planned_before(arch) - shared[arch]
        programs[arch] = list(batches(here))
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = {  # all at once: no core waits for the last program of an architecture
            arch: [pool.submit(compile_program, *program, arch) for program in of_arch]
            for arch, of_arch in programs.items()
        }
        for arch, of_arch in programs.items():
            total = sum(len(expressions) for _, expressions in of_arch)
            results = [job.result() for job in jobs[arch]]
            kernels = [kernel for compiled, _ in results for kernel in compiled]
            spilled = [k for k in kernels if any(k[2:])]
            spilled = [k for k in map(functools.partial(alone, arch), spilled) if any(k[2:])]
            for stem, expression, stack, stores, loads, waiting in spilled:
                print(f"  {arch} {stem}: {expression}: {stack} bytes of stack, "
                      f"spill stores {stores}, loads {loads}"
                      + ", wgmma instructions wait for each other" * waiting)  # fmt: skip
            seconds = sum(seconds for _, seconds in results)
            print(f"{arch}: {len(kernels)} kernels compiled in {seconds:.1f} s of one core, "
                  f"{len(spilled)} spill or wait", flush=True)  # fmt: skip
            failed |= bool(spilled) or len(kernels) != total
    return int(failed)


def all_kernels():
    """Return the names of all kernels in cuda_src."""
    files = compiling.SOURCE_DIR.rglob("*.cu*")
    return {name for path in files for name in KERNEL.findall(path.read_text(encoding="utf-8"))}


def shares(recorded):
    """Return {architecture: its part of the instantiations}, some of each kernel that it runs."""
    parts, by_kernel = {arch: set() for arch in ARCHITECTURES}, {}
    for key in recorded:
        by_kernel.setdefault(key[:2], []).append(key)
    for keys in by_kernel.values():
        running = [[arch for arch in ARCHITECTURES if planned.launched(arch, *k)] for k in keys]
        for number, (key, able) in enumerate(zip(keys, running, strict=True)):
            if able:
                parts[able[number % len(able)]].add(key)
        for arch in ARCHITECTURES:
            able = [key for key, archs in zip(keys, running, strict=True) if arch in archs]
            if able and parts[arch].isdisjoint(able):
                parts[arch].add(able[0])
    return parts


def planned_before(arch):
    """Return the planned instantiations that an architecture before, with its instructions, has."""
    family = next((group for group in ALIKE if arch in group), (arch,))
    before = family[: family.index(arch)]
    return {key for other in before for key in planned.instantiations(other)}


def batches(instantiations):
    """Yield (stem, name expressions) of one program each."""
    by_stem = {}
    for stem, kernel, template in sorted(instantiations, key=repr):
        by_stem.setdefault(stem, []).append(compiling.name_expression(kernel, template))
    for stem, expressions in by_stem.items():
        for start in range(0, len(expressions), PER_PROGRAM):
            yield stem, expressions[start : start + PER_PROGRAM]


def alone(arch, kernel):
    """Return a kernel of a program of several as it is by itself: the package compiles it so."""
    stem, expression = kernel[:2]
    return compile_program(stem, [expression], arch)[0][0]


def compile_program(stem, expressions, arch):
    """Return the kernels of a program, and how many seconds it took.

    Of each kernel: (stem, expression, bytes of stack frame, spill stores, spill loads, whether its
    wgmma instructions wait for each other).
    """
    start = time.process_time()
    _, symbols, log = compiling.compile_cubin(stem, expressions, arch)
    used = {symbol: tuple(map(int, numbers)) for symbol, *numbers in FUNCTION.findall(log)}
    waiting = set(WAITING.findall(log))
    kernels = [
        (stem, expression, *used[symbols[expression]], symbols[expression] in waiting)
        for expression in expressions
    ]
    return kernels, time.process_time() - start


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--all"]
    if not arguments:
        sys.exit(__doc__)
    sys.exit(main(*arguments, everything="--all" in sys.argv))
