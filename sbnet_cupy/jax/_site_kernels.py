"""Convolutions at sites, and maps between sites, by the core's CUDA kernels, which XLA calls back.

What is linear are two primitives of JAX, each made of both when it is differentiated: the sum of
products over a map, and the gradient of its weights. So all derivatives are there, any number of
times. What kernels need besides the arrays, such as the tiles of a map, is an array of bytes of its
own: a jitted function makes it, so that XLA makes it once in a compiled function.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..core.arrays import compute_dtype, whole_pieces
from ..core.rehearsal import Rehearsal, rehearsing
from ..core.spec import ArraySpec
from ..submanifold import map_kernels
from ..submanifold.feature_rows import reads
from ..submanifold.site_conv import SITE_CONV
from ..submanifold.site_conv_grad import SITE_WEIGHT_GRAD
from ..submanifold.site_conv_launch import OrderedPlan
from ..submanifold.site_order import site_order
from ..submanifold.site_tiles import TileShape, site_tiles
from ..submanifold.transposed_rows import TRANSPOSED_ROWS
from . import _namespace as ops
from ._callbacks import allocating_from, call, current_device, has_gpu, vary_alike
from ._mapped import one_by_one
from ._sites import packing, rows_at, valid_rows
from ._specs import computes_on_gpu, spec_of


class Table(NamedTuple):
    """What a convolution reads of a map."""

    rows: Any  # int32 [taps, M]
    back: Any  # int32 [taps, N]: the same in the other direction
    indices: Any  # int32 [M, 1 + d]: the sites of the result


class How(NamedTuple):
    """Options of a sum of products."""

    kernel_size: tuple
    groups: int
    precision: str | None
    offsets: tuple | None  # how far from a row's site each tap reads, where that is known
    symmetric: bool  # whether ``back`` is ``rows`` with its taps in reverse order


def by_kernels(features, made):
    """Whether a convolution runs by kernels where it is on a GPU: over maps made by functions here.

    In others several rows may read the same one at a tap, which a table in the other direction
    does not tell.
    """
    return bool(made._kept.get("made")) and features.size > 0 and has_gpu()


def on_gpu(kernel, otherwise, *arrays):
    """Return what ``kernel`` makes of arrays on a GPU, and ``otherwise`` elsewhere.

    Where a compiled function runs is known when XLA compiles it, not while JAX traces.
    """
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        return (kernel if computes_on_gpu(arrays[0]) else otherwise)(*arrays)
    return jax.lax.platform_dependent(*arrays, cuda=kernel, default=otherwise)


def site_conv(features, w, scale, bias, residual, made, groups, activation, precision):
    """Return the convolution of checked arguments over a map."""
    symmetric = made.is_symmetric()
    how = How(made.kernel_size, groups, precision, made._kept.get("offsets"), symmetric)
    back = made.rows if symmetric else transposed_rows(made.rows, made.source.capacity)
    arrays = (features, w.reshape(made.taps, *w.shape[-2:]), scale, bias, residual)
    table = Table(made.rows, back, made.target.indices)
    given = vary_alike([*arrays, *table, valid_rows(made.target)])
    return _convolution(how, activation)(*given)


@functools.cache
def _convolution(how, activation):
    """Return the jitted convolution with these options, of arrays, a table and which rows hold."""

    @jax.custom_jvp
    def convolve(features, w, scale, bias, residual, rows, back, indices, valid):
        arrays = (features, w, scale, bias, residual, rows, valid, indices)
        return _multiplied(how, activation, *arrays)

    def rule(primals, tangents):
        y = convolve(*primals)
        return y, _tangent(how, activation, primals, tangents, y)

    convolve.defjvp(rule, symbolic_zeros=True)
    return jax.jit(convolve)


def _tangent(how, activation, primals, tangents, y):
    """Return the tangent of a convolution, linear in those of its arrays."""
    features, w, scale, bias, residual, *table, valid = primals
    dfeatures, dw, dscale, dbias, dresidual, *_ = map(_given, tangents)
    table, wide, there = Table(*table), compute_dtype(y.dtype), valid[:, None]
    total, change = None, jnp.zeros(y.shape, wide)
    if dfeatures is not None:
        change += products(how, dfeatures, w, table).astype(wide)
    if dw is not None:
        change += products(how, features, dw, table).astype(wide)
    if scale is not None:
        change *= scale.astype(wide)
    if dscale is not None or activation not in (None, "relu"):
        total = products(how, features, w, table).astype(wide)
    if dscale is not None:
        change += total * dscale.astype(wide)
    if dbias is not None:
        change += dbias.astype(wide)
    if dresidual is not None:
        change += dresidual.astype(wide)
    change = jnp.where(there, change, 0)
    if activation == "relu":
        change = jnp.where(y > 0, change, 0)
    elif activation is not None:
        before = ops.affine(total, scale, bias, None)
        if residual is not None:
            before += residual.astype(wide)
        before = jnp.where(there, before, 0)
        activate = functools.partial(
            ops.affine, scale=None, shift=None, activation=activation
        )
        _, change = jax.jvp(activate, (before,), (change,))
        change = jnp.where(there, change, 0)
    return change.astype(y.dtype)


def _given(tangent):
    """Return a tangent, None where there is none."""
    is_zero = tangent is None or isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    return None if is_zero else tangent


# ----------------------------------------------------------------------- what is linear


def products(how, features, w, table):
    """Return the sum over the taps of ``features[rows[t]] @ w[t]``, in the dtype of both."""
    return _PRODUCTS.bind(*vary_alike([features, w, *table]), how=how)


def weight_gradient(how, features, grad, table):
    """Return the gradient of the weights of such a sum from that of its result."""
    found = _WEIGHTS.bind(*vary_alike([features, grad, *table]), how=how)
    taps, c = table.rows.shape[0], features.shape[1] // how.groups
    return found.reshape(taps, c, grad.shape[1])


def _feature_gradient(how, grad, w, table):
    """Return the gradient of the features: a sum over the map in the other direction."""
    taps, c, k = w.shape
    w = w.reshape(taps, c, how.groups, k // how.groups).transpose(0, 3, 2, 1)
    w = w.reshape(taps, k // how.groups, how.groups * c)
    if how.symmetric:
        return products(how, grad, w[::-1], table)
    table = table._replace(rows=table.back, back=table.rows)
    return products(how._replace(kernel_size=(taps,), offsets=None), grad, w, table)


def _sum_of_products(features, w, rows, back, indices, *, how):
    """Compute the primitive."""
    return _multiplied(how, None, features, w, None, None, None, rows, None, indices)


def _products_transposed(grad, features, w, *table, how):
    table = Table(*table)
    found = [None] * 5
    if type(grad) is ad.Zero:
        return found
    if ad.is_undefined_primal(features):
        found[0] = _feature_gradient(how, grad, w, table)
    else:
        found[1] = weight_gradient(how, features, grad, table)
    return found


def _weights(features, grad, rows, back, indices, *, how):
    """Compute the primitive, as a matrix: a row for each tap and channel."""
    options = (how.groups, how.precision)
    shape = rows.shape[0] * (features.shape[1] // how.groups), grad.shape[1]
    by_xla = functools.partial(_weights_by_xla, how=how)
    if _plan(SITE_WEIGHT_GRAD, [*map(_spec, (features, grad, rows)), None], options) is None:
        found = by_xla(features, grad, rows)
    else:
        found = on_gpu(_called(SITE_WEIGHT_GRAD, options), by_xla, features, grad, rows)
    return found.reshape(shape)


def _weights_transposed(ct, features, grad, *table, how):
    table, found = Table(*table), [None] * 5
    if type(ct) is ad.Zero:
        return found
    taps = table.rows.shape[0]
    ct = ct.reshape(taps, ct.shape[0] // taps, ct.shape[1])
    if ad.is_undefined_primal(features):
        found[0] = _feature_gradient(how, grad, ct, table)
    else:
        found[1] = products(how, features, ct, table)
    return found


def _bilinear(name, compute, shape, transpose):
    """Return a primitive of five arrays, linear in each of the first two."""
    primitive = Primitive(name)

    @primitive.def_abstract_eval
    def _(first, *others, how):
        return first.update(shape=shape(first, *others, how=how))

    @primitive.def_impl
    def _(*arrays, how):
        return _jitted(compute, how)(*arrays)

    def tangent(primals, tangents, *, how):
        first, second, *table = primals
        y, found = primitive.bind(*primals, how=how), []
        if type(tangents[0]) is not ad.Zero:
            found.append(primitive.bind(*vary_alike([tangents[0], second, *table]), how=how))
        if type(tangents[1]) is not ad.Zero:
            found.append(primitive.bind(*vary_alike([first, tangents[1], *table]), how=how))
        return y, functools.reduce(jnp.add, found)  # one of both is not zero

    def mapped(arrays, axes, *, how):
        over = [axis is not None for axis in axes]
        arrays = [
            jnp.moveaxis(array, axis, 0) if is_mapped else array
            for array, axis, is_mapped in zip(arrays, axes, over, strict=True)
        ]
        return one_by_one(functools.partial(primitive.bind, how=how), over, arrays), 0

    ad.primitive_jvps[primitive] = tangent
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    return primitive


@functools.cache
def _jitted(compute, how):
    return jax.jit(functools.partial(compute, how=how))


_PRODUCTS = _bilinear(
    "site_products",
    _sum_of_products,
    lambda features, w, rows, *_, how: (rows.shape[1], w.shape[2]),
    _products_transposed,
)
_WEIGHTS = _bilinear(
    "site_weights",
    _weights,
    lambda x, grad, rows, *_, how: (rows.shape[0] * (x.shape[1] // how.groups), grad.shape[1]),
    _weights_transposed,
)


# ----------------------------------------------------------------------- by XLA itself


def sum_by_xla(features, w, rows, groups, precision):
    """Return the sum over the taps, ``w`` being ``[taps, C / groups, K]``: not rounded yet."""
    wide = compute_dtype(features.dtype)
    taps, c, k = w.shape
    by_group = w.reshape(taps, c, groups, k // groups).transpose(0, 2, 1, 3)
    exact = jax.lax.Precision("default" if precision == "tf32" else "highest")
    total = jnp.zeros((rows.shape[1], k), wide)
    for tap in range(taps):
        read = rows[tap]
        taken = rows_at(features, read).reshape(len(read), groups, c)
        how = {"precision": exact, "preferred_element_type": wide}
        if groups == 1:
            product = jnp.dot(taken[:, 0], w[tap], **how)
        else:
            product = jnp.einsum("mgc,gck->mgk", taken, by_group[tap], **how)
        total += jnp.where(reads(read, len(features))[:, None], product.reshape(len(read), k), 0)
    return total


def _weights_by_xla(features, grad, rows, how):
    shape = (rows.shape[0], features.shape[1] // how.groups, grad.shape[1])
    w = jax.ShapeDtypeStruct(shape, features.dtype)

    def multiply(w):
        return sum_by_xla(features, w, rows, how.groups, how.precision).astype(grad.dtype)

    (found,) = jax.linear_transpose(multiply, w)(grad)
    return found


# ----------------------------------------------------------------------- calls of kernels


def _multiplied(how, activation, features, w, scale, bias, residual, rows, valid, indices):
    """Return a convolution; ``w`` is ``[taps, C / groups, K]``."""
    options = (how.kernel_size, features.shape[0], how.groups, activation, how.precision)
    wide = compute_dtype(features.dtype)  # of tables, so that nothing has to convert them
    scale, bias = (table if table is None else table.astype(wide) for table in (scale, bias))
    arrays = (features, rows, valid, w, scale, bias, residual)
    plan = _plan(SITE_CONV, [*map(_spec, arrays), None], options)

    def by_xla(features, rows, valid, w, scale, bias, residual, _):
        total = sum_by_xla(features, w, rows, how.groups, how.precision)
        total = ops.affine(total, scale, bias, None)
        if residual is not None:
            total += residual.astype(total.dtype)
        y = ops.cast(ops.affine(total, None, None, activation), features.dtype)
        return y if valid is None else jnp.where(valid[:, None], y, 0)

    def by_kernel(*arrays):
        *arrays, indices = arrays
        if not isinstance(plan, OrderedPlan):
            return _called(SITE_CONV, options)(*arrays)
        offsets = how.offsets if isinstance(plan.order, TileShape) else None
        sort = Sort(plan.order, features.shape[0], how.kernel_size, offsets)
        order = _made(_sorted, sort, arrays[1], None if offsets is None else indices)
        return _called(SITE_CONV, options, sort)(*arrays, order)

    if plan is None:
        return by_xla(*arrays, indices)
    return on_gpu(by_kernel, by_xla, *arrays, indices)


def _plan(operator, specs, options):
    """Return the plan of a call by a kernel, on the current device; None where there is none."""
    if not has_gpu():
        return None
    device = current_device()
    specs = [spec and spec._replace(device=device) for spec in specs]
    plan = operator.plan_of(specs, options)
    return None if plan.resized is None else plan


@functools.cache
def _called(operator, options, sort=None):
    """Return the jitted call of an operator with the order of its rows, if it has one."""

    @custom_vmap
    def called(*arrays):
        own = arrays if sort is None else arrays[:-1]
        (result,) = operator.infer((*map(_spec, own), None), options)
        if not result.size:
            return jnp.zeros(result.shape, result.dtype)
        key = operator, options, sort
        result = jax.ShapeDtypeStruct(result.shape, result.dtype)
        return call(_run, key, [result], arrays, scratch=_scratch(key, tuple(map(_spec, own))))[0]

    @called.def_vmap
    def rule(size, batched, *arrays):
        return one_by_one(called, batched, arrays), True

    return jax.jit(called)


def _run(key, results, scratch, *arrays):
    """Compute a call on native arrays: see ``_callbacks.call``."""
    operator, options, sort = key
    given = (*(arrays if sort is None else arrays[:-1]), results[0])
    plan = operator.plan_for(given, options)
    if sort is None:
        with allocating_from(scratch):
            plan.run(*given)
    elif isinstance(plan, OrderedPlan) and plan.order == sort.order:
        order = _order(sort, given[1], arrays[-1])
        with allocating_from(scratch):
            plan.run(*given, order)
    else:  # another one, for arrays at odd addresses: it allocates what it needs
        plan.run(*given)


# ----------------------------------------------------------------------- maps


def transposed_rows(rows, sites):
    """Return the table of a map in the other direction, of so many sites."""

    def by_xla(rows):
        read = jnp.where(rows >= 0, rows, sites)
        taps = jnp.arange(len(rows))[:, None]
        own = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
        back = jnp.full((len(rows), sites), -1, jnp.int32)
        return back.at[taps, read].set(own, mode="drop")

    if not has_gpu() or len(rows) > map_kernels.MOST_LINES:
        return by_xla(rows)
    return on_gpu(_called(TRANSPOSED_ROWS, (sites,)), by_xla, rows)


def find_rows(source, target, window, by_xla):
    """Return which row of the source each row of the target reads: int32 ``[taps, M]``.

    ``by_xla()`` finds them where there is no kernel for it.
    """
    if not _has_finder(source, target, window):
        return by_xla()
    grid = packing(source)

    def by_kernel(target, target_count, source_indices, source_count):
        tree = _made(_tree, grid, source_indices, source_count)
        return _found(grid, len(source_indices), window)(target, target_count, tree)

    arrays = target.indices, target.count, source.indices, source.count
    return on_gpu(by_kernel, lambda *_: by_xla(), *arrays)


def _has_finder(source, target, window):
    """Whether there is a kernel for such a map."""
    if not (source.capacity and target.capacity and has_gpu()):
        return False
    d = source.dimensions
    return map_kernels.has_kernel(d, target.capacity, window) and map_kernels.has_kernel(
        d, source.capacity
    )


@functools.cache
def _found(grid, sources, window):
    @custom_vmap
    def found(target, count, tree):
        taps = int(np.prod(window.kernel))
        result = jax.ShapeDtypeStruct((taps, len(target)), jnp.int32)
        return call(_find, (grid, sources, window), [result], (target, count, tree))[0]

    @found.def_vmap
    def rule(size, batched, *arrays):
        return one_by_one(found, batched, arrays), True

    return jax.jit(found)


def _find(key, results, _, target, count, arena):
    grid, sources, window = key
    listed = ArraySpec((sources, target.shape[1]), target.dtype), ArraySpec((1,), count.dtype)
    words, order, _ = _layout(_tree, grid, listed).views(arena)
    shape = map_kernels.tree_shape(grid, sources)
    tree = map_kernels.Tree(words, shape, grid, order, sources)
    map_kernels.find_rows(tree, target, count, window, False, out=results[0])


def _tree(grid, indices, count):
    """Return the arrays of the tree of a list of sites."""
    tree, held = map_kernels.tree_of(indices, count, grid)
    return tree.words, tree.order, held


class Sort(NamedTuple):
    """What the order of a map's rows, as kernels read them, depends on besides the map."""

    order: bool | TileShape  # as that of an OrderedPlan
    sources: int
    kernel_size: tuple
    offsets: tuple | None


