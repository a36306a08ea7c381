"""Every public function refuses bad input: the exception, the argument's name, nothing modified."""

import itertools
import re

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy import CapacityError, DTypeError, ShapeError
from support import bad_calls, site_bad_calls, stack_bad_calls
from support.assertions import assert_same
from support.bad_calls import Spoiled, indices, ramp, spoil_id

VALID = bad_calls.VALID | stack_bad_calls.VALID | site_bad_calls.VALID
BAD = bad_calls.BAD + stack_bad_calls.BAD + site_bad_calls.BAD
NUMPY_ONLY = re.compile(r"object|'U1'|'S3'|M8|masked_array")  # CuPy has no such arrays
STRIDES = re.compile(r"::|asfortranarray")


def give(xp, function, argument, value):
    """Hand the NumPy arrays in an argument to the library under test."""
    if isinstance(value, np.ndarray):
        written = argument == "out" or (function, argument) == ("sparse_scatter_var", "x")
        return xp.writable(value) if written else xp.asarray(value)
    if isinstance(value, sbnet_cupy.BlockTable):
        return value._map_arrays(xp.asarray)
    if isinstance(value, site_bad_calls.Made):
        return value.of(xp.asarray)
    if argument == "weights" and isinstance(value, list):
        return sbnet_cupy.BottleneckWeights(*map(xp.asarray, value))
    if isinstance(value, tuple | list) and any(isinstance(v, np.ndarray) for v in value):
        return tuple(map(xp.asarray, value))
    return value


def valid_call(xp, function):
    return {name: give(xp, function, name, value) for name, value in VALID[function].items()}


def arrays_in(arguments):
    """Every array of a call, copied, to compare afterwards."""
    for value in arguments.values():
        for item in value if isinstance(value, tuple) else [value]:
            plain = hasattr(item, "strides") and not isinstance(item, np.generic)
            if plain and not item.dtype.hasobject:
                yield item, item.copy()


@pytest.mark.parametrize("function", VALID)
def test_the_valid_call_works(xp, function):
    assert getattr(sbnet_cupy, function)(**valid_call(xp, function)) is not None


@pytest.mark.parametrize(("function", "argument", "value", "error"), BAD, ids=spoil_id)
def test_bad_call(xp, function, argument, value, error):
    if xp.name == "cupy" and NUMPY_ONLY.search(str(value)):
        pytest.skip("no such CuPy array")
    if xp.name != "cupy" and argument != "out" and STRIDES.search(str(value)):
        pytest.skip("NumPy arrays of any strides are copied")
    arguments = valid_call(xp, function)
    if isinstance(value, Spoiled):
        arguments[argument] = value.of(arguments.get(argument), xp.module)
    else:
        arguments[argument] = give(xp, function, argument, value)
    before = list(arrays_in(arguments))
    with pytest.raises(error, match=rf"\b{argument}\b"):
        getattr(sbnet_cupy, function)(**arguments)
    for array, copy in before:
        assert_same(array, copy)


def test_a_refusal_does_not_depend_on_what_was_accepted_before(xp):
    """Python has 4 == 4.0 and 1 == True: what a call remembers must not confuse them."""
    for function, options in [
        ("sparse_gather", {"bsize": 4.0}),
        ("sparse_gather", {"boffset": (0.0, False)}),
        ("sparse_scatter", {"bsize": 4.0}),
        ("fused_conv", {"bsize": 4.0}),
        ("fused_bottleneck", {"bsize": 4.0}),
        ("reduce_mask", {"block_count": (2.0, 2)}),
        ("reduce_mask", {"bsize": (4, 4.0)}),
    ]:
        arguments = valid_call(xp, function)
        for _ in range(2):
            getattr(sbnet_cupy, function)(**arguments)
            refuses(ShapeError, next(iter(options)), getattr(sbnet_cupy, function),
                    **(arguments | options))  # fmt: skip


def test_the_table_is_long_and_covers_every_function():
    assert len(BAD) >= 150
    assert {row[0] for row in BAD} == set(VALID)


