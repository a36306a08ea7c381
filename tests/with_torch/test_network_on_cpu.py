"""What a stack computes in ways of its own on a CPU: the same numbers as in the usual ways."""

import pytest

torch = pytest.importorskip("torch")

F = torch.nn.functional
DTYPES = (torch.float32, torch.float64)


def stack(block, grid=(3, 4), channels=5, share=0.6, dtype=torch.float32):
    """Return a table of random blocks that fill their images, a stack, and the size."""
    from sbnet_cupy.torch.network.table import BlockTable

    size = tuple(g * b for g, b in zip(grid, block, strict=True))
    on = torch.rand(2, *grid, generator=torch.Generator().manual_seed(0)) < share
    count = int(on.sum())
    table = BlockTable.of_blocks(on, count, count, block, size)
    x = torch.randn(table.rows, channels, *block, generator=torch.Generator().manual_seed(1))
    return table, x.to(dtype, memory_format=torch.channels_last), size


@pytest.mark.parametrize("share", [0.6, 1.0, 0.0])
@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 2, 3, 0), (0, 0, 1, 0), (3, 3, 3, 3)], ids=str)
@torch.no_grad()
def test_a_copy_with_its_rim_has_the_bits_of_a_look_up(st, pads, share):
    from sbnet_cupy.torch.network import halos

    block = (64, 48)
    for dtype in (*DTYPES, torch.bfloat16):
        for fill in (0.0, float("-inf")):
            table, x, size = stack(block, share=share, dtype=dtype)
            assert halos._is_framed(x, table, block, size, pads)
            framed = halos.halo(x, table, block, size, pads, fill)
            expected = halos._by_index(x, table, block, size, pads, fill)
            live = slice(0, int(table.counts))
            assert torch.equal(framed[live], expected[live])
            assert framed.is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test_where_rims_are_looked_up_with_their_blocks(st):
    from sbnet_cupy.torch.network import halos

    table, x, size = stack((64, 64))
    pads = (1, 1, 1, 1)
    assert halos._is_framed(x, table, (64, 64), size, pads)
    short = (size[0] - 1, size[1])  # what lies in a block need not lie in the image
    assert not halos._is_framed(x, table, (64, 64), short, pads)
    assert not halos._is_framed(x, table, (64, 64), size, (1, -1, 1, 1))
    with torch.enable_grad():
        assert not halos._is_framed(x, table, (64, 64), size, pads)


def _bounded(actual, exact, magnitude, terms):
    """Check sums of products: each of so many terms is rounded once, and each sum once."""
    bound = (terms + 1) * torch.finfo(actual.dtype).eps * magnitude
    assert bool(((actual.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("kernel", [(2, 2), (3, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_transposed_convolution_without_overlap(st, kernel, bias):
    from sbnet_cupy.torch.network import ops

    block = (8, 8)
    for dtype in DTYPES:
        table, x, size = stack(block, channels=7, dtype=dtype)
        weight = torch.randn(7, 3, *kernel, dtype=dtype)
        given = torch.randn(3, dtype=dtype) if bias else None
        out = tuple(n * k for n, k in zip(size, kernel, strict=True))
        y = ops.conv_transpose(
            x, table, block, size, weight, given, stride=kernel, padding=(0, 0), dilation=(1, 1),
            groups=1, out_size=out,
        )  # fmt: skip
        assert y.is_contiguous(memory_format=torch.channels_last)
        wide = [None if t is None else t.double() for t in (weight, given)]
        exact = F.conv_transpose2d(x.double(), *wide, kernel)
        most = [None if t is None else t.abs() for t in wide]
        _bounded(y, exact, F.conv_transpose2d(x.double().abs(), *most, kernel), 8)


@torch.no_grad()
def test_products_of_patches_in_place_of_convolutions(st, monkeypatch):
    from sbnet_cupy.torch.network import ops

    block, pads = (8, 8), (2, 2, 2, 2)
    table, x, size = stack(block, channels=16)
    weight = torch.randn(6, 16, 3, 3).contiguous(memory_format=torch.channels_last)
    args, options = (x, table, block, size, weight, None), {"pads": pads, "dilation": (2, 2)}
    direct = ops.conv(*args, **options)
    assert not ops._are_few(64, x, (3, 3))
    monkeypatch.setattr(ops, "_WIDE", 16)
    assert ops._are_few(64, x, (3, 3))
    patches = ops.conv(*args, **options)
    around = ops.halo(x.double(), table, block, size, pads)
    exact = F.conv2d(around, weight.double(), None, 1, 0, 2)
    most = F.conv2d(around.abs(), weight.double().abs(), None, 1, 0, 2)
    for y in (direct, patches):
        _bounded(y, exact, most, 16 * 9)
    monkeypatch.setattr(ops, "_WIDE_PATCHES_BYTES", x.numel() * 4 * 9 - 1)
    assert not ops._are_few(64, x, (3, 3))  # too many to be held


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
@torch.no_grad()
def test_products_keep_one_layout_of_their_weights(st, kernel, stride, residual):
    """For stacks of any number of blocks, and images of any size: exact for whole numbers."""
    from sbnet_cupy.torch.network import onednn, ops

    if not (onednn._AVAILABLE and onednn._MULTIPLIES):
        pytest.skip("this PyTorch has no such products")
    weight = torch.randint(-3, 4, (6, 16, kernel, kernel)).float()
    weight = weight.contiguous(memory_format=torch.channels_last)
    weight.is_kept, pad = True, kernel // 2
    bias = torch.randint(-3, 4, (6,)).float()
    for share in (0.2, 0.6, 1.0):
        table, x, size = stack((4, 4), channels=16, share=share)
        x = x.mul(4).round().contiguous(memory_format=torch.channels_last)
        out = (4 // stride[0], 4 // stride[1])
        added = torch.randint(-3, 4, (len(x), 6, *out)).float() if residual else None
        y = ops.conv(
            x, table, (4, 4), size, weight, bias, stride=stride, pads=(pad,) * 4,
            residual=None if added is None else added.clone(), activation="relu",
        )  # fmt: skip
        rim = ops.rim((kernel, kernel), stride, (pad,) * 4, (1, 1))
        around = ops.halo(x, table, (4, 4), size, rim)
        exact = F.conv2d(around, weight, bias, stride)[..., : out[0], : out[1]]
        assert torch.equal(y, F.relu(exact if added is None else exact + added))
    if kernel == 1:
        for height in (3, 8):
            x = torch.randint(-3, 4, (2, 16, height, 5)).float()
            y = onednn.conv(x, weight, bias, stride, (0, 0), (1, 1), 1, None, "relu")
            assert torch.equal(y, F.relu(F.conv2d(x, weight, bias, stride)))
    assert list(weight.packed_for) == ["matrix"]
