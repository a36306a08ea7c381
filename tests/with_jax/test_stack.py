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
    with pytest.raises(sb.DTypeError, match="background must be an integer that uint8 holds"):
        sbj.stack_to_image(stack.astype("uint8"), table, background=300)
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
    ("stack_avg_pool", POOLS[0] | {"divisor": np.float32(2.5)}),
    *(("stack_global_pool", {"mode": mode}) for mode in ("mean", "max", "sum")),
    ("stack_interpolate", {"scale_factor": 2}),
    ("stack_interpolate", {"scale_factor": (2, 3), "mode": "bilinear"}),
]


HALVES = [CALLS[i] for i in (1, 2, 3, 10, 12, 13, 14, 15, 16)]  # of each function and mode


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [(*call, np.float32) for call in CALLS] + [(*call, np.float16) for call in HALVES],
    ids=str,
)
def test_results_and_gradients(sbj, place, jax, name, options, dtype):
    """Those of the package: copies to the bit, sums within the error of their terms."""
    known, table = tables(sbj, place)
    x = stack_of(known, dtype=dtype)
    shown = getattr(sb, name)(x, known, **options)
    v = normal(*shown.shape, seed=5, dtype=dtype)
    function = functools.partial(getattr(sbj, name), table=table, **options)

    @jax.jit
    def both(x, v):
        y, pull = jax.vjp(function, x)
        return y, pull(jax.numpy.where(jax.numpy.isinf(y), 0, v))[0]

    y, _ = both(place.make(x), place.make(v))  # NaN where nothing may be read
    x = np.nan_to_num(x)
    again, grad = both(place.make(x), place.make(v))
    same(again, to_numpy(y))
    assert y.dtype == shown.dtype and grad.dtype == dtype
    after = after_call(name, known, options)
    y, shown = rows_of(after, y), rows_of(after, shown)
    if forward_terms := terms_of(name, known, options):
        wide = np.abs(x.astype(np.float64)), x.astype(np.float64)
        size, wide = (rows_of(after, getattr(sb, name)(a, known, **options)) for a in wide)
        assert_close(y, wide, terms=forward_terms, dtype=np.float32, magnitude=size)
    else:
        same(y, shown)

    infinite = options.get("fill") == "-inf"
    v = np.where(np.isinf(again), 0, v).astype(np.float64) if infinite else v.astype(np.float64)
    size, wide = (gradient_of(name, a, x, known, options) for a in (np.abs(v), v))
    terms = gradient_terms(name, known, options)
    # The gradients of pixels that several blocks read are added up in the dtype of the stack.
    assert_close(inside(known, grad), wide, terms=terms, dtype=dtype, magnitude=size)


def terms_of(name, table, options):
    """Return how many roundings a result has on its way; 0 for a copy."""
    if name == "stack_avg_pool":
        return int(np.prod(options["kernel"])) ** (2 if isinstance(options["kernel"], int) else 1)
    if name == "stack_global_pool" and options["mode"] != "max":
        return int(np.prod(table.image_size)) + 1
    return 4 if options.get("mode") == "bilinear" else 0  # two products and sums on each axis


def gradient_terms(name, table, options):
    """Return how many roundings the gradient of a pixel has at most."""
    if name == "stack_halo":  # a sum of ones says how many copies there are
        ones = np.ones(sb.stack_halo(stack_of(table), table, **options).shape)
        if options.get("fill") == "-inf":
            options = options | {"fill": 0}
        return int(sb.stack_halo_grad(ones, table, **options).max())
    if "kernel" in options:
        return int(np.prod(options["kernel"])) ** (2 if isinstance(options["kernel"], int) else 1)
    if "scale_factor" in options:  # a line is read by those up to one line away on both sides
        factors = np.broadcast_to(options["scale_factor"], 2)
        return int(np.prod(2 * factors)) + 4
    return 1


def gradient_of(name, v, x, table, options):
    """Return the package's gradient in float64, with zeros outside the image."""
    arguments = (v, table) if name == "stack_halo" else (v, x.astype(np.float64), table)
    return inside(table, getattr(sb, name + "_grad")(*arguments, **options))


def after_call(name, table, options):
    """Return the table of the result of an operation."""
    if "pool" in name and "kernel" in options:
        names = ("kernel", "strides", "padding", "dilation", "ceil_mode")
        return table.after_conv(**{n: v for n, v in options.items() if n in names})
    if "interpolate" in name:
        return table.after_interpolate(options["scale_factor"])
    return table


def rows_of(table, result):
    """Return a result with zeros outside the image, if it is a stack of whole blocks."""
    whole = result.shape[1:3] == table.block_size
    return inside(table, result) if whole else to_numpy(result)


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


