"""Gradients of sbnet_cupy.torch, first and second: against differences, and PyTorch's own."""

import importlib
import types

import pytest

import sbnet_cupy as sb
from support.assertions import assert_close, assert_same, to_numpy
from support.exhaustive import all_but
from support.torch_cases import bottleneck_weights, draw, grid, table

OVERLAP = {"bsize": (4, 3), "boffset": (-1, 0), "bstride": (3, 2)}
LAYOUTS = [("NHWC", False), ("NHWC", True), ("NCHW", False), ("NCHW", True)]


def check(torch, function, *inputs):
    """First and second derivatives against finite differences, in float64.

    Fast mode compares random projections of the Jacobian; one wrong entry shows all the same.
    """
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def leaf(torch, *shape, seed=0, device="cpu"):
    values = draw(torch, *shape, seed=seed, dtype=torch.float64, device=device)
    return values.requires_grad_()


def image(torch, data_format, channels=2, size=5, **options):
    shape = (2, size, size, channels) if data_format == "NHWC" else (2, channels, size, size)
    return leaf(torch, *shape, **options)


def stack(torch, data_format, transpose, bsize, channels=2, **options):
    last = (data_format == "NHWC") != transpose
    return leaf(torch, 4, *((*bsize, channels) if last else (channels, *bsize)), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["none at all", None, "relu", "silu", "gelu"])
def test_gather(st, torch, device, layout, activation):
    data_format, transpose = layout
    x, listed = image(torch, data_format, device=device), table(torch, device)
    options = OVERLAP | {"data_format": data_format, "transpose": transpose}
    if activation == "none at all":
        check(torch, lambda x: st.sparse_gather(x, *listed, **options), x)
        return
    scale, shift = (leaf(torch, 2, seed=seed, device=device) for seed in (1, 2))

    def gather(x, scale, shift):
        affine = {"scale": scale, "shift": shift, "activation": activation}
        return st.sparse_gather(x, *listed, **options, **affine)

    check(torch, gather, x, scale, shift)
    check(torch, lambda x: gather(x, None, shift.detach()), x)
    check(torch, lambda shift: gather(x.detach(), None, shift), shift)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("add", "atomic"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("overlap", [True, False])
def test_scatter(st, torch, device, layout, add, atomic, overlap):
    data_format, transpose = layout
    options = OVERLAP if overlap else {"bsize": (2, 3), "boffset": (0, -1), "bstride": (2, 4)}
    options = options | {"data_format": data_format, "transpose": transpose}
    x, listed = image(torch, data_format, device=device), table(torch, device)
    blocks = stack(torch, data_format, transpose, options["bsize"], seed=1, device=device)

    def scatter(blocks, x):
        return st.sparse_scatter(blocks, *listed, x, add=add, atomic=atomic, **options)

    check(torch, scatter, blocks, x)
    check(torch, lambda blocks: scatter(blocks, x.detach()), blocks)
    check(torch, lambda x: scatter(blocks.detach(), x), x)


def test_a_block_that_is_written_over_gets_no_gradient(st, torch, device):
    """Rows 0 and 1 of the list are the same block: the image shows the later one."""
    rows = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 1]], dtype=torch.int32, device=device)
    counts = torch.tensor([3], dtype=torch.int32, device=device)
    blocks = torch.ones(3, 2, 2, 1, device=device, requires_grad=True)
    y = st.sparse_scatter(
        blocks, counts, rows, torch.zeros(1, 2, 3, 1, device=device), bsize=2, bstride=1
    )
    y.sum().backward()
    seen = torch.zeros(3, 2, 2, device=device)
    seen[1, :, 0] = 1
    seen[2] = 1
    assert_same(blocks.grad[..., 0], seen)


