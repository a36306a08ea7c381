"""Weights that are packed before a compiled function is called."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal
from support.assertions import to_numpy
from support.exhaustive import thinned_pairs
from support.jax_callbacks import AMPERE, HOPPER, check_close

CHANNELS, OUT = 64, 128
CONVS = {  # of a stack: the shape of the weights, and options
    "one": ((1, 1, CHANNELS, OUT), {"padding": 0}),
    "three": ((3, 3, CHANNELS, OUT), {"activation": "relu"}),
    "torch": ((OUT, CHANNELS, 3, 3), {"w_format": "OIHW"}),
    "strided": ((3, 3, CHANNELS, OUT), {"strides": 2, "padding": 1}),
    "groups": ((3, 3, CHANNELS // 2, OUT), {"groups": 2}),
    "depthwise": ((3, 3, 1, CHANNELS), {"groups": CHANNELS}),
    "transposed": ((3, 3, CHANNELS, OUT), {"transposed": True, "padding": 1}),
    "upsampled": ((2, 2, CHANNELS, OUT), {"transposed": True, "strides": 2, "padding": 0}),
}
NEVER_PACKED = {"depthwise", "upsampled"}
DTYPES = ["float16", "bfloat16", "float32"]


def stack_case(sbj, make, name, dtype):
    """Return weights, a function of them, a stack and its table."""
    shape, options = CONVS[name]
    w = make(normal(*shape, seed=1).astype(dtype) / 8)
    out = CHANNELS if name == "depthwise" else OUT
    own = {key: make(normal(out, seed=n)) for n, key in enumerate(("scale", "bias"), 2)}
    mask = np.zeros((1, 64, 48), np.float32)
    mask[:, ::16, ::16] = normal(1, 4, 3) > 0
    table = sbj.block_table(make(mask), 16, capacity=9)
    options = {"precision": "tf32"} | options
    kept = {key: options.pop(key) for key in ("w_format", "precision") if key in options}
    weights = sb.PackedWeights(w, **own, **kept)

    def convolve(weights, x, table):
        return sbj.stack_conv2d(x, weights, table, **options)

    def by_arrays(x, table):
        return sbj.stack_conv2d(x, w, table, **own, **kept, **options)

    x = make(normal(9, 16, 16, CHANNELS).astype(dtype))
    return weights, convolve, by_arrays, (x, table)


def site_case(sbj, make, taps, dtype):
    """Return weights, a function of them, and features at sites."""
    w = make(normal(*taps, CHANNELS, OUT, seed=1).astype(dtype) / 8)
    own = {key: make(normal(OUT, seed=n)) for n, key in enumerate(("scale", "bias"), 2)}
    sites = np.argwhere(np.random.default_rng(5).random((2, 12, 14, 11)) < 0.2).astype(np.int32)
    x = sbj.sparse_tensor(
        make(normal(len(sites), CHANNELS).astype(dtype)), make(sites), spatial_shape=(12, 14, 11)
    )
    weights = sb.PackedWeights(w, **own, precision="tf32")

    def convolve(weights, x):
        return sbj.submanifold_conv(x, weights, activation="relu").features

    def by_arrays(x):
        how = {"precision": "tf32", "activation": "relu"}
        return sbj.submanifold_conv(x, w, **own, **how).features

    return weights, convolve, by_arrays, (x,)


CASES = {name: functools.partial(stack_case, name=name) for name in CONVS}
CASES |= {f"sites {n}": functools.partial(site_case, taps=(n,) * 3) for n in (1, 3)}


@pytest.fixture
def counted(monkeypatch):
    """Return the numbers of calls that packed weights so far: one number, in a list."""
    from sbnet_cupy.core.packed import Pack
    from sbnet_cupy.core.rehearsal import REHEARSING

    calls, pack = [0], Pack.__call__

    def count(*arrays, **options):
        calls[0] += REHEARSING.now is None
        return pack(*arrays, **options)

    monkeypatch.setattr(Pack, "__call__", count)
    return calls


@pytest.mark.parametrize(("name", "dtype"), thinned_pairs(3, list(CASES), DTYPES))
def test_results_are_those_of_arrays(sbj, place, jax, counted, name, dtype):
    """Of functions that are compiled and not, and the gradient; packed once where kernels do."""
    weights, convolve, by_arrays, given = CASES[name](sbj, place.make, dtype=jax.numpy.dtype(dtype))
    packed = jax.block_until_ready(sbj.pack_weights(weights, convolve, *given))
    once = place.name != "cpu" and name not in NEVER_PACKED
    assert len(jax.tree.leaves(packed)) == 3 + once
    for compiled in (lambda function: function, jax.jit):
        counted[:] = [0]
        found = [to_numpy(compiled(convolve)(packed, *given)) for _ in range(2)]
        assert counted == [0]
        for own in (by_arrays, functools.partial(convolve, weights)):
            expected = to_numpy(compiled(own)(*given))
            for result in found:
                np.testing.assert_array_equal(result, expected)

    def loss(convolve, *given):
        return (convolve(*given).astype(np.float32) ** 2).sum()

    on_x = functools.partial(jax.grad, allow_int=True)
    one = jax.jit(on_x(functools.partial(loss, convolve), argnums=1))(packed, *given)
    other = jax.jit(on_x(functools.partial(loss, by_arrays)))(*given)
    np.testing.assert_array_equal(*(to_numpy(jax.tree.leaves(g)[0]) for g in (one, other)))


def test_weights_are_a_pytree(sbj, place, jax):
    """Gradients with respect to the arrays; those that are packed have none."""
    weights, convolve, _, given = stack_case(sbj, place.make, "three", np.float32)

    def loss(weights):
        return (convolve(weights, *given) ** 2).sum()

    found = jax.jit(jax.grad(loss))(weights)
    assert type(found) is sb.PackedWeights and found.w_format == "HWIO"

    def of_arrays(w, scale, bias):
        how = {"scale": scale, "bias": bias, "activation": "relu", "precision": "tf32"}
        return (sbj.stack_conv2d(given[0], w, given[1], **how) ** 2).sum()

    expected = jax.jit(jax.grad(of_arrays, argnums=(0, 1, 2)))(*weights._given())
    for one, other in zip(found._given(), expected, strict=True):
        check_close(one, other)
    packed = sbj.pack_weights(weights, convolve, *given)
    if place.name != "cpu":
        with pytest.raises(TypeError, match="uint8"):
            jax.grad(loss)(packed)


def several(jax, convolve):
    """Return functions of weights, several stacks and a table, each by a transformation of JAX."""
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("n",))

    def loss(weights, x, table):
        return (convolve(weights, x, table).astype(np.float32) ** 2).sum()

    def scan(weights, many, table):
        return jax.lax.scan(lambda _, x: (0, convolve(weights, x, table)), 0, many)[1]

    def again(weights, many, table):
        return jax.grad(jax.checkpoint(loss), argnums=1)(weights, many[0], table)

    def chosen(weights, many, table):
        first = functools.partial(convolve, weights, table=table)
        return jax.lax.cond(many[0, 0, 0, 0, 0] > 0, first, lambda x: -first(x), many[1])

    def sharded(weights, many, table):
        spread = {"mesh": mesh, "in_specs": (P(), P(), P()), "out_specs": P()}
        return jax.shard_map(convolve, **spread)(weights, many[0], table)

    return {
        "vmap": jax.vmap(convolve, in_axes=(None, 0, None)), "scan": scan, "remat": again,
        "cond": chosen, "shard_map": sharded,
    }  # fmt: skip


@pytest.mark.parametrize("how", ["vmap", "scan", "remat", "cond", "shard_map"])
def test_packed_weights_go_through_transformations(sbj, place, jax, how):
    """With the results of arrays; where there is no GPU, as far as JAX traces."""
    weights, convolve, _, (x, table) = stack_case(sbj, place.make, "three", np.float16)
    many = jax.numpy.stack([x, 2 * x])
    function = several(jax, convolve)[how]
    packed = sbj.pack_weights(weights, function, many, table)
    assert len(jax.tree.leaves(packed)) == 3 + (place.name != "cpu")
    if place.name == "cpu" and how == "shard_map" and jax.default_backend() != "cpu":
        pytest.skip("the mesh is of GPUs")
    one, other = (to_numpy(jax.jit(function)(w, many, table)) for w in (packed, weights))
    np.testing.assert_array_equal(one, other)


def test_what_the_package_packed_is_no_leaf(sbj, jax):
    weights = sb.PackedWeights(np.ones((3, 3, 1, 8), np.float32), bias=np.ones(8))
    assert weights.plain() and weights._packed
    leaves, structure = jax.tree.flatten(weights)
    assert len(leaves) == 2 and not jax.tree.unflatten(structure, leaves)._packed


@pytest.fixture
def planned(jax, planned):
    """The same where JAX computes on a CPU, which then calls back."""
    if jax.default_backend() != "cpu":
        pytest.skip("JAX has a GPU")
    yield planned
    jax.clear_caches()


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE])
@pytest.mark.parametrize("name", CONVS)
def test_what_a_function_asks_for_is_packed(sbj, jax, planned, counted, name, gpu):
    """Once for each way in which it reads the weights, and kept for functions alike."""
    planned(gpu)
    weights, convolve, _, given = stack_case(sbj, jax.numpy.asarray, name, np.float16)
    weights = {"twice": weights, "unused": sb.PackedWeights(weights.w), "other": weights.w}

    def network(weights, *given):
        inner = jax.jit(lambda weights, _: convolve(weights["twice"], *given))
        y, _ = jax.lax.scan(lambda y, _: (inner(weights, 0), None), inner(weights, 1), length=2)
        return y

    packed = sbj.pack_weights(weights, network, *given)
    is_packed = name not in NEVER_PACKED
    own = packed["twice"]
    leaves = jax.tree.leaves(own)
    assert counted == [is_packed] and len(leaves) == 3 + is_packed
    assert len(jax.tree.leaves(packed)) == len(leaves) + 2
    kept = jax.tree.leaves(sbj.pack_weights(own, convolve, *given))
    assert len(kept) == len(leaves) and own.precision == "tf32"
    if is_packed:
        assert leaves[3].dtype == np.uint8 and leaves[3].size >= own.w.nbytes
        changed = jax.tree.map(lambda leaf: leaf * 0.5, own)
        with pytest.raises(sb.DTypeError, match=r"as pack_weights made them.*got float"):
            jax.eval_shape(convolve, changed, *given)
        small = jax.tree.map(lambda leaf: leaf[:-1] if leaf.dtype == np.uint8 else leaf, own)
        with pytest.raises(sb.DTypeError, match=rf"uint8 \({leaves[3].size},\), got uint8"):
            jax.eval_shape(convolve, small, *given)


@pytest.mark.parametrize("how", ["vmap", "scan", "remat", "cond", "shard_map"])
def test_transformations_ask_for_a_form_and_take_it(sbj, jax, planned, how):
    planned(HOPPER)
    weights, convolve, _, (x, table) = stack_case(sbj, jax.numpy.asarray, "three", np.float16)
    given, function = (jax.numpy.stack([x, x]), table), several(jax, convolve)[how]
    packed = sbj.pack_weights(weights, function, *given)
    assert len(jax.tree.leaves(packed)) == 4
    shapes = [jax.eval_shape(function, own, *given).shape for own in (weights, packed)]
    assert shapes[0] == shapes[1]


def test_weights_read_in_two_ways_have_two_forms(sbj, jax, planned, counted):
    planned(HOPPER)
    w = sb.PackedWeights(jax.numpy.ones((3, 3, 64, 64), np.float16))
    table = sbj.block_table(jax.numpy.ones((1, 32, 32)), 8)
    x = jax.numpy.ones((16, 8, 8, 64), np.float16)

    def both(w, x):
        y = sbj.stack_conv2d(x, w, table)
        return sbj.stack_conv2d(y, w, table, transposed=True, padding=1)

    packed = sbj.pack_weights(w, both, x)
    assert counted == [2] and len(jax.tree.leaves(packed)) == 3


def test_bad_arguments_are_refused(sbj, jax):
    ones = jax.numpy.ones
    table = sbj.block_table(ones((1, 4, 4)), 2)
    x, w = ones((4, 2, 2, 1)), ones((3, 3, 1, 8))
    with pytest.raises(sb.DTypeError, match="weights must hold a PackedWeights, got none; wrap"):
        sbj.pack_weights({"w": w}, lambda weights: None)
    weights = sb.PackedWeights(w, bias=ones(8), precision="ieee")
    with pytest.raises(sb.DTypeError, match="w must be a JAX array, got PackedWeights; pass the"):
        sbj.pack_weights(weights, lambda w: sbj.sparse_conv2d(x, w, ones((4, 2, 2)), bsize=2))
    with pytest.raises(ValueError, match="bias must be None where w is a PackedWeights"):
        sbj.stack_conv2d(x, weights, table, bias=ones(8))
    with pytest.raises(ValueError, match="precision must be 'ieee', that of the PackedWeights"):
        sbj.stack_conv2d(x, weights, table, precision="tf32")
    with pytest.raises(sb.ShapeError, match="w"):
        sbj.stack_conv2d(ones((4, 2, 2, 3)), weights, table)
    sites = sbj.sparse_tensor(ones((2, 1)), jax.numpy.array([[0, 1, 1], [0, 2, 1]]))
    first = sb.PackedWeights(ones((8, 1, 3, 3)), w_format="OIHW")
    with pytest.raises(ValueError, match="w must be a PackedWeights of w_format 'HWIO'"):
        sbj.submanifold_conv(sites, first)
    with pytest.raises(sb.ShapeError, match="kernel of 2 axes"):
        sbj.submanifold_conv(sites, sb.PackedWeights(ones((3, 3, 3, 1, 8))))
