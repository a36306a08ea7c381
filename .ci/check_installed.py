"""Fail unless sbnet_cupy comes from an environment, kernels and all: python ... ENVIRONMENT."""

import sys
from pathlib import Path

import sbnet_cupy
from sbnet_cupy import _kernels

environment = Path(sys.argv[1]).resolve()
package = Path(sbnet_cupy.__file__).resolve().parent
if environment not in package.parents:
    sys.exit(f"sbnet_cupy comes from {package}, not from {environment}")
if _kernels.SOURCE_DIR.resolve() != package / "cuda_src":
    sys.exit(f"kernels come from {_kernels.SOURCE_DIR}, not from {package / 'cuda_src'}")
here = Path(__file__).resolve().parents[1] / "cuda_src"
missing = {path.name for path in here.iterdir()} - {p.name for p in _kernels.SOURCE_DIR.iterdir()}
if missing or not (package / "py.typed").is_file():
    sys.exit(f"the wheel lacks py.typed or {sorted(missing)}")
print(f"sbnet_cupy {sbnet_cupy.__version__} from the wheel, with its kernels")