@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [(*call, np.float32) for call in CONVOLUTIONS]
    + [(*call, np.float16) for call in CONVOLUTIONS[1::3]],  # an activation, groups, transposed
    ids=str,
)
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
    v = inside(after, normal(*shown.shape, seed=5, dtype=dtype)).astype(dtype)

    @jax.jit
    def both(x, w, arrays, v):
        call = functools.partial(sbj.stack_conv2d, table=table, **options)
        y, pull = jax.vjp(lambda x, w, arrays: call(x, w, **arrays), x, w, arrays)
        return y, *pull(v)

    given = place.make(w), {n: place.make(a) for n, a in arrays.items()}, place.make(v)
    y = both(place.make(x), *given)[0]  # NaN where nothing may be read
    x = np.nan_to_num(x)
    again, dx, dw, dtables = both(place.make(x), *given)
    same(again, to_numpy(y))

    doubles = (x, w, arrays, v)
    doubles = jax.tree.map(lambda a: a.astype(np.float64), doubles)
    x, w, arrays, v = doubles
    linear = {name: value for name, value in options.items() if name != "activation"}
    sums = jax.tree.map(np.abs, doubles)
    size = inside(after, sb.stack_conv2d(*sums[:2], known, **linear, **sums[2]))
    # Of an activation the slope is at most 1.1 and its own slope 0.5. Its argument has the error of
    # the products, scale, bias and residual; it has a few roundings itself.
    slope = 1.1 if options.get("activation") else 1.0
    products, more = w.size, 3 + 8 * ("activation" in options)
    assert y.dtype == shown.dtype
    # On a GPU sums of half floats are rounded before scale, bias and activation, too.
    rounding, terms = np.float32, products + more
    if place.name == "cuda" and dtype == np.float16:
        rounding, terms = dtype, 2
    wide = inside(after, sb.stack_conv2d(x, w, known, **options, **arrays))
    assert_close(to_numpy(y), wide, terms=terms, dtype=rounding, magnitude=slope * size)

    wanted = sb.stack_conv2d_grad(v, x, w, known, **options, **arrays)
    largest = sb.stack_conv2d_grad(sums[3], *sums[:2], known, **linear, **sums[2])
    if options.get("activation") == "silu":
        slope += 0.5 * size.max()
    # What several blocks read of a pixel, at most nine of them, is added up in the stack's dtype.
    counts = {"x": 9 if dtype == np.float16 else products, "w": v[..., 0].size}
    grads = {"x": inside(known, dx), "w": dw} | dtables
    for name, actual in grads.items():
        wide, size = (np.asarray(getattr(g, name)) for g in (wanted, largest))
        if name == "x":
            wide, size = inside(known, wide), inside(known, size)
        exact = name != "x" and place.name == "cpu"
        count = counts.get(name, v[..., 0].size + products) + more
        bound = {"terms": count, "dtype": np.float32 if exact else dtype}
        assert to_numpy(actual).dtype == (np.float32 if name in ("scale", "bias") else dtype)
        assert_close(to_numpy(actual), wide, magnitude=slope * size, **bound)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
def test_a_residual_is_not_read_where_there_is_no_pixel(sbj, place, jax, activation):
    """A NaN there made all gradients NaN, with an activation other than relu."""
    known, table = tables(sbj, place)
    x, w, v = (place.make(a) for a in (
        np.nan_to_num(stack_of(known)), normal(3, 3, 4, 4, seed=1),
        normal(known.capacity, *known.block_size, 4, seed=2),
    ))  # fmt: skip
    scale, bias = (place.make(normal(4, seed=seed)) for seed in (3, 4))
    exact = inside(known, np.nan_to_num(stack_of(known, seed=5)))
    spoiled = np.where(sb.stack_pixel_mask(known)[..., None], exact, np.nan)

    @jax.jit
    def both(residual):
        def call(x, w, scale, bias, residual):
            options = {"scale": scale, "bias": bias, "residual": residual}
            return sbj.stack_conv2d(x, w, table, activation=activation, **options)

        y, pull = jax.vjp(call, x, w, scale, bias, residual)
        return y, *pull(v)

    for one, other in zip(*(both(place.make(a)) for a in (spoiled, exact)), strict=True):
        same(one, to_numpy(other))


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


@pytest.mark.parametrize("active", [0, 1])
def test_a_maximum_of_0_belongs_to_the_first_pixel_that_is_0(sbj, jax, active):
    """Also where that lies in no active block."""
    mask = jax.numpy.zeros((1, 2, 4), bool).at[0, 0, 2 * active].set(True)
    table = sbj.block_table(mask, 2)
    dx = jax.grad(lambda x: sbj.stack_global_pool(x, table, mode="max").sum())
    assert dx(jax.numpy.zeros((1, 2, 2, 1))).ravel().tolist() == [1 - active, 0, 0, 0]


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


EMPTY = {
    "no rows": ((1, 4, 4), 0, 2),
    "no images": ((0, 4, 4), 3, 2),
    "no pixels": ((1, 0, 4), 3, 2),
    "no channels": ((1, 4, 4), 3, 0),
}


@pytest.mark.parametrize(("size", "capacity", "channels"), EMPTY.values(), ids=EMPTY)
def test_nothing_to_compute(sbj, place, jax, size, capacity, channels):
    mask = np.ones(size, np.float32) if capacity else np.zeros(size, np.float32)
    known = sb.block_table(mask, 2, capacity=capacity)
    table = sbj.block_table(place.make(mask), 2, capacity=capacity)
    x, values = np.ones((capacity, 2, 2, channels), np.float32), normal(size[0], channels)
    w = np.ones((3, 3, channels, 4), np.float32)
    for name, options in (*CALLS, ("stack_conv2d", {"w": w})):
        given = {key: place.make(v) if key == "w" else v for key, v in options.items()}
        function = functools.partial(getattr(sbj, name), table=table, **given)
        y, pull = jax.vjp(function, place.make(x))
        same(y, getattr(sb, name)(x, table=known, **options))
        assert pull(y)[0].shape == x.shape
    same(sbj.stack_per_block(place.make(values), table), sb.stack_per_block(values, known))


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
    with pytest.raises(NotImplementedError, match="and without align_corners, got"):
        sbj.stack_interpolate(x, table, scale_factor=2, mode="bilinear", align_corners=True)
