"""sbnet_cupy.torch: the functions equal the core's on the same memory, and refuse bad input."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, DTypeError, ShapeError
from sbnet_cupy.core.torch_memory import to_tensor
from support.assertions import assert_same
from support.torch_cases import bottleneck_weights, draw, on_device, table

PARAMS = sb.calc_block_params((8, 8), 6, 3)
UNIT = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])
GRID = {"bsize": (4, 4), "boffset": (-1, 0), "bstride": (3, 2)}


def make(torch, device, dtype):
    """Return x, blocks, counts and indices of a call."""
    integer = not dtype.is_floating_point and not dtype.is_complex
    values = [draw(torch, 2, 8, 8, 3, seed=1), draw(torch, 4, 4, 4, 3, seed=2)]
    x, blocks = (
        (v * 9).to(device=device, dtype=dtype) if integer else v.to(device, dtype) for v in values
    )
    return x, blocks, *table(torch, device)


# --------------------------------------------------------------------------- the core's results


DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout", [("NHWC", False), ("NHWC", True), ("NCHW", False), ("NCHW", True)]
)
def test_copies_equal_the_core(st, torch, device, dtype, layout):
    x, blocks, *listed = make(torch, device, getattr(torch, dtype))
    data_format, transpose = layout
    options = GRID | {"data_format": data_format, "transpose": transpose}
    if data_format == "NCHW":
        x = x.permute(0, 3, 1, 2).contiguous()
    if (data_format == "NHWC") == transpose:
        blocks = blocks.permute(0, 3, 1, 2).contiguous()
    assert_same(st.sparse_gather(x, *listed, **options), sb.sparse_gather(x, *listed, **options))
    for add in (False, True):
        options |= {"add": add, "atomic": True}
        expected = sb.sparse_scatter(blocks, *listed, x, **options)
        before = x.clone()
        assert_same(st.sparse_scatter(blocks, *listed, x, **options), expected)
        assert_same(x, before)
        assert_same(st.sparse_scatter(blocks, *listed, x, **options, out=before), expected)


@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "bfloat16", "float32"])
@pytest.mark.parametrize("capacity", [None, 0, 2, 9])
def test_reduce_mask_equals_the_core(st, torch, device, dtype, capacity):
    mask = (draw(torch, 2, 8, 9) > 2).to(device=device, dtype=getattr(torch, dtype))
    for options in ({"bsize": 4}, {"bsize": 3, "boffset": (-1, 0), "bstride": 2, "avgpool": True}):
        active = st.reduce_mask(mask, (2, 3), capacity=capacity, **options)
        expected = sb.reduce_mask(mask, (2, 3), capacity=capacity, **options)
        assert type(active) is sb.ActiveBlocks and active.grid == (2, 2, 3)
        first = st.reduce_mask(mask[:, None], (2, 3), capacity=capacity, **options)
        for a, e, f in zip(active, expected, first, strict=True):
            assert_same(a, e)
            assert_same(f, e)
        assert active.count() == expected.count()


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
def test_fused_gather_equals_the_core(st, torch, device, activation):
    x, _, *listed = make(torch, device, torch.float32)
    options = GRID | {"scale": x[0, 0, 0], "shift": x[0, 0, 1], "activation": activation}
    assert_same(st.sparse_gather(x, *listed, **options), sb.sparse_gather(x, *listed, **options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_layers_equal_the_core(st, torch, device, dtype, data_format):
    dtype = getattr(torch, dtype)
    x = draw(torch, 2, 8, 8, 3, dtype=dtype, device=device)
    w = draw(torch, 3, 3, 3, 5, dtype=dtype, device=device)
    base = draw(torch, 2, 8, 8, 5, dtype=dtype, device=device)
    active = table(torch, device)
    if data_format == "NCHW":
        x, base = (t.permute(0, 3, 1, 2).contiguous() for t in (x, base))
    options = {"bias": base.flatten()[:5].clone(), "activation": "silu", "data_format": data_format}
    for base_of in ({}, {"base": base}):
        expected = sb.sparse_conv2d(x, w, active, PARAMS, **options, **base_of)
        assert_same(st.sparse_conv2d(x, w, active, PARAMS, **options, **base_of), expected)
        out = torch.empty_like(expected)
        assert st.sparse_conv2d(x, w, active, PARAMS, **options, **base_of, out=out) is out
        assert_same(out, expected)
    assert st.sparse_conv2d(x, w, active, PARAMS, **options, base=base, out=base) is base
    assert_same(base, expected)


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("projected", [False, True])
def test_the_unit_equals_the_core(st, torch, device, strides, projected):
    if strides == 2 and not projected:
        pytest.skip("a shortcut with strides is a projection")
    params = sb.calc_block_params_res_block((9, 9), 7, [1, 3, 1], strides)
    x = draw(torch, 2, 9, 9, 4, device=device)
    weights = sb.BottleneckWeights(
        *bottleneck_weights(torch, 4, 2, 6 if projected else 4, device=device)
    )
    options = {"strides": strides}
    if projected:
        options["w_project"] = draw(torch, 1, 1, 4, 6, device=device)
    active = table(torch, device)
    expected = sb.sparse_res_block_bottleneck(x, weights, active, params, **options)
    assert_same(st.sparse_res_block_bottleneck(x, weights, active, params, **options), expected)
    out = torch.empty_like(expected)
    result = st.sparse_res_block_bottleneck(x, weights, active, params, **options, out=out)
    assert result is out
    assert_same(out, expected)
    if not projected:
        assert st.sparse_res_block_bottleneck(x, weights, active, params, out=x) is x
        assert_same(x, expected)


def test_empty_images_and_lists(st, torch, device):
    x = torch.zeros(2, 0, 8, 3, device=device)
    counts, rows = table(torch, device)
    assert not st.sparse_gather(x, counts, rows, bsize=4).any()
    x = torch.ones(2, 8, 8, 3, device=device)
    none = st.reduce_mask(torch.zeros(2, 8, 8, device=device), (2, 2), bsize=4)
    blocks = st.sparse_gather(x, *none, bsize=4)
    assert blocks.shape == (0, 4, 4, 3)
    assert_same(st.sparse_scatter(blocks, *none, x, bsize=4), x)
    w = draw(torch, 3, 3, 3, 5, device=device)
    params = sb.calc_block_params((8, 8), 6, 3)
    assert not st.sparse_conv2d(x, w, none, params).any()


# -------------------------------------------------------------------------------------- memory


def test_no_byte_is_copied_on_the_way_in_or_out(st, torch, device):
    native = importlib.import_module("sbnet_cupy.torch._native")

    def address(array):
        return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr

    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        x = draw(torch, 30, 100).to(device=device, dtype=dtype)
        x.requires_grad_(dtype.is_floating_point)
        y, seen = torch.empty_like(x, requires_grad=False), []

        def copy(x, nothing, y, seen=seen):
            y[...] = x
            seen += [address(x), nothing, address(y)]

        native.compute(copy, (x, None, y))
        assert seen == [x.data_ptr(), None, y.data_ptr()]
        assert_same(y, x.detach())
    made = []

    def allocate(x):
        from sbnet_cupy.core.arrays import empty

        made.append(empty((5, 3), np.int32, x))
        made[0].fill(7)
        return made[0]

    tensor = to_tensor(native.compute(allocate, (y,)))
    assert tensor.data_ptr() == address(made[0]) and tensor.device == y.device
    assert tensor.shape == (5, 3) and (tensor == 7).all()


def test_the_tensor_of_a_part_of_memory(torch):
    """It is at the bytes of the part, of which there may be none."""
    owner = torch.arange(48, dtype=torch.uint8)

    def part(start, dtype, *shape):
        values = np.empty(shape, dtype)
        memory = SimpleNamespace(tensor=owner)
        data = SimpleNamespace(ptr=owner.data_ptr() + start, mem=memory)
        return SimpleNamespace(data=data, shape=shape, dtype=values.dtype, nbytes=values.nbytes)

    for start, dtype, *shape in (
        (16, "int16", 2, 3), (8, "uint8", 5), (0, "int32", 3, 4), (0, "float32", 0, 7),
        (8, "int32"),
    ):  # fmt: skip
        tensor = to_tensor(part(start, dtype, *shape))
        assert tensor.shape == tuple(shape) and tensor.dtype == getattr(torch, dtype)
        if tensor.numel():
            assert tensor.data_ptr() == owner.data_ptr() + start


def test_out_and_in_place_write_the_callers_memory(st, torch, device):
    x, blocks, *listed = make(torch, device, torch.float32)
    out, address = torch.empty(4, 4, 4, 3, device=device), x.data_ptr()
    assert st.sparse_gather(x, *listed, **GRID, out=out) is out
    assert_same(out, sb.sparse_gather(x, *listed, **GRID))
    expected = sb.sparse_scatter(blocks, *listed, x, **GRID)
    assert st.sparse_scatter(blocks, *listed, x, **GRID, out=x) is x
    assert_same(x, expected)
    assert st.sparse_scatter_var(blocks, *listed, x, **GRID, add=True, atomic=True) is x
    assert_same(x, sb.sparse_scatter(blocks, *listed, expected, **GRID, add=True, atomic=True))
    assert x.data_ptr() == address


def test_a_tensor_with_gaps_is_copied(st, torch, device):
    x, blocks, *listed = make(torch, device, torch.float32)
    gaps = torch.stack([x, x], dim=-1)[..., 0]
    assert not gaps.is_contiguous()
    assert_same(st.sparse_gather(gaps, *listed, **GRID), st.sparse_gather(x, *listed, **GRID))
    expected = st.sparse_scatter(blocks, *listed, x, **GRID)
    assert_same(st.sparse_scatter(blocks, *listed, gaps, **GRID), expected)
    with pytest.raises(ShapeError, match="out must be C-contiguous"):
        st.sparse_scatter_var(blocks, *listed, gaps, **GRID)


# ----------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused_by_name(st, torch):
    x, blocks, counts, rows = make(torch, "cpu", torch.float32)
    w, bias = draw(torch, 3, 3, 3, 5), draw(torch, 5)
    weights = sb.BottleneckWeights(*bottleneck_weights(torch, 3, 2, 3))
    active, meta = (counts, rows), torch.empty(2, 8, 8, 3, device="meta")
    gather, scatter, conv = st.sparse_gather, st.sparse_scatter, st.sparse_conv2d
    unit = st.sparse_res_block_bottleneck
    frozen = blocks.numpy().copy()
    frozen.flags.writeable = False
    double, shared = blocks.double(), x.view(-1)[:48].view(1, 4, 4, 3)
    calls = [
        (DTypeError, "x must be a torch.Tensor, got numpy", gather, (frozen, counts, rows), GRID),
        (DTypeError, "bin_counts must be a torch", gather, (x, counts.numpy(), rows), GRID),
        (DTypeError, "blocks must be a torch.Tensor", scatter, ([1], counts, rows, x), GRID),
        (DTypeError, "mask must be a torch.Tensor", st.reduce_mask, ([1], 2), {"bsize": 2}),
        (DTypeError, "out must be a torch", gather, (x, counts, rows), GRID | {"out": frozen}),
        (DeviceError, "x must be on a CPU or CUDA", gather, (meta, counts, rows), GRID),
        (DeviceError, "bin_counts is on meta", gather, (x, counts.to("meta"), rows), GRID),
        (DTypeError, "x must be a strided", gather, (x.to_sparse(), counts, rows), GRID),
        (DTypeError, "bin_counts must be int32", gather, (x, counts.long(), rows), GRID),
        (ShapeError, "active_block_indices", gather, (x, counts, rows[:, :2]), GRID),
        (ShapeError, "x must have 4 dimensions", gather, (x[0], counts, rows), GRID),
        (ShapeError, "bsize must be a positive", gather, (x, counts, rows), {"bsize": (4, 2.5)}),
        (ValueError, "data_format", gather, (x, counts, rows), GRID | {"data_format": "CHW"}),
        (ValueError, "activation", gather, (x, counts, rows), GRID | {"activation": "tanh"}),
        (ShapeError, "scale", gather, (x, counts, rows), GRID | {"scale": bias}),
        (ShapeError, "out must have shape", gather, (x, counts, rows), GRID | {"out": blocks[:1]}),
        (DTypeError, "out must have dtype", gather, (x, counts, rows), GRID | {"out": double}),
        (ShapeError, "blocks must have shape", scatter, (blocks[:2], counts, rows, x), GRID),
        (DTypeError, "blocks must have the dtype", scatter, (double, counts, rows, x), GRID),
        (ShapeError, "atomic", scatter, (blocks, counts, rows, x), GRID | {"add": True}),
        (ShapeError, "memory", scatter, (shared, counts, rows[:1], x), {"bsize": 4, "out": x}),
        (ShapeError, "mask", st.reduce_mask, (x, 2), {"bsize": 2}),
        (ShapeError, "capacity", st.reduce_mask, (x[..., 0], 2), {"bsize": 2, "capacity": -1}),
        (TypeError, "indices", conv, (x, w, rows, PARAMS), {}),
        (TypeError, "block_params must be a BlockParams", conv, (x, w, active, (4, 4)), {}),
        (ShapeError, "block_params must be", conv, (x, w, active, UNIT), {"padding": "VALID"}),
        (DTypeError, "w must be a torch", conv, (x, w.numpy(), active, PARAMS), {}),
        (DTypeError, "bias must be a torch", conv, (x, w, active, PARAMS), {"bias": bias.numpy()}),
        (DTypeError, "w must have the dtype of x", conv, (x, w.double(), active, PARAMS), {}),
        (DTypeError, "must be float16, bfloat16", conv, (x.int(), w.int(), active, PARAMS), {}),
        (ShapeError, "w must have shape", conv, (x, w[:, :, :2], active, PARAMS), {}),
        (ShapeError, "bias", conv, (x, w, active, PARAMS), {"bias": bias[:4]}),
        (ShapeError, "base", conv, (x, w, active, PARAMS), {"base": x}),
        (ValueError, "precision", conv, (x, w, active, PARAMS), {"precision": "half"}),
        (ValueError, "method", conv, (x, w, active, PARAMS), {"method": "fast"}),
        (ValueError, "w_format", conv, (x, w, active, PARAMS), {"w_format": "IO"}),
        (TypeError, "weights must be a BottleneckWeights", unit, (x, (w,), active, UNIT), {}),
        (ShapeError, "weights.w1", unit, (x[..., :2], weights, active, UNIT), {}),
        (ShapeError, "w_project", unit, (x, weights, active, UNIT), {"w_project": w}),
        (TypeError, "block_params", unit, (x, weights, active, 4), {}),
    ]  # fmt: skip
    before = [t.clone() for t in (x, blocks, counts, rows, w)]
    for error, message, function, arguments, options in calls:
        with pytest.raises(error, match=message):
            function(*arguments, **options)
    for tensor, copy in zip((x, blocks, counts, rows, w), before, strict=True):
        assert_same(tensor, copy)


@pytest.mark.gpu
def test_tensors_on_two_devices_are_refused(st, torch, require):
    on_device(require, torch, "cuda")
    x, _, counts, rows = make(torch, "cuda", torch.float32)
    for arguments in ((x, counts.cpu(), rows), (x.cpu(), counts, rows), (x, counts, rows.cpu())):
        with pytest.raises(DeviceError, match="all tensors must be on one device"):
            st.sparse_gather(*arguments, **GRID)


def test_a_core_function_names_the_adapter_to_tensors_that_require_grad(torch):
    x, blocks, *listed = make(torch, "cpu", torch.float32)
    with pytest.raises(DTypeError, match=r"x requires grad.*sbnet_cupy\.torch"):
        sb.sparse_gather(x.requires_grad_(), *listed, **GRID)
    with pytest.raises(DTypeError, match=r"blocks requires grad.*sbnet_cupy\.torch"):
        sb.sparse_scatter(blocks.requires_grad_(), *listed, x.detach(), **GRID)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_dtypes_that_numpy_does_not_have_are_refused(st, torch, dtype):
    dtype = getattr(torch, dtype)
    with pytest.raises(DTypeError, match=f"x has dtype {dtype}"):
        st.sparse_gather(torch.zeros(2, 8, 8, 3, dtype=dtype), *table(torch), **GRID)


# --------------------------------------------------------------------------------- registration


def operators(torch, device):
    """Yield (operator, arguments) for each of ours, gradients asked for where there are any."""
    x, blocks, *listed = make(torch, device, torch.float64)
    for tensor in (x, blocks):
        tensor.requires_grad_()
    w, base, bias = (
        draw(torch, *shape, dtype=torch.float64, device=device).requires_grad_()
        for shape in ((3, 3, 3, 5), (2, 8, 8, 5), (5,))
    )
    ops, geometry = torch.ops.sbnet_cupy, list(GRID.values())
    mask = draw(torch, 2, 8, 8, device=device)
    for capacity in (None, 5):
        yield ops.reduce_mask, (mask, (2, 2), (4, 4), (0, 0), (4, 4), 1.0, False, capacity)
    affine = (x.detach()[0, 0, 0].requires_grad_(), x.detach()[0, 0, 1].requires_grad_())
    layout = (True, "NHWC")
    yield ops.sparse_gather, (x, *listed, None, None, *geometry, *layout, None)
    yield ops.sparse_gather, (x, *listed, *affine, *geometry, *layout, "gelu")
    layout = (False, "NHWC")
    for flags in ((False, False), (True, True)):
        yield ops.sparse_scatter, (blocks, *listed, x, *geometry, *flags, *layout)
    numbers = [n for pair in vars(PARAMS).values() for n in pair]
    options = (numbers, (1, 1), (1, 1, 1, 1), "relu", "NHWC", "HWIO", None, "auto")
    yield ops.sparse_conv2d, (x, w, *listed, bias, base, *options)
    kernel = w.detach().permute(3, 2, 0, 1).contiguous().requires_grad_()
    yield ops.convolve, (blocks, kernel, (1, 1), None)
    grad = draw(torch, 4, 2, 2, 5, dtype=torch.float64, device=device).requires_grad_()
    yield ops.convolve_backward, (grad, blocks, kernel, (1, 1), None, True, True)
    tensors = bottleneck_weights(torch, 3, 2, 3, dtype=torch.float64, device=device)
    weights = [t.requires_grad_() for t in tensors]
    numbers = [n for pair in vars(UNIT).values() for n in pair]
    rest = (None, *listed, None, numbers, (1, 1), None, "auto")
    yield ops.sparse_res_block_bottleneck, (x, *weights, *rest)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own
def test_opcheck(st, torch, device):
    checked = set()
    for operator, arguments in operators(torch, device):
        results = torch.library.opcheck(operator.default, arguments)
        assert set(results.values()) == {"SUCCESS"}, (operator, results)
        checked.add(operator)
    assert len(checked) == 7
