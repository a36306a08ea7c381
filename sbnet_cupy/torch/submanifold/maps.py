"""Coordinate maps and kernel maps of tensors.

The core finds sites and makes maps, on views of the tensors. A CoordinateMap of tensors keeps the
native one that it views, which keeps its kernel maps with the tensors of their tables; all are
freed with it.
"""

import functools

import torch

from ...core.libraries import are_recorded
from ...core.torch_memory import to_tensor
from ...errors import DTypeError
from ...submanifold import global_pool, sparse_tensor
from ...submanifold import kernel_map as maps
from ...submanifold.coordinate_map import CoordinateMap, check_sites
from ...submanifold.keeping_container import CAPTURE, kept_or_made, mark_capture
from ...submanifold.kernel_map import KeptMap, KernelMap
from ...submanifold.site_conv import valid_rows
from ...submanifold.sources import note_source
from ...submanifold.sparse_tensor import check_tensor
from .. import _dispatch_state as state
from .._native import check_tensors, views
from .rooms import note, room
from .site_branch import find_beside, natively


def untraced(function):
    """Break the graph of a compiled function at a call: sites are found where there is data."""
    kept = out_of_modes(function)
    apart = torch.compiler.disable(kept)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return (apart if torch.compiler.is_compiling() else kept)(*args, **kwargs)

    return call