def test_rows_past_the_count_get_no_gradient(st, torch, device):
    counts, rows = table(torch, device)
    rows[3] = 0
    x, blocks = image(torch, "NHWC", device=device), leaf(torch, 4, 4, 3, 2, device=device)
    st.sparse_scatter(blocks, counts, rows, x, **OVERLAP, add=True, atomic=True).sum().backward()
    assert not blocks.grad[3].any() and blocks.grad[0].any()
    x.grad = None
    (st.sparse_gather(x, counts, rows, **OVERLAP) * torch.eye(4, device=device)[3].view(4, 1, 1, 1)
     ).sum().backward()  # fmt: skip
    assert not x.grad.any()


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("activation", all_but([None, "relu", "silu", "gelu"], ["silu"]))
def test_conv2d(st, torch, device, data_format, strides, activation):
    params = sb.calc_block_params((5, 5), 5, 3, strides)
    active = table(torch, device)
    w_format = "HWIO" if activation in (None, "silu") else "OIHW"
    w = leaf(torch, *((3, 3, 2, 3) if w_format == "HWIO" else (3, 2, 3, 3)), seed=1, device=device)
    x, bias = image(torch, data_format, device=device), leaf(torch, 3, seed=2, device=device)
    layout = {"data_format": data_format, "w_format": w_format}

    def conv(x, w, bias, base):
        return st.sparse_conv2d(
            x, w, active, params, strides=strides, bias=bias, activation=activation, base=base,
            **layout,
        )  # fmt: skip

    base = torch.randn_like(conv(x, w, bias, None)).requires_grad_()
    check(torch, conv, x, w, bias, base)
    check(torch, lambda w: conv(x.detach(), w, None, None), w)
    check(torch, lambda x, base: conv(x, w.detach(), bias.detach(), base), x, base)


