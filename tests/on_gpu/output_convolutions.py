"""The convolutions in the table of output_hashes: dense, on active blocks, and residual units."""

import numpy as np

import sbnet_cupy as sb

from .output_calls import FLOATS, SHAPE, calls, image_of, layer_of, listed, options_of

ACTIVATIONS = ("relu", "silu", "gelu")


def kernel_of(draw, size, channels, channels_out, dtype, w_format="HWIO"):
    shape = (*size, channels, channels_out)
    w = draw(*shape, dtype="float64") / np.sqrt(np.prod(shape[:3]))
    return np.ascontiguousarray(w.transpose(3, 2, 0, 1) if w_format == "OIHW" else w).astype(
        draw(1, dtype=dtype).dtype
    )


def vector_of(draw, channels, dtype):
    return draw(channels, dtype="float64" if dtype == "float64" else "float32")


DENSE = [
    *options_of("dtype", FLOATS),
    *options_of("dtype", FLOATS, data_format="NCHW", w_format="OIHW"),
    *options_of("activation", ACTIVATIONS, scale=True, bias=True),
    *options_of("precision", ("ieee", "tf32")),
    {"dtype": "float16", "strides": (2, 1), "padding": "VALID", "channels": 24},
    {"size": (1, 1), "channels_out": 40},
    {"size": (5, 3), "strides": (2, 2), "bias": True, "activation": "relu", "dtype": "float16"},
]


@calls(*DENSE, {"dtype": "float16", "into": True})
def conv2d(
    lib, draw, dtype="float32", channels=8, channels_out=16, size=(3, 3), w_format="HWIO",
    data_format="NHWC", scale=False, bias=False, into=False, **options,
):  # fmt: skip
    x = lib.array(image_of(draw, channels, dtype, data_format))
    w = lib.array(kernel_of(draw, size, channels, channels_out, dtype, w_format))
    vector = [lib.array(vector_of(draw, channels_out, dtype)) if given else None
              for given in (scale, bias)]  # fmt: skip
    if into:
        options["out"] = lib.array(image_of(draw, channels_out, dtype, data_format))
    return sb.conv2d(
        x, w, scale=vector[0], bias=vector[1], data_format=data_format, w_format=w_format, **options
    )


@calls(*DENSE, {"wanted": ("w",), "dtype": "float16"})
def conv2d_grad(
    lib, draw, dtype="float32", channels=8, channels_out=16, size=(3, 3), w_format="HWIO",
    data_format="NHWC", scale=False, bias=False, wanted=("x", "w", "bias", "scale"), **options,
):  # fmt: skip
    x = lib.array(image_of(draw, channels, dtype, data_format))
    w = lib.array(kernel_of(draw, size, channels, channels_out, dtype, w_format))
    options |= {"data_format": data_format, "w_format": w_format}
    options |= {
        name: lib.array(vector_of(draw, channels_out, dtype))
        for name, given in (("scale", scale), ("bias", bias))
        if given
    }
    shape = sb.conv2d(x, w, **options).shape
    return sb.conv2d_grad(lib.array(draw(*shape, dtype=dtype)), x, w, wanted=wanted, **options)


