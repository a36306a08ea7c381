"""Fail unless sbnet_cupy comes from an environment, kernels and all: python ... ENVIRONMENT."""

import sys
from pathlib import Path

import sbnet_cupy
from sbnet_cupy.core import compile as compiling

environment = Path(sys.argv[1]).resolve()
package = Path(sbnet_cupy.__file__).resolve().parent
if environment not in package.parents:
    sys.exit(f"sbnet_cupy comes from {package}, not from {environment}")
if compiling.SOURCE_DIR.resolve() != package / "cuda_src":
    sys.exit(f"kernels come from {compiling.SOURCE_DIR}, not from {package / 'cuda_src'}")
here = Path(__file__).resolve().parents[1] / "cuda_src"
kernels = compiling.SOURCE_DIR
missing = {p.relative_to(here) for p in here.rglob("*")} - {
    p.relative_to(kernels) for p in kernels.rglob("*")
}
if missing or not (package / "py.typed").is_file():
    sys.exit(f"the wheel lacks py.typed or {sorted(map(str, missing))}")
print(f"sbnet_cupy {sbnet_cupy.__version__} from the wheel, with its kernels")
