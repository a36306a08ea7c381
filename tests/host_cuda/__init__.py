"""Run the CUDA kernels of ``cuda_src`` on the CPU: g++ compiles them against a shim.

    stem = "block_sparse/gather_scatter/sparse_gather"
    host_cuda.launch(stem, "gather_rows", ("uint4", 18, 32), grid, 256, args)

is ``sbnet_cupy.core.launch.launch`` for NumPy arrays; a test replaces the one by the other.

- ``compiler.py`` makes shared libraries with g++ and keeps them on disk;
- ``launcher.py`` checks the arguments and runs a kernel;
- ``instantiations.py`` remembers which instantiations ran, for CI to compile them for real GPUs;
- ``sanitized.py`` runs pytest with AddressSanitizer and UndefinedBehaviorSanitizer;
- ``cuda_on_host.h`` is the shim itself; start reading there.
"""

from .compiler import SANITIZE, CompileError, available
from .instantiations import INSTANTIATIONS, read_instantiations
from .launcher import CUDA_SRC, KernelError, constants, describe, launch, prepare, sm_count

__all__ = [
    "CUDA_SRC",
    "INSTANTIATIONS",
    "SANITIZE",
    "CompileError",
    "KernelError",
    "available",
    "constants",
    "describe",
    "launch",
    "prepare",
    "read_instantiations",
    "sm_count",
]