@calls(
    *options_of("dtype", FLOATS),
    *options_of("dtype", FLOATS, packed=True, scale=True, bias=True, activation="relu"),
    *options_of("activation", ACTIVATIONS, dtype="float16", bias=True),
    *options_of("precision", ("ieee", "tf32"), channels=24, channels_out=24),
    *options_of("expected", (1, 5000), dtype="float16", channels=24, channels_out=24),
    {"dtype": "float16", "channels": 64, "channels_out": 64},
    {"dtype": "float16", "channels": 5, "channels_out": 7},
    {"dtype": "float16", "strides": (2, 2), "channels": 16, "channels_out": 40},
    {"dtype": "bfloat16", "size": (5, 5), "padding": "VALID", "shape": (1, 40, 33)},
    {"dtype": "float16", "size": (1, 1), "residual": True, "activation": "relu"},
    {"dtype": "float16", "data_format": "NCHW", "w_format": "OIHW"},
    {"dtype": "float16", "into": True, "residual": True},
)
def fused_conv(
    lib, draw, dtype="float32", channels=8, channels_out=16, size=(3, 3), w_format="HWIO",
    data_format="NHWC", scale=False, bias=False, residual=False, into=False, packed=False,
    shape=SHAPE, **options,
):  # fmt: skip
    x = lib.array(image_of(draw, channels, dtype, data_format, shape))
    w = lib.array(kernel_of(draw, size, channels, channels_out, dtype, w_format))
    layer = {name: options[name] for name in ("strides", "padding") if name in options}
    result = sb.conv2d(x, w, data_format=data_format, w_format=w_format, **layer).shape
    of_weights = {
        name: lib.array(vector_of(draw, channels_out, dtype))
        for name, given in (("scale", scale), ("bias", bias))
        if given
    }
    if packed:
        w, of_weights = sb.PackedWeights(w, w_format=w_format, **of_weights), {}
    else:
        of_weights["w_format"] = w_format
    for name, given in (("residual", residual), ("out", into)):
        if given:
            options[name] = lib.array(draw(*result, dtype=dtype))
    n, h, w_out = (result[axis] for axis in ((0, 1, 2) if data_format == "NHWC" else (0, 2, 3)))
    active = listed(lib, draw, {"bsize": (6, 5)}, shape=(n, h, w_out))
    return sb.fused_conv(
        x, w, *active, bsize=(6, 5), data_format=data_format, **of_weights, **options
    )


LAYER = [
    *options_of("dtype", FLOATS),
    *options_of("method", ("gather", "fused"), dtype="float16", channels=24),
    *options_of("activation", ACTIVATIONS, bias=True, method="gather"),
    {"dtype": "float16", "bias": True, "activation": "relu", "base": True},
    {"dtype": "bfloat16", "strides": (2, 2), "base": True},
    {"dtype": "float16", "data_format": "NCHW", "w_format": "OIHW", "bias": True},
    {"data_format": "NCHW", "w_format": "OIHW", "method": "gather"},
    {"precision": "tf32", "channels": 16},
]


@calls(*LAYER, {"dtype": "float16", "into": "base", "base": True}, adapters=True)
def sparse_conv2d(lib, draw, into=None, **options):
    arrays, names, layer, options, _ = conv_problem(lib, draw, **options)
    if into and lib.writes:
        options["out"] = arrays[names.index("base")]

    def call(*arrays):
        return lib.ops.sparse_conv2d(*arrays[:2], *layer, **dict(
            zip(names[2:], arrays[2:], strict=True)), **options)  # fmt: skip

    return lib.run(call, *arrays)


@calls(*LAYER, adapters=True)
def sparse_conv2d_grad(lib, draw, **options):
    arrays, names, layer, options, shape = conv_problem(lib, draw, **options)
    grad = lib.array(draw(*shape, dtype=lib.to_numpy(arrays[0]).dtype.name))
    if grad.dtype != arrays[0].dtype:  # a tensor of bfloat16 comes back as its bits
        grad = lib.array(draw(*shape, dtype="bfloat16"))
    if lib.ops is sb:
        options.pop("method", None)
        given = dict(zip(names[2:], arrays[2:], strict=True))
        return sb.sparse_conv2d_grad(grad, *arrays[:2], *layer, **given, **options)

    def call(*arrays):
        return lib.ops.sparse_conv2d(*arrays[:2], *layer, **dict(
            zip(names[2:], arrays[2:], strict=True)), **options)  # fmt: skip

    return lib.gradient(call, grad, *arrays)