def refuses(error, match, function, *arguments, **options):
    """The call raises and modifies nothing."""
    before = list(arrays_in(options | dict(enumerate(arguments))))
    with pytest.raises(error, match=match):
        function(*arguments, **options)
    for array, copy in before:
        assert_same(array, copy)


def test_messages_say_what_came_and_what_to_do():
    with pytest.raises(ShapeError) as error:
        sbnet_cupy.calc_block_params((20, 20), (4, 2.5), 3)
    assert str(error.value) == "bsize must be a positive integer or a pair of them, got (4, 2.5)"


X = np.ones((1, 8, 8, 3), np.float32)
POINTS = sbnet_cupy.sparse_tensor(ramp(4, 2), np.eye(4, 3, -1, dtype=np.int32), spatial_shape=4)
WINDOW = sbnet_cupy.kernel_map(POINTS, 3, onto=POINTS)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sbnet_cupy.reduce_mask(np.ones((2, 8, 8, 3)), (2, 2), bsize=4), ShapeError,
         r"or \(N, 1, H, W\), .* got \(2, 8, 8, 3\); make one channel of several"),
        (lambda: sbnet_cupy.sparse_conv2d(X.astype(int), X.astype(int), X[..., 0], bsize=4),
         DTypeError, "^x must be float16, .*, got int64; convert it"),
        (lambda: sbnet_cupy.sparse_tensor(np.ones((2, 3), "u1"), np.eye(2, dtype=int)), DTypeError,
         "^features must be float16, .*, got uint8; convert it"),
        (lambda: sbnet_cupy.reduce_mask(X[..., 0] * 1j, (2, 2), bsize=4), DTypeError,
         "mask must have a bool, integer or float dtype, got complex"),
        (lambda: sbnet_cupy.stack_conv2d(X, X, sbnet_cupy.block_table(X[..., 0], 4)), ShapeError,
         r"\(4, 4, 4, C\), .* got \(1, 8, 8, 3\); pass the table of its own stage"),
        (lambda: sbnet_cupy.site_conv(POINTS, ramp(9, 2, 4), WINDOW), DTypeError,
         "got SparseTensor; pass its .features"),
        (lambda: sbnet_cupy.global_pool(POINTS, "avg"), ValueError,
         "reduce must be 'max', 'mean' or 'sum', got 'avg'"),
    ],
)  # fmt: skip
def test_a_message_says_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()
    x = ramp(1, 8, 8, 2)
    with pytest.raises(ShapeError) as error:
        sbnet_cupy.sparse_gather(x, np.array([1], "i4"), np.zeros((7, 2), "i4"), bsize=4)
    assert str(error.value) == (
        "active_block_indices must have shape (M, 3), got (7, 2); build it with reduce_mask"
    )


CONVOLUTIONS = {
    "conv2d": lambda w: sbnet_cupy.conv2d(X, w),
    "conv2d_grad": lambda w: sbnet_cupy.conv2d_grad(X, X, w),
    "mask_conv2d": lambda w: sbnet_cupy.mask_conv2d(X, w, X[..., 0]),
    "sparse_conv2d": lambda w: sbnet_cupy.sparse_conv2d(X, w, X[..., 0], bsize=4),
    "fused_conv": lambda w: sbnet_cupy.fused_conv(X, w, [1], np.zeros((1, 3), "i4"), bsize=6),
    "stack_conv2d": lambda w: sbnet_cupy.stack_conv2d(
        np.ones((4, 4, 4, 3), np.float32), w, sbnet_cupy.block_table(X[..., 0], 4)
    ),
    "submanifold_conv": lambda w: sbnet_cupy.submanifold_conv(SITES, w),
    "strided_conv": lambda w: sbnet_cupy.strided_conv(SITES, w, stride=2),
    "transposed_conv": lambda w: sbnet_cupy.transposed_conv(SITES, w, stride=2),
    "site_conv": lambda w: sbnet_cupy.site_conv(
        SITES.features, w, sbnet_cupy.kernel_map(SITES, 2)
    ),
}  # fmt: skip
SITES = sbnet_cupy.sparse_tensor(ramp(4, 3), np.eye(4, 3, -1, dtype=np.int32), spatial_shape=4)


