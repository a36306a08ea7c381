"""Specs of JAX arrays, which are known while JAX traces; the package's containers as pytrees."""

import dataclasses

import jax
import numpy as np

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.block_params import BlockParams
from ..block_sparse.bottleneck.weights import BottleneckWeights
from ..core.arrays import library_of
from ..core.sizes import is_integer
from ..core.spec import ArraySpec
from ..errors import DeviceError, DTypeError, ShapeError
from ._callbacks import has_gpu

jax.tree_util.register_dataclass(
    ActiveBlocks, data_fields=["bin_counts", "active_block_indices"], meta_fields=["grid"]
)
jax.tree_util.register_dataclass(
    BottleneckWeights,
    data_fields=[field.name for field in dataclasses.fields(BottleneckWeights)],
    meta_fields=[],
)
jax.tree_util.register_static(BlockParams)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Like:
    """What a gradient needs to know of an array whose values it does not need."""

    shape: tuple
    dtype: np.dtype


def spec_of(name, value):
    """Return the spec of a JAX array, which may be traced, or None; raise for anything else."""
    if value is None:
        return None
    if not isinstance(value, jax.Array):
        if library_of(value) is None:
            instead = getattr(type(value), "instead", "use jax.numpy.asarray")
            raise DTypeError(
                f"{name} must be a JAX array, got {type(value).__name__}; {instead}"
            )
        raise DeviceError(
            f"{name} must be a JAX array, got one of {library_of(value).name}; convert it with "
            "jax.numpy.asarray (which makes float64 float32 without jax_enable_x64)"
        )
    if not isinstance(value.dtype, np.dtype) or value.dtype.name.lstrip("u") in ("int2", "int4"):
        raise DTypeError(f"{name} must have elements of whole bytes, got {value.dtype}; use astype")
    return ArraySpec(tuple(value.shape), value.dtype)


def sized_spec_of(name, value):
    """Do what spec_of does; raise where a size is a symbol, as in jax.export."""
    spec = spec_of(name, value)
    if spec is not None and not all(map(is_integer, spec.shape)):
        raise ShapeError(
            f"{name} must have sizes that are known while JAX traces, got {spec.shape}; export the "
            "function for each size"
        )
    return spec


def computes_on_gpu(x):
    """Whether JAX will compute with this array on a GPU, as far as is known while it traces."""
    if not isinstance(x, jax.core.Tracer):
        platform = next(iter(x.devices())).platform
    else:
        chosen = jax.config.jax_default_device
        platform = getattr(chosen, "platform", chosen) or jax.default_backend()
    return platform in ("gpu", "cuda") and has_gpu()