def _sorted(sort, rows, indices):
    """Return the SiteOrder or SiteTiles of a table."""
    if isinstance(sort.order, TileShape):
        return site_tiles(rows, sort.sources, sort.order, indices, sort.offsets)
    return site_order(rows, sort.sources, sort.kernel_size, sort.order)


# ----------------------------------------------------------------------- bytes that kernels share


def _made(make, key, *arrays):
    """Have XLA call ``make(key, *arrays)``; return all that it allocates, as bytes."""
    return _maker(make, key)(*arrays)


@functools.cache
def _maker(make, key):
    @custom_vmap
    def made(*arrays):
        layout = _layout(make, key, tuple(map(_spec, arrays)))
        result = jax.ShapeDtypeStruct((layout.nbytes,), jnp.uint8)
        return call(_fill, (make, key), [result], arrays)[0]

    @made.def_vmap
    def rule(size, batched, *arrays):
        return one_by_one(made, batched, arrays), True

    return jax.jit(made)


def _fill(key, results, _, *arrays):
    """Make it on native arrays: see ``_callbacks.call``."""
    make, key = key
    with allocating_from(results[0]):
        make(key, *arrays)


def _order(sort, rows, arena):
    """Return the SiteOrder or SiteTiles among the bytes that :func:`_sorted` has allocated."""
    sites = None
    if sort.offsets is not None:
        sites = ArraySpec((rows.shape[1], 1 + len(sort.offsets[0])), rows.dtype)
    layout = _layout(_sorted, sort, (ArraySpec(rows.shape, rows.dtype), sites))
    return layout.kind(*layout.views(arena, rows))