PACKED = ["sparse_conv2d", "fused_conv", "stack_conv2d", "submanifold_conv", "site_conv"]


@pytest.mark.parametrize(
    ("name", "wrap"),
    [*itertools.product(CONVOLUTIONS, [np.asarray]),
     *itertools.product(PACKED, [sbnet_cupy.PackedWeights])],
)  # fmt: skip
def test_weights_in_the_order_of_pytorch_are_told(name, wrap):
    """Where they fit once their axes are as the error says."""
    convolve, w = CONVOLUTIONS[name], np.ones((5, 3, 2, 2), np.float32)
    axes = r"as in PyTorch: use transpose\(2, 3, 1, 0\)"
    with pytest.raises(ShapeError, match=rf"w must have shape .* got \(5, 3, 2, 2\).*{axes}"):
        convolve(wrap(w))


def test_weights_in_other_orders_are_told():
    made = sbnet_cupy.strided_conv(SITES, np.ones((2, 2, 3, 3), np.float32), stride=2)
    with pytest.raises(ShapeError, match=r"\(2, 2\), got \(5, 3\); .* and \(K, C, \*kernel_size\)"):
        sbnet_cupy.inverse_conv(made, np.ones((5, 3, 2, 2), np.float32), onto=SITES)
    w = np.ones((4, 2, 2, 3), np.float32)
    with pytest.raises(ShapeError, match=r"as in spconv: use transpose\(1, 2, 3, 0\)"):
        sbnet_cupy.submanifold_conv(SITES, w)
    sbnet_cupy.submanifold_conv(SITES, w.transpose(1, 2, 3, 0))
    with pytest.raises(ShapeError, match=r"if its axes are HWIO: use transpose\(3, 2, 0, 1\)"):
        sbnet_cupy.conv2d(X, np.ones((2, 2, 3, 4), np.float32), w_format="OIHW")
    for shape in ((5, 5, 5, 5), (0, 2, 3, 4)):  # in no order, and in that which is wanted
        with pytest.raises(ShapeError) as error:
            sbnet_cupy.conv2d(X, np.ones(shape, np.float32))
        assert "transpose" not in str(error.value)
    weights = sbnet_cupy.BottleneckWeights.random(3, 2)
    turned = weights._map_arrays(lambda w: w.transpose(3, 2, 0, 1).copy() if w.ndim == 4 else w)
    with pytest.raises(ShapeError, match=r"weights.w1 must .* as in PyTorch: use transpose\(2, 3,"):
        sbnet_cupy.sparse_res_block_bottleneck(X, turned, X[..., 0], bsize=4)


@pytest.mark.parametrize("mask", [None, "corner.png", np.ma.masked_array(np.eye(8)), {1, 2}])
def test_what_a_layer_takes_for_a_mask(mask):
    x, w = ramp(1, 8, 8, 2), ramp(3, 3, 2, 4)
    said = rf"^indices must be a mask \(an array\), .*, got {type(mask).__name__}; give the mask as"
    refuses(TypeError, said, sbnet_cupy.sparse_conv2d, x, w, mask, bsize=4)
    cure = r"mask\.filled\(0\)" if np.ma.isMaskedArray(mask) else r"numpy\.asarray\(mask\)"
    refuses(TypeError, cure, sbnet_cupy.sparse_conv2d, x, w, mask, bsize=4)


def test_a_list_of_blocks_needs_its_bsize():
    x, w = ramp(1, 8, 8, 2), ramp(3, 3, 2, 4)
    active = sbnet_cupy.ActiveBlocks.from_mask(np.eye(8), bsize=4, ksize=3)
    refuses(TypeError, "got NoneType; give bsize instead", sbnet_cupy.sparse_conv2d, x, w, active)


def test_kernels_of_nothing():
    x = ramp(1, 8, 8, 2)
    for shape in ((3, 3, 2, 0), (0, 3, 2, 4)):
        said = "R, S and K at least 1, got"
        refuses(ShapeError, said, sbnet_cupy.conv2d, x, np.zeros(shape, x.dtype))