@pytest.mark.parametrize("based", all_but([False, True], [True]))
@pytest.mark.parametrize(
    ("strides", "projected"), [((1, 1), False), ((2, 2), True), ((1, 1), True)]
)
def test_residual_unit(st, torch, device, strides, projected, based):
    params = sb.calc_block_params_res_block((5, 5), 5, [1, 3, 1], strides)
    active, cout = table(torch, device), 3 if projected else 2
    tensors = bottleneck_weights(torch, 2, 2, cout, dtype=torch.float64, device=device)
    given = {f"weight {i}": tensor.requires_grad_() for i, tensor in enumerate(tensors)}
    given["x"] = image(torch, "NHWC", device=device)
    size = [-(-5 // s) for s in strides]
    if projected:
        given["w_project"] = leaf(torch, 1, 1, 2, cout, seed=3, device=device)
    if based:
        given["base"] = leaf(torch, 2, *size, cout, seed=4, device=device)

    def unit(*values):
        named = dict(zip(given, values, strict=True))
        weights = sb.BottleneckWeights(*(named.pop(f"weight {i}") for i in range(9)))
        x = named.pop("x")
        return st.sparse_res_block_bottleneck(x, weights, active, params, strides=strides, **named)

    check(torch, unit, *given.values())
    some = [v if name in ("x", "weight 4", "base") else v.detach() for name, v in given.items()]
    check(torch, unit, *some)


def test_an_image_that_is_also_the_base_gets_both_gradients(st, torch):
    params = sb.calc_block_params_res_block((5, 5), 5, [1, 3, 1])
    tensors = bottleneck_weights(torch, 2, 2, 2, dtype=torch.float64)
    weights, active = sb.BottleneckWeights(*tensors), table(torch)

    def unit(x, base):
        return st.sparse_res_block_bottleneck(x, weights, active, params, base=base)

    x = image(torch, "NHWC")
    check(torch, lambda x: unit(x, x), x)
    w = leaf(torch, 3, 3, 2, 2)
    params = sb.calc_block_params((5, 5), 5, 3)
    check(torch, lambda x: st.sparse_conv2d(x, w, active, params, base=x), x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_conv2d_on_a_full_mask_has_the_gradients_of_torchs(st, torch, device, dtype):
    dtype = getattr(torch, dtype)
    params = sb.calc_block_params((12, 12), 6, 3)
    mask = torch.ones(2, 12, 12, dtype=torch.bool, device=device)
    active = st.reduce_mask(mask, params.bcount, **grid(params))
    x, w, grad = (
        draw(torch, *shape, seed=i, dtype=dtype, device=device)
        for i, shape in enumerate([(2, 5, 12, 12), (7, 5, 3, 3), (2, 7, 12, 12)])
    )

    def dense(x, w, grad):
        leaves = [t.double().requires_grad_() for t in (x, w)]
        torch.nn.functional.conv2d(*leaves, padding=1).backward(grad.double())
        return [t.grad.cpu().numpy() for t in leaves]

    expected, sizes = dense(x, w, grad), dense(x.abs(), w.abs(), grad.abs())
    for tensor in (x, w):
        tensor.requires_grad_()
    y = st.sparse_conv2d(x, w, active, params, data_format="NCHW", w_format="OIHW")
    y.backward(grad)
    for leaf, e, size, products in zip((x, w), expected, sizes, (7 * 9, 2 * 144), strict=True):
        # A half sums in float32; then up to four overlapping blocks are rounded and added.
        half = dtype is not torch.float32
        terms, unit = (8, to_numpy(leaf.detach()).dtype) if half else (products + 4, "float32")
        assert leaf.grad.dtype == dtype
        assert_close(to_numpy(leaf.grad), e, terms=terms, dtype=unit, magnitude=size)


def test_in_place_scatter_records_gradients(st, torch, device):
    listed = table(torch, device)
    x = image(torch, "NHWC", device=device)
    blocks = leaf(torch, 4, 4, 3, 2, seed=1, device=device)

    def in_place(blocks, x):
        y = x * 2
        assert st.sparse_scatter_var(blocks, *listed, y, **OVERLAP) is y
        return y

    check(torch, in_place, blocks, x)
    with pytest.raises(RuntimeError, match="leaf"):
        st.sparse_scatter_var(blocks, *listed, x, **OVERLAP)
    with torch.no_grad():
        st.sparse_scatter_var(blocks, *listed, x, **OVERLAP)


def test_out_records_gradients(st, torch, device):
    x, listed = image(torch, "NHWC", device=device), table(torch, device)

    def gather(x):
        out = torch.zeros(4, 4, 3, 2, dtype=torch.float64, device=device)
        return st.sparse_gather(x, *listed, **OVERLAP, out=out)

    check(torch, gather, x)


def test_nothing_is_recorded_without_need(st, torch):
    x, listed = image(torch, "NHWC"), table(torch)
    assert st.sparse_gather(x, *listed, **OVERLAP).requires_grad
    with torch.no_grad():
        assert not st.sparse_gather(x, *listed, **OVERLAP).requires_grad
    assert not st.sparse_gather(x.detach(), *listed, **OVERLAP).requires_grad
    assert not st.reduce_mask(x[..., 0], 2, bsize=2).bin_counts.requires_grad


def test_autocast_casts_what_torchs_conv2d_casts(st, torch, device):
    params = sb.calc_block_params((8, 8), 6, 3)
    active = table(torch, device)
    x, w, bias = (
        draw(torch, *shape, device=device).requires_grad_()
        for shape in ((2, 8, 8, 3), (3, 3, 3, 5), (5,))
    )
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            y = st.sparse_conv2d(x, w, active, params, bias=bias)
            z = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), bias)
            mixed = st.sparse_scatter(
                y[:1].expand(4, 8, 8, 5), *active, torch.zeros_like(y).float(), bsize=8
            )
        assert y.dtype == z.dtype == dtype and mixed.dtype == torch.float32
        half = [t.detach().to(dtype) for t in (x, w, bias)]
        assert_same(y.detach(), st.sparse_conv2d(*half[:2], active, params, bias=half[2]))
        y.float().sum().backward()
        assert x.grad.dtype == w.grad.dtype == bias.grad.dtype == torch.float32
    with torch.autocast(device, dtype=torch.bfloat16):
        assert st.sparse_conv2d(x.double(), w.double(), active, params).dtype == torch.float64


def test_the_same_bits_every_time(st, torch, device):
    params = sb.calc_block_params((5, 5), 5, 3)
    active = table(torch, device)
    runs = []
    for _ in range(3):
        x, w = image(torch, "NHWC", device=device), leaf(torch, 3, 3, 2, 3, device=device)
        st.sparse_conv2d(x, w, active, params, activation="gelu").square().sum().backward()
        runs.append((x.grad, w.grad))
    for x, w in runs[1:]:
        assert_same(x, runs[0][0])
        assert_same(w, runs[0][1])


def test_what_is_written_in_place_is_noticed(st, torch, device):
    """A tensor that autograd has saved and an operator has written since raises, as ever."""
    counts, rows = table(torch, device)
    params = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])
    tensors = bottleneck_weights(torch, 3, 2, 3, device=device)
    blocks = torch.ones(4, 4, 4, 3, device=device)
    for write in (
        lambda x: st.sparse_scatter_var(blocks, counts, rows, x, bsize=4),
        lambda x: st.sparse_gather(x.clone(), counts[:1], rows[:2], bsize=8, out=x),
        lambda x: st.sparse_res_block_bottleneck(
            x, sb.BottleneckWeights(*tensors), (counts, rows), params, out=x
        ),
    ):
        x = draw(torch, 2, 8, 8, 3, device=device)
        y = x * torch.ones(1, device=device, requires_grad=True)
        write(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("precision", [None, "ieee", "tf32"])
@pytest.mark.parametrize("users", ["tf32", "ieee", "none"])
def test_precision_is_what_is_asked_for_whatever_torchs_flags_say(st, torch, precision, users):
    exactly = importlib.import_module("sbnet_cupy.torch._convolve").exactly
    cudnn = torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        pytest.skip("this PyTorch has allow_tf32 alone")
    at_first = cudnn.conv.fp32_precision
    try:
        cudnn.conv.fp32_precision = users
        kept = (cudnn.conv.fp32_precision, cudnn.benchmark, cudnn.deterministic)
        with exactly(precision, types.SimpleNamespace(is_cuda=True)):
            assert cudnn.conv.fp32_precision == (precision or "ieee")
            assert cudnn.deterministic and not cudnn.benchmark
        assert (cudnn.conv.fp32_precision, cudnn.benchmark, cudnn.deterministic) == kept
    finally:
        cudnn.conv.fp32_precision = at_first


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func itself
def test_forward_mode_is_refused(st, torch):
    x, listed = image(torch, "NHWC"), table(torch)
    for run in (
        lambda: torch.func.jvp(lambda x: st.sparse_gather(x, *listed, **OVERLAP), (x,), (x,)),
        lambda: torch.func.jvp(
            lambda x: st.sparse_scatter(x[:1].expand(4, 5, 5, 2), *listed, x, bsize=5), (x,), (x,)
        ),
    ):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            run()


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
def test_nan_past_the_last_window_is_in_no_gradient(st, torch, device, activation):
    """With strides an image may have pixels that no window reads, but a block beyond its result."""
    shapes = (1, 8, 9, 2), (3, 3, 2, 3), (3,)
    x, w, bias = (leaf(torch, *shape, device=device) for shape in shapes)
    wild = x.detach().clone()  # windows read 7 rows and 7 columns
    wild[:, 7:], wild[:, :, 7:] = torch.nan, torch.inf
    mask = torch.ones(1, 8, 9, dtype=torch.bool, device=device)
    options = {"bsize": 4, "strides": (2, 4), "padding": "VALID", "activation": activation}
    found = []
    for image in (x, wild.requires_grad_()):
        y = st.sparse_conv2d(image, w, mask, bias=bias, **options)
        found.append((y, *torch.autograd.grad(y.sin().sum(), (image, w, bias))))
    for a, b in zip(*found, strict=True):
        assert_same(b.detach(), a.detach())