class _Layout(NamedTuple):
    """Where the arrays of a tuple are among the bytes that were allocated for them."""

    nbytes: int
    kind: type
    fields: tuple  # of each: (first byte, shape, dtype), the number of an argument, or None

    def views(self, arena, *given):
        """Return the arrays."""
        import cupy

        return [
            field if field is None
            else given[field] if isinstance(field, int)
            else cupy.ndarray(field[1], field[2], arena.data + field[0])
            for field in self.fields
        ]  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _layout(make, key, specs):
    """Return the _Layout of what ``make`` returns for arrays of these specs."""
    given = [_nowhere(spec) for spec in specs]
    with _dry_run() as memory:
        made = make(key, *given)
    fields = []
    for array in made:
        if array is None:
            fields.append(None)
        elif any(array is other for other in given):
            fields.append(next(n for n, other in enumerate(given) if array is other))
        else:
            fields.append((array.data.ptr - _ALLOCATED, array.shape, array.dtype))
    return _Layout(memory.nbytes, type(made), tuple(fields))


@functools.lru_cache(maxsize=1024)
def _scratch(key, specs):
    """Return the bytes that a call allocates."""
    operator, options, sort = key
    plan = _plan(operator, [*specs, None], options) if has_gpu() else None
    if plan is None:
        return 0
    given = [_nowhere(spec) for spec in specs]
    more = () if sort is None else (_order(sort, given[1], _nowhere(ArraySpec((1,), np.uint8))),)
    with _dry_run() as memory:
        plan.run(*given, _nowhere(plan.results[0]), *more)
    return memory.nbytes