@pytest.mark.parametrize("name", ["ranges", "voxel_size"])
def test_numbers_in_arrays(name):
    options = {"ranges": [(0, 4), (0, 2)], "voxel_size": [1, 1]}
    said = rf"^{name} must be given as numbers in a list, .*; use {name}.tolist\(\)"
    given = options | {name: np.array(options[name])}
    refuses(ValueError, said, sbnet_cupy.voxelize, ramp(3, 2), **given)
    sbnet_cupy.voxelize(ramp(3, 2), **given | {name: given[name].tolist()})


@pytest.mark.parametrize(
    ("row", "cure"),
    [
        ([0, -1, 2], "shift positions so that none is negative"),
        ([0, 4, 2], "pass a larger spatial_shape"),
        ([0, 2**40, 2], r"shift or divide positions, which are below 2\*\*31 in any grid"),
        ([2, 1, 2], "number the samples from 0 on, below batch_size"),
        ([-1, 1, 2], "number the samples from 0 on, below batch_size"),
    ],
)
def test_rows_outside_of_the_grid(row, cure):
    rows = np.array([[0, 0, 0], row])
    said = rf"got \[{row[0]}, {row[1]}, {row[2]}\] in row 1; drop such rows, or {cure}$"
    grid = {"spatial_shape": (4, 4), "batch_size": 2}
    refuses(ShapeError, said, sbnet_cupy.coordinate_map, rows, **grid)


def test_rows_outside_of_a_grid_of_unknown_shape():
    """A shape helps unless positions are too large for any."""
    rows, make = np.array([[0, 0, 0, 0], [0, 1, 2**25, 3]]), sbnet_cupy.coordinate_map
    said = f"in row 1; drop such rows, or pass spatial_shape, without which .* below {2**21}$"
    refuses(ShapeError, said, make, rows)
    assert make(rows, spatial_shape=(4, 2**26, 4))[0].number() == 2
    late, unknown = make(rows, capacity=2)[0], make(np.array([[0, 9]]), spatial_shape=4, capacity=2)
    refuses(CapacityError, "drop them before, or pass spatial_shape, or batch_size", late.check)
    refuses(CapacityError, "or pass a larger spatial_shape, or", unknown[0].check)
    two = make(np.array([[2, 1]]), spatial_shape=4, batch_size=2, capacity=2)[0]
    refuses(CapacityError, "a larger spatial_shape, or a larger batch_size$", two.check)
    refuses(ShapeError, "number the samples from 0 on", make, np.array([[2, 1]]), batch_size=2)
    rows[1, 2] = 2**40
    refuses(ShapeError, r"in row 1; .*, which are below 2\*\*31 in any grid$", make, rows)


@pytest.mark.parametrize("option", ["scale", "shift", "activation"])
@pytest.mark.parametrize("dtype", ["i4", "u1", "?", "c8"])
def test_fusing_needs_a_float_image(xp, option, dtype):
    arguments = valid_call(xp, "sparse_gather")
    arguments["x"] = xp.asarray(ramp(1, 8, 8, 2, dtype=dtype))
    value = "relu" if option == "activation" else xp.asarray(ramp(2))
    refuses(DTypeError, option, sbnet_cupy.sparse_gather, **arguments, **{option: value})


@pytest.mark.parametrize("function", ["sparse_scatter", "sparse_scatter_var"])
@pytest.mark.parametrize("bstride", [1, 3, (3, 4), (4, 3)], ids=str)
def test_overlapping_add_needs_atomic(xp, function, bstride):
    arguments = valid_call(xp, function) | {"bstride": bstride, "add": True}
    refuses(ShapeError, "atomic", getattr(sbnet_cupy, function), **arguments)
    getattr(sbnet_cupy, function)(**arguments, atomic=True)


