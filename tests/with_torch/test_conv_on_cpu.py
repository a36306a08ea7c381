"""sparse_conv2d of tensors on a CPU: PyTorch convolves the stack, within rounding as NumPy does."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sbnet_cupy as sb  # noqa: E402
from sbnet_cupy.block_sparse import native  # noqa: E402
from sbnet_cupy.block_sparse.grid import Grid  # noqa: E402
from sbnet_cupy.torch import _conv_on_cpu  # noqa: E402  (needs PyTorch)
from support.assertions import assert_close  # noqa: E402

EXACT = torch.backends.mkldnn.is_available()


@pytest.fixture
def convolved(monkeypatch):
    """Return a list of the dtypes of stacks that PyTorch convolved."""
    found, plainly = [], _conv_on_cpu.convolve_plainly

    def counted(x, w, strides):
        found.append(x.dtype)
        return plainly(x, w, strides)

    monkeypatch.setattr(_conv_on_cpu, "convolve_plainly", counted)
    return found


def inputs(channels_last=True, seed=0):
    """Return an image, a kernel, a bias, a base and a mask, as arrays."""
    g = np.random.default_rng(seed)
    shape = (2, 21, 19, 5) if channels_last else (2, 5, 21, 19)
    x, base = (g.standard_normal(shape).astype(np.float32) for _ in range(2))
    w = g.standard_normal((3, 3, 5, 5)).astype(np.float32)
    return x, w, g.standard_normal(5).astype(np.float32), base, g.random((2, 21, 19)) < 0.01


@pytest.mark.skipif(not EXACT, reason="PyTorch without oneDNN")
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@torch.no_grad()
def test_pytorch_convolves_the_stack(st, convolved, data_format, activation):
    x, w, bias, base, mask = inputs(data_format == "NHWC")
    options = {"bsize": (5, 4), "activation": activation, "data_format": data_format}
    given = {"bias": bias, "base": base}
    for more in ({}, given):
        expected = sb.sparse_conv2d(x, w, mask, **options, **more)
        tensors = [torch.from_numpy(a) for a in (x, w, mask)]
        more = {name: torch.from_numpy(a) for name, a in more.items()}
        y = st.sparse_conv2d(*tensors, **options, **more)
        assert_close(y, expected, terms=45, dtype="float32", magnitude=30)
        again = torch.full_like(y, float("nan"))
        assert torch.equal(st.sparse_conv2d(*tensors, **options, **more, out=again), y)
    assert convolved == [np.float32] * 4


@pytest.mark.skipif(not EXACT, reason="PyTorch without oneDNN")
@torch.no_grad()
def test_strides_weights_and_rows_past_the_count(st, convolved):
    x, w, _, _, mask = inputs()
    kernel = torch.from_numpy(w).permute(3, 2, 0, 1)  # OIHW, with gaps
    options = {"strides": 2, "padding": "VALID", "bsize": 3}
    expected = sb.sparse_conv2d(x, w, mask, **options)
    tensors = torch.from_numpy(x), kernel, torch.from_numpy(mask)
    y = st.sparse_conv2d(*tensors, w_format="OIHW", capacity=40, **options)
    assert_close(y, expected, terms=45, dtype="float32", magnitude=30)
    empty = st.sparse_conv2d(*tensors[:2], torch.zeros(2, 21, 19), w_format="OIHW", **options)
    assert not empty.any() and len(convolved) == 2


@pytest.mark.parametrize("seed", range(12))
def test_lines_of_blocks_are_copied_as_pixels_are(seed):
    """Into stacks and back, at edges, in images of fewer pixels, also where rows are corrupt."""
    g = np.random.default_rng(seed)
    n, h, w, c = (int(v) for v in g.integers(1, (3, 12, 12, 5)))
    size = tuple(int(v) for v in g.integers(1, 6, 2))
    grid = Grid(size, tuple(map(int, g.integers(-3, 3, 2))), tuple(map(int, g.integers(1, 5, 2))))
    if n * h * w < size[1]:
        return
    x = g.standard_normal((n, h, w, c)).astype(np.float32)
    indices = g.integers(-2, 9, (7, 3)).astype(np.int32)
    counts = np.array([g.integers(0, 9)], np.int32)
    expected = native.gather(x, counts, indices, *grid)
    np.testing.assert_array_equal(_conv_on_cpu._gather(x, (counts, indices), grid), expected)
    cells = np.stack(np.meshgrid(*map(np.arange, (n, 4, 4)), indexing="ij"), -1).reshape(-1, 3)
    listed = g.permutation(cells)[:9].astype(np.int32)
    apart = Grid(size, grid.boffset, size)
    blocks = g.standard_normal((len(listed), *size, c)).astype(np.float32)
    out = x.copy()
    _conv_on_cpu._scatter(blocks, (counts, listed), out, apart)
    np.testing.assert_array_equal(out, native.scatter(blocks, counts, listed, x, *apart))


@torch.no_grad()
def test_a_block_with_longer_lines_than_the_image_has_pixels(st):
    x, w = torch.randn(1, 2, 1, 3), torch.randn(3, 3, 3, 4)
    y = st.sparse_conv2d(x, w, torch.ones(1, 2, 1), bsize=8)
    expected = sb.sparse_conv2d(x.numpy(), w.numpy(), np.ones((1, 2, 1)), bsize=8)
    assert_close(y, expected, terms=27, dtype="float32", magnitude=30)


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_images_of_no_channels(st, dtype, data_format):
    """The result is the bias, and gradients of nothing are empty."""
    shape = (1, 8, 7, 0) if data_format == "NHWC" else (1, 0, 8, 7)
    x, w, bias = torch.ones(shape, dtype=dtype), torch.ones(3, 3, 0, 4, dtype=dtype), torch.ones(4)
    mask, options = torch.eye(8)[:, :7], {"strides": 2, "bsize": 3, "data_format": data_format}
    given = [t.requires_grad_() for t in (x, w, bias)]
    y = st.sparse_conv2d(x, w, mask, bias=bias, **options)
    arrays = [t.detach().numpy() for t in given]
    expected = sb.sparse_conv2d(*arrays[:2], mask.numpy(), bias=arrays[2], **options)
    np.testing.assert_array_equal(y.detach(), expected)
    gradients = torch.autograd.grad(y.sum(), given, create_graph=True)
    assert [g.shape for g in gradients] == [t.shape for t in given]
    assert gradients[2].sum() == expected.sum()


@torch.no_grad()
def test_what_is_left_to_numpy(st, convolved, monkeypatch):
    """Halves, doubles, the fused method, and a oneDNN that is off or rounds: the same bits."""
    x, w, bias, _, mask = inputs()
    cases = [(np.float16, {}), (np.float64, {}), (np.float32, {"method": "fused"})]
    for dtype, options in cases:
        arrays = [a.astype(dtype) for a in (x, w)]
        expected = sb.sparse_conv2d(*arrays, mask, bsize=4, bias=bias, **options)
        tensors = [torch.from_numpy(a) for a in (*arrays, mask, bias)]
        y = st.sparse_conv2d(*tensors[:3], bsize=4, bias=tensors[3], **options)
        np.testing.assert_array_equal(y.numpy(), expected)
    monkeypatch.setattr(_conv_on_cpu, "_is_exact", lambda: False)
    tensors = [torch.from_numpy(a) for a in (x, w, mask)]
    y = st.sparse_conv2d(*tensors, bsize=4)
    np.testing.assert_array_equal(y.numpy(), sb.sparse_conv2d(x, w, mask, bsize=4))
    assert convolved == []


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "conv"), reason="before PyTorch 2.9")
def test_reduced_precision_is_seen():
    conv = torch.backends.mkldnn.conv
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "bf16"
        assert not _conv_on_cpu._is_exact()
    finally:
        conv.fp32_precision = before
    assert _conv_on_cpu._is_exact() == EXACT