def out_of_modes(function):
    """Make what a function returns outside of the modes of a call: sites keep it for later ones.

    In inference mode it could not be saved for gradients, in torch.export it would be fake, and
    under torch.func a wrapper that is dead afterwards.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.is_inference_mode_enabled() or state.in_dispatch_mode():
            for value in (*args, *kwargs.values()):
                if isinstance(value, CoordinateMap) and "native" not in value._kept:
                    check_not_recorded(*value._arrays())
            with torch.inference_mode(False), state.without_modes():
                return function(*args, **kwargs)
        if state.has_function_transforms():
            with state.without_function_transforms():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def check_not_recorded(*tensors):
    """Raise where a trace records calls with one of these, of which sites are to be found."""
    if are_recorded(*tensors):
        raise RuntimeError(
            "sites cannot be found in a function that torch.jit.trace or make_fx traces: those of "
            "this call would be constants; use torch.compile, or find them outside of the function"
        )


def check_sparse(x, name="x"):
    """Raise unless ``x`` is a SparseTensor of tensors; return it."""
    check_tensor(x, name)
    check_tensors(**{f"{name}.features": x.features, f"{name}.indices": x.indices})
    return x


def check_floats(features):
    """Raise unless a tensor of features has a float dtype."""
    if not features.is_floating_point():
        raise DTypeError(
            f"features must be float16, bfloat16, float32 or float64, got {features.dtype}; use "
            "features.float()"
        )


class _KeptOfMap(dict):
    """What a tensor keeps; a copy of the tensor, or one from a pickle, keeps nothing at first.

    It holds addresses in memory that a copy does not have.
    """

    def __deepcopy__(self, memo):
        return _KeptOfMap()

    def __reduce__(self):
        return _KeptOfMap, ()


def kept_with(rows):
    """Return the dict of what was computed of the table of a map, which its tensor keeps."""
    try:
        return rows.kept_of_map
    except AttributeError:
        rows.kept_of_map = _KeptOfMap()
        return rows.kept_of_map


def sites_of(value, name):
    """Return the CoordinateMap that is given, or that of a SparseTensor."""
    value = sparse_tensor.sites_of(value)
    check_sites(name, value)
    return value


def native(coordinates):
    """Return the native CoordinateMap that views one of tensors; the same each time."""
    kept = coordinates._kept
    if "native" not in kept:
        arrays = coordinates._arrays()
        names = ("indices", "count", "status")
        check_tensors(**dict(zip(names, arrays, strict=False)))
        check_not_recorded(*arrays)
        grid = coordinates.spatial_shape, coordinates.batch_size

        def viewed():
            indices, count, *status = views(*arrays)
            return CoordinateMap(indices, count, *grid, *status)

        kept["native"] = natively(viewed, arrays[0])
    return kept["native"]


def of_native(made, source=None):
    """Return a CoordinateMap of tensors for one that the core made, from a source if any."""
    grid = made.spatial_shape, made.batch_size
    if source is not None:  # whose status it has
        status = source.status
    else:
        status = None if made.status is None else to_tensor(made.status)
    coordinates = CoordinateMap(to_tensor(made.indices), to_tensor(made.count), *grid, status)
    coordinates._kept["native"] = made
    if source is not None:
        note_source(coordinates, source)
    mark_capture(coordinates._kept, made._kept.get(CAPTURE, 0))
    rows = made._kept.get("valid")
    if rows is None:
        valid(coordinates)
    else:  # found with the sites
        coordinates._kept["valid"] = to_tensor(rows)
    return coordinates


@untraced
def valid(coordinates):
    """Return which rows hold a site, as a tensor that the coordinates keep."""
    return _found(coordinates, "valid", valid_rows)


@untraced
def sample_of(coordinates):
    """Return the sample of each row, -1 for rows of none, as a tensor that they keep."""
    return _found(coordinates, "sample", global_pool.sample_of)


def _found(coordinates, key, find):
    """Return what the core finds of coordinates, as a tensor that they keep under a key."""

    def make():
        sites = native(coordinates)
        return to_tensor(find_beside(lambda: find(sites), coordinates.indices))

    return kept_or_made(coordinates._kept, key, coordinates.indices, make)


@untraced
def kernel_map_of(coordinates, kernel_size, onto=None, **options):
    """Return the KernelMap of tensors that :func:`kernel_map` finds; see there."""
    makes_sites = onto is None and options.get("offsets") is None
    if makes_sites:
        options["capacity"], _ = room(options.get("capacity"))
    onto = None if onto is None else sites_of(onto, "onto")
    known = (coordinates,) if onto is None else (coordinates, onto)
    indices = [each.indices for each in known]
    options["onto"] = None if onto is None else native(onto)
    sites = native(coordinates)

    def find():
        return maps.find_map(sites, kernel_size, **options)

    made = _of_native(find_beside(find, *indices), known)
    if makes_sites:
        note(made.target)
    return made


@untraced
def same_map(coordinates, kernel_size, dilation=1):
    """Return the KernelMap of a submanifold convolution with a kernel size of plain integers.

    The sites keep its table under these arguments, so that later calls only look it up.
    """
    if type(dilation) is not int:  # a key of it might equal one of other types
        return kernel_map_of(coordinates, kernel_size, coordinates, dilation=dilation)
    key, kept = ("same", kernel_size, dilation), coordinates._kept
    found = kept.get(key)
    if found is None:

        def make():
            return KeptMap.for_source(
                kernel_map_of(coordinates, kernel_size, coordinates, dilation=dilation)
            )

        found = kept_or_made(kept, key, coordinates.indices, make)
    return found.of(coordinates)


@untraced
def map_between(fine, kernel_size, coarse):
    """Return the map of a convolution or pooling of ``fine`` that made the sites ``coarse``.

    Of any kernel size if that is None; raise if there is no such map.
    """
    return _of_native(maps.made_by(native(fine), kernel_size, native(coarse)), (fine, coarse))


def _of_native(made, known):
    """Return a native KernelMap as one of tensors; its sites may be among ``known``."""
    kept = made._kept
    if "tensor" not in kept:
        kept["tensor"] = to_tensor(made.rows)
        kept_with(kept["tensor"])["symmetric"] = made.is_symmetric()
        mark_capture(kept_with(kept["tensor"]), kept.get(CAPTURE, 0))
    target = next((c for c in known if native(c) is made.target), kept.get("target"))
    if target is None:
        target = kept["target"] = of_native(made.target, known[0])
    kept_with(kept["tensor"])["sites"] = target.indices, kept.get("offsets")
    valid(target)
    return KernelMap(kept["tensor"], known[0], target, made.kernel_size)