def test_a_read_only_out_is_refused():
    shapes = [("fused_conv", (1, 8, 8, 4)), ("sparse_conv2d", (1, 8, 8, 4))]
    shapes += [("sparse_gather", (3, 4, 4, 2)), ("sparse_scatter", (1, 8, 8, 2))]
    for function, shape in shapes:
        out = ramp(*shape)
        out.flags.writeable = False
        arguments = dict(VALID[function])
        refuses(
            ValueError, r"\bout\b.*read-only", getattr(sbnet_cupy, function), **arguments, out=out
        )
    arguments["x"] = out
    refuses(ValueError, "read-only", sbnet_cupy.sparse_scatter_var, **arguments)


def test_out_may_not_share_memory_with_an_input(xp):
    whole = xp.writable(ramp(4096))
    x, out = whole[:128].reshape(1, 8, 8, 2), whole[64:160].reshape(3, 4, 4, 2)
    table = {name: xp.asarray(value) for name, value in indices().items()}
    refuses(ShapeError, r"\bout\b.*\bx\b", sbnet_cupy.sparse_gather, x, **table, bsize=4, out=out)
    scatter = sbnet_cupy.sparse_scatter
    blocks, shifted = out, whole[2:130].reshape(1, 8, 8, 2)
    refuses(ShapeError, r"\bout\b.*blocks", scatter, blocks, **table, x=x, bsize=4, out=x)
    blocks = xp.asarray(ramp(3, 4, 4, 2))
    refuses(ShapeError, r"\bout\b.*\bx\b", scatter, blocks, **table, x=x, bsize=4, out=shifted)
    arguments = valid_call(xp, "sparse_conv2d") | {"x": x}
    base, out = whole[256:512].reshape(1, 8, 8, 4), whole[258:514].reshape(1, 8, 8, 4)
    refuses(ShapeError, r"\bout\b.*\bbase\b", sbnet_cupy.sparse_conv2d, **arguments, base=base,
            out=out)  # fmt: skip
    out = whole[64:320].reshape(1, 8, 8, 4)
    for function in ("sparse_conv2d", "fused_conv"):
        arguments = valid_call(xp, function) | {"x": x, "out": out}
        refuses(ShapeError, r"\bout\b.*\bx\b", getattr(sbnet_cupy, function), **arguments)


def test_projection_is_needed_where_channels_change(xp):
    arguments = valid_call(xp, "sparse_res_block_bottleneck")
    arguments["weights"] = sbnet_cupy.BottleneckWeights(
        *map(xp.asarray, [ramp(1, 1, 2, 4), ramp(3, 3, 4, 4), ramp(1, 1, 4, 6)]),
        *(xp.asarray(ramp(c)) for c in (2, 2, 4, 4, 4, 4)),
    )
    refuses(ShapeError, "w_project", sbnet_cupy.sparse_res_block_bottleneck, **arguments)


def test_strides_must_be_those_of_the_block_params(xp):
    arguments = valid_call(xp, "sparse_conv2d")
    refuses(ShapeError, "block_params|strides", sbnet_cupy.sparse_conv2d, **arguments, strides=2)


@pytest.mark.parametrize("value", [2**31, 2**40, 2**62, 2**63, 2**70, 10**30])
@pytest.mark.parametrize("argument", ["bstride", "boffset"])
@pytest.mark.parametrize("function", ["sparse_gather", "sparse_scatter", "reduce_mask"])
def test_sizes_beyond_64_bits_do_not_wrap_round(xp, function, argument, value):
    """They are refused by name, or mean what they say: blocks far outside the image."""
    far = {"bstride": (value, value), "boffset": (-value, value)}[argument]
    arguments = valid_call(xp, function) | {argument: far}
    if function != "reduce_mask":
        table = np.array([[0, 1, 2], [0, 2**31 - 1, 2**31 - 1], [0, -(2**31), 4]], np.int32)
        arguments["active_block_indices"] = xp.asarray(table)
        arguments["bin_counts"] = xp.asarray(np.array([3], np.int32))
    try:
        result = getattr(sbnet_cupy, function)(**arguments)
    except ShapeError as error:
        assert argument in str(error)
        return
    if function == "sparse_gather":
        assert not xp.to_numpy(result).any()
    elif function == "sparse_scatter":
        assert_same(result, xp.writable(VALID[function]["x"]))
    else:
        assert result.count() == (argument == "bstride")  # block (0, 0) is where it was