_GIVEN, _ALLOCATED, _ROOM = 1 << 44, 1 << 45, 1 << 44  # addresses at which nothing is


def _nowhere(spec):
    """Return a CuPy array of a spec without memory, for a dry run; None for None."""
    if spec is None:
        return None
    import cupy

    memory = cupy.cuda.UnownedMemory(_GIVEN, _ROOM, None, current_device())
    return cupy.ndarray(spec.shape, spec.dtype, cupy.cuda.MemoryPointer(memory, 0))


class _Addresses:
    """An allocator of CuPy's kind that hands out addresses alone, as ``allocating_from`` does."""

    def __init__(self):
        import cupy

        self.nbytes = 0
        self._memory = cupy.cuda.UnownedMemory(_ALLOCATED, _ROOM, None, current_device())
        self._pointer = cupy.cuda.MemoryPointer

    def __call__(self, nbytes):
        start, self.nbytes = self.nbytes, self.nbytes + whole_pieces(nbytes)
        return self._pointer(self._memory, start)


class _DryRun(Rehearsal):
    """A rehearsal of loaded kernels, none of which is launched."""

    def __init__(self):
        super().__init__(_Everything())

    def skips(self, stem, addresses):
        return True


class _Everything:
    def __contains__(self, stem):
        return True


@contextlib.contextmanager
def _dry_run():
    """Launch nothing, and count what is allocated, until the end of a ``with``."""
    import cupy

    memory = _Addresses()
    with rehearsing(_DryRun()), cupy.cuda.using_allocator(memory):
        yield memory


def _spec(value):
    return None if value is None else spec_of("array", value)
