"""The stack operations in JAX: the package's results and gradients, inside jit, grad and vmap."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal, same
from support.assertions import assert_close, to_numpy

SIZE = (2, 14, 21)  # no multiple of the blocks: some stick out of the image


def mask_of(seed=0):
    """Return a mask with single pixels, and so neighbours that are not active."""
    return (np.random.default_rng([8, seed]).random(SIZE) < 0.03).astype(np.float32)


def tables(sbj, place, block=(4, 8), seed=0):
    """Return the same table for the package and for JAX, with rows to spare."""
    table = sb.block_table(mask_of(seed), block, capacity=16)
    return table, sbj.block_table(place.make(mask_of(seed)), block, capacity=16)


def stack_of(table, channels=4, seed=0, dtype=np.float32):
    """Return a stack with something in every pixel, also where nothing may be read."""
    x = normal(table.capacity, *table.block_size, channels, seed=seed, dtype=dtype)
    x[table.count() :] = np.nan
    return x


def inside(table, stack):
    """Return the stack with zeros outside the image, where a result may hold anything."""
    return np.where(sb.stack_pixel_mask(table)[..., None], to_numpy(stack), 0)


def test_the_table_is_the_same(sbj, place, jax):
    known, table = tables(sbj, place)
    again = jax.jit(lambda t: t.after_conv(3, 2))(table)
    for one, other in ((known, table), (known.after_conv(3, 2), again)):
        for name in ("bin_counts", "active_block_indices", "grid"):
            same(getattr(other, name), getattr(one, name))
        assert (other.block_size, other.image_size) == (one.block_size, one.image_size)
    same(sbj.stack_pixel_mask(table), sb.stack_pixel_mask(known))
    of_list = sbj.block_table(table.active, (4, 8), image_size=SIZE[1:])
    same(of_list.grid, known.grid)
    with pytest.raises(ValueError, match="tol, avgpool and capacity"):
        sbj.block_table(table.active, (4, 8), capacity=3)
    with pytest.raises(sb.ShapeError, match="capacity must be given"):
        jax.jit(sbj.block_table)(place.make(mask_of()))


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_images(sbj, place, jax, data_format):
    known, table = tables(sbj, place)
    axes = (0, 1, 2, 3) if data_format == "NHWC" else (0, 3, 1, 2)
    x = np.ascontiguousarray(normal(*SIZE, 3).transpose(axes))
    fixed = {"data_format": data_format}
    stack = jax.jit(functools.partial(sbj.stack_from_image, **fixed))(place.make(x), table)
    same(stack, sb.stack_from_image(x, known, **fixed))
    for background in (2, normal(3, seed=2), normal(*x.shape, seed=3)):
        given = background if isinstance(background, int) else place.make(background)
        y = sbj.stack_to_image(stack, table, background=given, **fixed)
        same(y, sb.stack_to_image(to_numpy(stack), known, background=background, **fixed))
    with pytest.raises(sb.DTypeError, match="background must have the dtype"):
        sbj.stack_to_image(stack, table, background=place.make(normal(3).astype(np.float16)))
    with pytest.raises(sb.ShapeError, match="x must hold 2 images"):
        sbj.stack_from_image(place.make(x[:1]), table, **fixed)


POOLS = [
    {"kernel": 3, "strides": 2, "padding": 1},
    {"kernel": (2, 3), "strides": (1, 1), "padding": "SAME"},
    {"kernel": 2, "strides": 2, "ceil_mode": True},
]
CALLS = [
    ("stack_halo", {"pads": ((1, 2), (0, 9))}),
    ("stack_halo", {"pads": 1, "fill": "-inf"}),
    ("stack_halo", {"pads": (2, 1), "fill": "edge"}),
    *(("stack_max_pool", options) for options in POOLS),
    ("stack_max_pool", {"kernel": 2, "strides": 1, "padding": 1, "dilation": 2}),
    *(("stack_avg_pool", options) for options in POOLS),
    ("stack_avg_pool", POOLS[0] | {"count_include_pad": False}),
    ("stack_avg_pool", POOLS[1] | {"divisor": 5}),
    *(("stack_global_pool", {"mode": mode}) for mode in ("mean", "max", "sum")),
    ("stack_interpolate", {"scale_factor": 2}),
    ("stack_interpolate", {"scale_factor": (2, 3), "mode": "bilinear"}),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
@pytest.mark.parametrize(("name", "options"), CALLS, ids=str)
def test_results_and_gradients(sbj, place, jax, name, options, dtype):
    """Those of the package: copies to the bit, sums within the error of their terms."""
    known, table = tables(sbj, place)
    x = stack_of(known, dtype=dtype)
    function = functools.partial(getattr(sbj, name), table=table, **options)
    y = to_numpy(jax.jit(function)(place.make(x)))
    expected = getattr(sb, name)(x, known, **options)
    assert y.dtype == expected.dtype
    half = dtype == np.float16  # whose sums are in float32, but in half floats for gradients
    close(name, y, expected, after(name, known, options), 4 if half else 64, dtype)
    if name == "stack_halo" and options.get("fill") == "-inf":
        y, expected = (np.where(np.isinf(a), 0, a) for a in (y, expected))

    v = normal(*y.shape, seed=5, dtype=dtype)

    def linear(x):
        y = function(x)
        return (jax.numpy.where(jax.numpy.isinf(y), 0, y) * v).astype("float32").sum()

    grad = to_numpy(jax.jit(jax.grad(linear))(place.make(np.nan_to_num(x))))
    gradient = getattr(sb, name + "_grad")
    arguments = (v, known) if name == "stack_halo" else (v, np.nan_to_num(x), known)
    wanted = gradient(*arguments, **options)
    assert grad.dtype == wanted.dtype
    close(name, grad, wanted, known, 16 if half else 64, dtype)


def after(name, table, options):
    """Return the table of the result of an operation."""
    if "pool" in name and "kernel" in options:
        names = ("kernel", "strides", "padding", "dilation", "ceil_mode")
        return table.after_conv(**{n: v for n, v in options.items() if n in names})
    if "interpolate" in name:
        return table.after_interpolate(options["scale_factor"])
    return table


def close(name, actual, expected, table, terms, dtype):
    """Compare where the image is, with sums of so many terms of about 1."""
    if actual.shape[1:3] == table.block_size:
        actual, expected = inside(table, actual), inside(table, expected)
    infinite = np.isinf(expected.astype(np.float32))
    assert (np.isinf(actual.astype(np.float32)) == infinite).all()
    actual, expected = np.where(infinite, 0, actual), np.where(infinite, 0, expected)
    wide = expected.astype(np.float64)
    size = np.full(wide.shape, max(np.abs(wide).max(initial=0), 4))
    if name == "stack_global_pool":
        terms *= table.image_size[0] * table.image_size[1]
    assert_close(actual, wide, terms=terms, dtype=dtype, magnitude=size)


CONVOLUTIONS = [
    ((3, 3, 4, 6), {}),
    ((3, 3, 4, 6), {"strides": 2, "padding": 1, "bias": True, "activation": "relu"}),
    ((1, 1, 4, 6), {"scale": True, "bias": True, "residual": True, "activation": "silu"}),
    ((3, 5, 2, 6), {"dilation": (2, 1), "groups": 2, "padding": "SAME"}),
    ((3, 3, 1, 4), {"groups": 4, "strides": (1, 2), "padding": 1}),
    ((6, 4, 7, 7), {"w_format": "OIHW", "strides": 2, "padding": 3}),
    ((2, 2, 4, 6), {"transposed": True, "strides": 2, "padding": 0}),
    ((4, 3, 3, 3), {"transposed": True, "strides": 2, "padding": 1, "output_padding": 1,
                    "w_format": "IOHW", "groups": 2}),
    ((3, 3, 4, 6), {"transposed": True, "dilation": 2, "padding": 2, "residual": True}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
@pytest.mark.parametrize(("shape", "options"), CONVOLUTIONS, ids=str)
def test_convolutions_and_their_gradients(sbj, place, jax, shape, options, dtype):
    known, table = tables(sbj, place)
    x, w = stack_of(known, dtype=dtype), normal(*shape, dtype=dtype)
    options, arrays = dict(options), {}
    plain = {k: v for k, v in options.items() if k not in ("scale", "bias", "residual")}
    shown = sb.stack_conv2d(x, w, known, **plain)
    for seed, name in enumerate(("scale", "bias", "residual"), 7):
        if options.pop(name, False):
            size = shown.shape if name == "residual" else shown.shape[-1:]
            arrays[name] = normal(*size, seed=seed, dtype=dtype if name == "residual" else "f4")
    sizes = {k: v for k, v in options.items() if k not in ("groups", "activation", "w_format")}
    after = known.after_transposed if sizes.pop("transposed", False) else known.after_conv
    kernel = [shape[options.get("w_format", "HWIO").index(letter)] for letter in "HW"]
    after = after(tuple(kernel), **sizes)
    expected = inside(after, sb.stack_conv2d(x, w, known, **options, **arrays))

    def convolve(x, w, arrays):
        return sbj.stack_conv2d(x, w, table, **options, **arrays)

    given = place.make(x), place.make(w), {n: place.make(a) for n, a in arrays.items()}
    y = jax.jit(convolve)(*given)
    terms = 4 * w.size
    half = place.name == "cuda" and dtype == np.float16
    bound = {"terms": terms if not half else 8, "dtype": np.float32 if not half else dtype}
    if dtype == np.float16:
        bound = {"terms": 4, "dtype": dtype}

    def alike(actual, expected):
        wide = expected.astype(np.float64)
        size = np.full(wide.shape, max(np.abs(wide).max(initial=0), 1))
        assert to_numpy(actual).dtype == expected.dtype
        assert_close(to_numpy(actual), wide, magnitude=size, **bound)

    alike(y, expected)
    v = inside(after, normal(*y.shape, seed=5, dtype=dtype)).astype(dtype)
    given = (place.make(np.nan_to_num(x)), *given[1:])

    def linear(*given):
        return (convolve(*given) * v).astype("float32").sum()

    dx, dw, dtables = jax.jit(jax.grad(linear, argnums=(0, 1, 2)))(*given)
    wanted = sb.stack_conv2d_grad(v, np.nan_to_num(x), w, known, **options, **arrays)
    bound["terms"] = 32 if dtype == np.float16 else 4 * x[..., 0].size
    alike(dx, wanted.x)
    alike(dw, wanted.w)
    for name, actual in dtables.items():
        alike(actual, getattr(wanted, name))


def test_values_of_images_on_their_blocks(sbj, place, jax):
    known, table = tables(sbj, place)
    values, v = normal(2, 5), normal(16, 1, 1, 5, seed=1)
    same(jax.jit(sbj.stack_per_block)(place.make(values), table), sb.stack_per_block(values, known))
    grad = jax.grad(lambda a: (sbj.stack_per_block(a, table) * v).sum())(place.make(values))
    wanted = sb.stack_per_block_grad(v, known)
    size = np.full(wanted.shape, np.abs(v).max())
    assert_close(to_numpy(grad), wanted.astype(np.float64), terms=64, dtype="f4", magnitude=size)


def network(sbj, frame, mask, weights):
    """A stem, a residual block and a classifier, from images and a mask."""
    table = sbj.block_table(mask, (4, 8), capacity=16)
    h = sbj.stack_from_image(frame, table)
    h = sbj.stack_conv2d(h, weights[0], table, strides=2, padding=1, activation="relu")
    table = table.after_conv(3, 2, 1)
    h = sbj.stack_conv2d(h, weights[1], table, residual=h, activation="silu")
    h = sbj.stack_max_pool(h, table, kernel=3, strides=1, padding=1)
    up = sbj.stack_interpolate(h, table, scale_factor=2, mode="bilinear")
    image = sbj.stack_to_image(up, table.after_interpolate(2))
    return image.sum((1, 2)) + sbj.stack_global_pool(h, table)


def test_a_network_under_jit_grad_and_vmap(sbj, place, jax):
    """A mapped network, and its mapped gradient, are those of one member after the other."""
    frames = normal(3, *SIZE, 2)
    masks = np.stack([mask_of(seed) for seed in range(3)])
    weights = [place.make(0.3 * normal(3, 3, i, 4, seed=i)) for i in (2, 4)]
    run = functools.partial(network, sbj)

    def loss(weights, frame, mask):
        return (run(frame, mask, weights) ** 2).sum()

    step = jax.value_and_grad(loss)
    frames, masks = place.make(frames), place.make(masks)
    mapped = jax.jit(jax.vmap(step, (None, 0, 0)))(weights, frames, masks)
    for member in range(3):
        alone = jax.jit(step)(weights, frames[member], masks[member])
        for one, all_of_them in zip(*map(jax.tree.leaves, (alone, mapped)), strict=True):
            expected = to_numpy(one).astype(np.float64)
            size = np.full(expected.shape, np.abs(expected).max(initial=1))
            actual = to_numpy(all_of_them[member])
            assert_close(actual, expected, terms=4096, dtype="f4", magnitude=size)


def test_gradients_of_gradients(sbj, jax):
    from jax.test_util import check_grads

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        frame = jax.numpy.asarray(normal(*SIZE, 2, dtype=np.float64))
        mask = jax.numpy.asarray(mask_of())
        kernels = [0.2 * normal(3, 3, i, 4, seed=i, dtype=np.float64) for i in (2, 4)]
        weights = list(map(jax.numpy.asarray, kernels))  # activations of about 1
        smooth = functools.partial(_smooth, sbj, mask)
        check_grads(jax.jit(smooth), (frame, weights), 2, modes=["rev"])


def _smooth(sbj, mask, frame, weights):
    table = sbj.block_table(mask, (4, 8), capacity=16)
    h = sbj.stack_conv2d(sbj.stack_from_image(frame, table), weights[0], table, activation="silu")
    h = sbj.stack_conv2d(h, weights[1], table, strides=2, padding=1, activation="silu")
    return sbj.stack_avg_pool(h, table.after_conv(3, 2, 1), kernel=2, strides=1, padding="SAME")


def test_what_it_refuses(sbj, place):
    known, table = tables(sbj, place)
    x = place.make(stack_of(known))
    with pytest.raises(sb.DTypeError, match="table must be a BlockTable"):
        sbj.stack_halo(x, None, 1)
    with pytest.raises(sb.DeviceError, match=r"table\.bin_counts must be a JAX array"):
        sbj.stack_halo(x, known, 1)
    with pytest.raises(sb.ShapeError, match="strides must divide"):
        sbj.stack_max_pool(x, table, kernel=3)
    with pytest.raises(ValueError, match="mode must be"):
        sbj.stack_global_pool(x, table, mode="median")
    with pytest.raises(NotImplementedError, match="use a whole scale_factor"):
        sbj.stack_interpolate(x, table, scale_factor=2, mode="bilinear", align_corners=True)