def conv_problem(
    lib, draw, dtype="float32", channels=8, channels_out=16, w_format="HWIO", data_format="NHWC",
    strides=(1, 1), bias=False, base=False, **options,
):  # fmt: skip
    """Return arrays, their names, (indices, block parameters), options and the result's shape."""
    params = sb.calc_block_params((*SHAPE, channels), (9, 7), (3, 3), strides)
    arrays = [image_of(draw, channels, dtype, data_format),
              kernel_of(draw, (3, 3), channels, channels_out, dtype, w_format)]  # fmt: skip
    names = ["x", "w"]
    n, h, w = SHAPE
    sizes = -(-h // strides[0]), -(-w // strides[1])
    shape = (n, *sizes, channels_out) if data_format == "NHWC" else (n, channels_out, *sizes)
    if bias:
        names.append("bias")
        arrays.append(vector_of(draw, channels_out, dtype))
    if base:
        names.append("base")
        arrays.append(draw(*shape, dtype=dtype))
    options |= {"strides": strides, "data_format": data_format, "w_format": w_format}
    layer = (layer_of(lib, draw, params), params)
    return [lib.array(array) for array in arrays], names, layer, options, shape


UNIT = [
    *options_of("dtype", FLOATS),
    {"dtype": "float16", "method": "gather"},
    {"dtype": "float16", "base": True},
    {"dtype": "float16", "strides": (2, 2), "channels_out": 32, "project": True},
    {"precision": "tf32"},
    {"dtype": "bfloat16", "channels": 96, "middle": 24},
]


@calls(
    *options_of("dtype", FLOATS, precision=None),
    *options_of("channels", (32, 64, 96), dtype="float16", middle=24),
    *options_of("expected", (1, 5000), dtype="bfloat16"),
    {"precision": "tf32"},
    {"dtype": "float16", "packed": True, "into": True},
    {"precision": "tf32", "packed": True},
)
def fused_bottleneck(
    lib, draw, dtype="float32", channels=16, middle=8, packed=False, into=False, precision=None,
    **options,
):  # fmt: skip
    weights = unit_weights(lib, draw, dtype, channels, middle, channels)
    if packed:
        weights = sb.PackedBottleneck(weights, precision=precision)
    else:
        options["precision"] = precision
    x = lib.array(image_of(draw, channels, dtype))
    if into:
        options["out"] = lib.array(image_of(draw, channels, dtype))
    active = listed(lib, draw, {"bsize": (6, 5)})
    return sb.fused_bottleneck(x, weights, *active, bsize=(6, 5), **options)


@calls(*UNIT, adapters=True)
def sparse_res_block_bottleneck(lib, draw, **options):
    arrays, call, _, _ = unit_problem(lib, draw, **options)
    return lib.run(call, *arrays)


@calls(*UNIT, adapters=True)
def sparse_res_block_bottleneck_grad(lib, draw, dtype="float32", **options):
    arrays, call, layer, others = unit_problem(lib, draw, dtype=dtype, **options)
    grad = lib.array(draw(*others.pop("shape"), dtype=dtype))
    if lib.ops is not sb:
        return lib.gradient(call, grad, *arrays)
    weights = sb.BottleneckWeights(*arrays[1:10])
    others |= dict(zip(others.pop("names"), arrays[10:], strict=True))
    others.pop("method", None)
    return sb.sparse_res_block_bottleneck_grad(grad, arrays[0], weights, *layer, **others)


def unit_weights(lib, draw, dtype, channels, middle, channels_out):
    kernels = [
        kernel_of(draw, size, *pair, dtype)
        for size, pair in zip(
            ((1, 1), (3, 3), (1, 1)),
            ((channels, middle), (middle, middle), (middle, channels_out)),
            strict=True,
        )
    ]
    tables = [vector_of(draw, c, dtype) for c in (channels, middle, middle) for _ in range(2)]
    return sb.BottleneckWeights(*(lib.array(array) for array in (*kernels, *tables)))


def unit_problem(
    lib, draw, dtype="float32", channels=16, middle=8, channels_out=None, strides=(1, 1),
    project=False, base=False, **options,
):  # fmt: skip
    """Return all arrays, the call of them, (indices, block parameters) and the other options."""
    channels_out = channels_out or channels
    shape = (*SHAPE, channels)
    params = sb.calc_block_params_res_block(shape, (9, 11), [1, 3, 1], strides)
    weights = unit_weights(lib, draw, dtype, channels, middle, channels_out)
    n, h, w = SHAPE
    result = (n, -(-h // strides[0]), -(-w // strides[1]), channels_out)
    arrays = [lib.array(image_of(draw, channels, dtype))]
    arrays += [getattr(weights, name) for name in weights.__dataclass_fields__]
    names = []
    if project:
        names.append("w_project")
        arrays.append(lib.array(kernel_of(draw, (1, 1), channels, channels_out, dtype)))
    if base:
        names.append("base")
        arrays.append(lib.array(draw(*result, dtype=dtype)))
    options["strides"] = strides
    layer = (layer_of(lib, draw, params), params)

    def call(x, *arrays):
        given = dict(zip(names, arrays[9:], strict=True))
        weights = sb.BottleneckWeights(*arrays[:9])
        return lib.ops.sparse_res_block_bottleneck(x, weights, *layer, **given, **options)

    return arrays, call, layer, {**options, "shape": result, "names": names}
