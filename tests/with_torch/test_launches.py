"""The way of a call to its kernel on a GPU, run on the CPU: see support/torch_on_host.py.

The kernels are those of GPUs, so that an address in the wrong place, a result that does not start
as it should, or weights that are packed too seldom give a wrong result here.
"""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DTypeError, ShapeError
from support.assertions import assert_same
from support.torch_cases import bottleneck_weights, draw, table
from support.torch_on_host import Gpu

pytestmark = pytest.mark.usefixtures("compiler")
GRID = {"bsize": (4, 4), "boffset": (-1, 0), "bstride": (4, 4)}
PARAMS = sb.calc_block_params((8, 8), 6, 3)
UNIT = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])


@pytest.fixture(scope="module")
def compiler(require):
    require("g++")


@pytest.fixture
def gpu(st, torch, monkeypatch):
    return Gpu(torch, monkeypatch)


def whole(torch, *shape, seed=0):
    """Return whole numbers in halves, of which sums of a few are exact in any order."""
    return (2 * draw(torch, *shape, seed=seed)).round().half()


@pytest.fixture
def image(torch):
    return whole(torch, 2, 8, 8, 16)


@pytest.fixture
def listed(torch, gpu):
    """The list of blocks on the CPU, and on the GPU."""
    return table(torch), tuple(map(gpu.tensor, table(torch)))


def plain(tensor):
    """Return a tensor of the GPU as one of the CPU."""
    import torch

    return tensor.detach().as_subclass(torch.Tensor)


def test_masks_are_reduced(st, torch, gpu):
    for seed in range(2):
        mask = draw(torch, 2, 8, 8, seed=seed) > 1.3
        for capacity in (3, 20, None):
            options = {"bsize": 4, "capacity": capacity}
            found = st.reduce_mask(gpu.tensor(mask), (2, 2), **options)
            expected = sb.reduce_mask(mask, (2, 2), **options)
            assert gpu.kernels() == ["reduce_mask"] and found.grid == expected.grid
            for actual, wanted in zip(found, expected, strict=True):
                assert_same(plain(actual), wanted)
    assert len(gpu.planned) == 3
    for change in ({"avgpool": True}, {"tol": 1.0}, {"bsize": 3}):
        st.reduce_mask(gpu.tensor(mask), (2, 2), **{"bsize": 4, "capacity": 3} | change)
    assert len(gpu.planned) == 6


def test_blocks_are_gathered(st, torch, gpu, image, listed):
    there, here = gpu.tensor(image), listed[1]
    scale = gpu.tensor(draw(torch, 16))
    for options in ({}, {"scale": scale, "activation": "relu"}, {"transpose": True}):
        on_cpu = options | ({"scale": plain(scale)} if "scale" in options else {})
        expected = sb.sparse_gather(image, *listed[0], **GRID, **on_cpu)
        planned = len(gpu.planned)
        for _ in range(3):
            y = st.sparse_gather(there, *here, **GRID, **options)
            assert_same(plain(y), expected, signed_zero=False)
        out = gpu.tensor(torch.zeros_like(expected))
        version = out._version
        for number in (1, 2):
            assert st.sparse_gather(there, *here, **GRID, **options, out=out) is out
            assert out._version == version + number
        assert_same(plain(out), expected, signed_zero=False)
        assert len(gpu.kernels()) == 5 and len(gpu.planned) <= planned + 2
    whole_image = gpu.tensor(torch.zeros(4, 8, 8, 16).half())
    shared, there = whole_image, whole_image[:2]
    with pytest.raises(ShapeError, match="out must not share memory with x"):
        st.sparse_gather(there, *here, bsize=8, bstride=1, out=shared)
    assert not gpu.kernels()


def test_blocks_are_scattered(st, torch, gpu, image, listed):
    there, here = gpu.tensor(image), listed[1]
    blocks = whole(torch, 4, 4, 4, 16, seed=1)
    for options in ({}, {"add": True}, {"transpose": True}):
        stack = blocks.permute(0, 3, 1, 2).contiguous() if options.get("transpose") else blocks
        expected = sb.sparse_scatter(stack, *listed[0], image, **GRID, **options)
        for _ in range(2):
            y = st.sparse_scatter(gpu.tensor(stack), *here, there, **GRID, **options)
            assert_same(plain(y), expected)
        other, same = gpu.tensor(torch.zeros_like(image)), gpu.tensor(image)
        for out, x in ((other, there), (same, same), (gpu.tensor(image), None)):
            x = out.view(out.shape) if x is None else x  # the same memory, another tensor
            assert st.sparse_scatter(gpu.tensor(stack), *here, x, **GRID, **options, out=out) is out
            assert_same(plain(out), expected)
        assert_same(plain(there), image)
        assert len(gpu.kernels()) == 5


def test_blocks_that_overlap_are_scattered(st, torch, gpu, image, listed, monkeypatch):
    """By two kernels: no single launch is planned."""
    monkeypatch.setattr(gpu.calling, "compute", gpu.compute)
    grid, blocks = {"bsize": 4, "bstride": 2}, whole(torch, 4, 4, 4, 16, seed=1)
    expected = sb.sparse_scatter(blocks, *listed[0], image, **grid, add=True, atomic=True)
    for _ in range(2):
        x = gpu.tensor(image)
        y = st.sparse_scatter(gpu.tensor(blocks), *listed[1], x, **grid, add=True, atomic=True)
        assert_same(plain(y), expected)
        assert gpu.kernels() == ["scatter_link", "scatter_overlap"]


def test_images_are_convolved(st, torch, gpu, image, listed):
    w, bias = whole(torch, 3, 3, 16, 8, seed=2), draw(torch, 8).round()
    base, there = whole(torch, 2, 8, 8, 8, seed=3), gpu.tensor(image)
    for dtype, with_base in ((None, 0), ("float32", 0), ("float16", 0), (None, 1), ("float16", 1)):
        given = {"bias": bias.to(getattr(torch, dtype))} if dtype else {}
        given |= {"base": base} if with_base else {}
        expected = sb.sparse_conv2d(image, w, listed[0], PARAMS, **given, activation="relu")
        kernel, given = gpu.tensor(w), {name: gpu.tensor(t) for name, t in given.items()}
        for _ in range(3):
            y = st.sparse_conv2d(there, kernel, listed[1], PARAMS, **given, activation="relu")
            assert_same(plain(y), expected)
            assert gpu.kernels() == ["pack_weights", "fused_conv"]
        out = given.get("base", gpu.tensor(torch.ones_like(base)))
        options = given | {"activation": "relu", "out": out}
        assert st.sparse_conv2d(there, kernel, listed[1], PARAMS, **options) is out
        assert_same(plain(out), expected)
        assert gpu.kernels() == ["pack_weights", "fused_conv"]


@pytest.mark.parametrize("halves", ["none", "some", "all"])
def test_units_are_computed(st, torch, gpu, image, listed, halves):
    """With tables in float32, which the packing kernel reads as they are, in float16, in both."""
    arrays = bottleneck_weights(torch, 16, 8, 16)
    arrays = [(4 * t).round().half() if i < 3 else t.round() for i, t in enumerate(arrays)]
    arrays[:3] = [t.clamp(-1, 1) for t in arrays[:3]]
    narrow = {"none": (), "some": (5, 8), "all": range(3, 9)}[halves]
    arrays = [t.half() if i in narrow else t for i, t in enumerate(arrays)]
    weights = sb.BottleneckWeights(*arrays)
    there, base = gpu.tensor(image), whole(torch, 2, 8, 8, 16, seed=3)
    tensors = weights._map_arrays(gpu.tensor)
    for given in ({}, {"base": base}):
        options = {"method": "fused"} | given
        expected = sb.sparse_res_block_bottleneck(image, weights, listed[0], UNIT, **options)
        options |= {name: gpu.tensor(t) for name, t in given.items()}
        for _ in range(2):
            y = st.sparse_res_block_bottleneck(there, tensors, listed[1], UNIT, **options)
            assert_same(plain(y), expected)
            assert gpu.kernels() == ["pack_bottleneck", "fused_bottleneck"]


def packed_calls(st, torch, gpu, image, active):
    """Yield for a convolution and a unit: the call, its weights, packed, and their kernels."""
    w, bias = whole(torch, 8, 16, 3, 3, seed=2), draw(torch, 8).round()
    w, bias = gpu.tensor(w), gpu.tensor(bias)
    packed = sb.PackedWeights(w, bias=bias, w_format="OIHW")

    def conv(x, packed=packed, out=None):
        if packed is None:
            given = {"bias": bias, "w_format": "OIHW"}
            return st.sparse_conv2d(x, w, active, PARAMS, out=out, **given)
        return st.sparse_conv2d(x, packed, active, PARAMS, out=out)

    yield conv, w, packed, ["pack_weights", "fused_conv"]
    arrays = bottleneck_weights(torch, 16, 8, 16)
    arrays = [(4 * t).round().half() if i < 3 else t.round() for i, t in enumerate(arrays)]
    weights = sb.BottleneckWeights(*map(gpu.tensor, arrays))
    packed_unit = sb.PackedBottleneck(weights)

    def unit(x, packed=packed_unit, out=None):
        given = weights if packed is None else packed
        return st.sparse_res_block_bottleneck(x, given, active, UNIT, out=out)

    yield unit, weights.w2, packed_unit, ["pack_bottleneck", "fused_bottleneck"]


def test_packed_weights_are_packed_once(st, torch, gpu, image, listed, monkeypatch):
    monkeypatch.setattr(gpu.calling, "compute", gpu.compute)
    x = gpu.tensor(image)
    for call, w, packed, (pack, kernel) in packed_calls(st, torch, gpu, image, listed[1]):
        expected = call(x, packed=None)
        assert gpu.kernels() == [pack, kernel]
        for stream, packs in ((7, 1), (7, 0), (8, 0), (7, 0)):
            gpu.stream = stream
            assert_same(plain(call(x)), plain(expected))
            assert gpu.kernels() == [pack] * packs + [kernel]
        out = gpu.tensor(torch.ones_like(expected))
        assert call(x, out=out) is out
        assert_same(plain(out), plain(expected))
        learned = gpu.tensor(image).requires_grad_()
        y = call(learned)
        assert y.requires_grad and gpu.kernels() == [kernel] * 2
        assert_same(plain(y), plain(expected))
        w.neg_()
        assert_same(plain(call(x)), plain(expected))  # that of the old weights, until told
        changed = call(x, packed=None)
        assert not torch.equal(plain(changed), plain(expected))
        gpu.kernels()
        packed.refresh()
        assert_same(plain(call(x)), plain(changed))
        assert gpu.kernels() == [pack, kernel]


def test_packed_weights_that_cannot_be_are_refused(st, torch, gpu, image, listed):
    x, active = gpu.tensor(image), listed[1]
    arrays = bottleneck_weights(torch, 16, 8, 16)
    arrays[:3] = [t.half() for t in arrays[:3]]
    learned = sb.BottleneckWeights(*(gpu.tensor(t).requires_grad_() for t in arrays))
    numbers = sb.PackedBottleneck(sb.BottleneckWeights(*(t.numpy() for t in arrays)))
    w = gpu.tensor(whole(torch, 3, 3, 16, 8))
    scaled = sb.PackedWeights(w, scale=gpu.tensor(torch.ones(8)))
    with pytest.raises(DTypeError, match=r"weights\.w1 must be a torch\.Tensor, got numpy"):
        st.sparse_res_block_bottleneck(x, numbers, active, UNIT)
    with pytest.raises(
        DTypeError, match="a PackedBottleneck gets no gradients, and holds a tensor"
    ):
        st.sparse_res_block_bottleneck(x, sb.PackedBottleneck(learned), active, UNIT)
    with pytest.raises(DTypeError, match="w requires grad"):
        sb.PackedWeights(gpu.tensor(w).requires_grad_())
    with pytest.raises(NotImplementedError, match="scale of a PackedWeights must be None"):
        st.sparse_conv2d(x, scaled, active, PARAMS)
    with pytest.raises(ValueError, match="bias must be None where w is a PackedWeights"):
        st.sparse_conv2d(x, sb.PackedWeights(w), active, PARAMS, bias=x)
    with pytest.raises(ValueError, match="precision must be None, that of the PackedBottleneck"):
        st.sparse_res_block_bottleneck(
            x, sb.PackedBottleneck(learned), active, UNIT, precision="tf32"
        )
    assert not gpu.kernels()


def test_gradients_are_recorded(st, torch, gpu, image, listed, monkeypatch):
    """A call with a gradient launches what one without launches, and so do gradients."""
    monkeypatch.setattr(gpu.calling, "compute", gpu.compute)  # of the sum that adds up in order
    stack, kernel = whole(torch, 4, 4, 4, 16, seed=1), whole(torch, 3, 3, 16, 8, seed=2)
    on_cpu, active = listed
    scattered = sb.sparse_scatter_grad(image, *on_cpu, **GRID)
    expected = [
        sb.sparse_gather(image, *on_cpu, **GRID),
        sb.sparse_scatter(stack, *on_cpu, image, **GRID),
        sb.sparse_gather_grad(stack, *on_cpu, image, **GRID).x,
        scattered.blocks,
        scattered.x,
    ]
    for _ in range(2):
        x, blocks, w = (gpu.tensor(t).requires_grad_() for t in (image, stack, kernel))
        y = st.sparse_gather(x, *active, **GRID)
        z = st.sparse_scatter(blocks, *active, x, **GRID)
        with torch.no_grad():
            assert not st.sparse_gather(x, *active, **GRID).requires_grad
        names = [result.grad_fn.name() for result in (y, z)]
        assert names == ["sparse_gatherBackward", "sparse_scatterBackward"]
        gradients = torch.autograd.grad(y, x, gpu.tensor(stack))
        gradients += torch.autograd.grad(z, (blocks, x), gpu.tensor(image))
        assert gpu.kernels() == [
            "gather_runs", "scatter_runs", "gather_runs", "scatter_link", "scatter_overlap",
            "gather_runs", "scatter_runs",
        ]  # fmt: skip
        conv = st.sparse_conv2d(x, w, active, PARAMS)
        assert conv.grad_fn.name() == "sparse_conv2dBackward"
        assert gpu.kernels() == ["pack_weights", "fused_conv"]
        for actual, wanted in zip((y, z, *gradients), expected, strict=True):
            assert_same(plain(actual), wanted)


def test_plans_are_found_by_all_that_they_depend_on(st, torch, gpu, image, listed):
    there, active = gpu.tensor(image), listed[1]
    st.sparse_gather(there, *active, **GRID)
    planned = len(gpu.planned)
    st.sparse_gather(gpu.tensor(image), *active, **GRID)
    assert len(gpu.planned) == planned
    for x, change in (
        (gpu.tensor(image, skip=1), {}),
        (gpu.tensor(image[:1]), {}),
        (gpu.tensor(image.float()), {}),
        (there, {"transpose": True}),
        (there, {"bsize": (4, 3)}),
        (there, {"activation": "relu"}),
    ):
        expected = sb.sparse_gather(plain(x), *listed[0], **GRID | change)
        planned += 1
        for _ in range(2):
            y = st.sparse_gather(x, *active, **GRID | change)
            assert_same(plain(y), expected, signed_zero=False)
            assert len(gpu.planned) == planned, change
    gaps = gpu.tensor(image).permute(0, 2, 1, 3)
    expected = sb.sparse_gather(plain(gaps).contiguous(), *listed[0], **GRID)
    assert_same(plain(st.sparse_gather(gaps, *active, **GRID)), expected)
    assert len(gpu.planned) == planned


def test_every_change_of_a_weight_is_seen(st, torch, gpu, image, listed):
    """Also one that leaves no trace: behind autograd's back, while a gradient was required."""
    there, kernel = gpu.tensor(image), gpu.tensor(whole(torch, 3, 3, 16, 8, seed=2))
    bias = gpu.tensor(torch.arange(8.0))

    def check(w):
        for _ in range(2):
            y = st.sparse_conv2d(there, w, listed[1], PARAMS, bias=bias)
            given = plain(w).contiguous(), listed[0], PARAMS
            assert_same(plain(y), sb.sparse_conv2d(image, *given, bias=plain(bias).float()))

    def learn_behind():
        kernel.requires_grad_(True)
        kernel.data.mul_(2)
        kernel.requires_grad_(False)

    check(kernel)
    for change in (
        lambda: kernel.mul_(0.5),
        lambda: kernel.data.mul_(2),
        learn_behind,
        lambda: setattr(kernel, "data", gpu.tensor(plain(kernel) + 1)),
        lambda: setattr(gpu, "stream", 8),
        lambda: bias.data.add_(1),
        lambda: setattr(bias, "data", bias.data.half()),  # a table that is not float32
    ):
        change()
        check(kernel)
    learning = kernel.detach().clone().requires_grad_()
    for _ in range(2):
        learning.data.mul_(2)
        check(learning)
    turned = gpu.tensor(whole(torch, 3, 8, 16, 3, seed=2)).permute(0, 3, 2, 1)  # has gaps
    check(turned)
    check(turned.requires_grad_())


def test_bad_calls_are_refused_when_warm_too(st, torch, gpu, image, listed):
    there, active = gpu.tensor(image), listed[1]
    blocks = st.sparse_gather(there, *active, **GRID)
    numbers = np.ones((2, 8, 8, 16), np.float16)
    shared = there.view(-1)[: blocks.numel()].view(blocks.shape)
    bad = [
        (DTypeError, "x must be a torch.Tensor", (numbers, *active), {}),
        (DTypeError, "x must be a torch.Tensor", (None, *active), {}),
        (DTypeError, "bin_counts must be", (there, None, active[1]), {}),
        (DTypeError, "out must be a torch.Tensor", (there, *active), {"out": [1]}),
        (DTypeError, "bin_counts must be int32", (there, active[0].long(), active[1]), {}),
        (ShapeError, "bsize must be a positive", (there, *active), {"bsize": (4, 2.5)}),
        (ShapeError, "bsize must be a positive", (there, *active), {"bsize": (4, object())}),
        (ShapeError, "out must have shape", (there, *active), {"out": blocks[:1]}),
        (ShapeError, "out must be C-contiguous", (there, *active),
         {"out": blocks.permute(0, 2, 1, 3)}),
        (ShapeError, "out must not share memory with x", (there, *active), {"out": shared}),
    ]  # fmt: skip
    gpu.kernels()
    for _ in range(2):
        for error, message, arguments, change in bad:
            with pytest.raises(error, match=message):
                st.sparse_gather(*arguments, **GRID | change)
    assert not gpu.kernels()


def test_a_unit_in_place_of_x_goes_by_the_stack(st, torch, gpu, image, listed, monkeypatch):
    """A block reads its neighbours' pixels from x. Other tensors on the same memory count, too."""
    arrays = bottleneck_weights(torch, 16, 8, 16)
    arrays[:3] = [t.half() for t in arrays[:3]]
    weights = sb.BottleneckWeights(*arrays)
    plans = []
    monkeypatch.setattr(gpu.calling, "compute", lambda run, tensors: plans.append(run))
    tensors = weights._map_arrays(gpu.tensor)
    for _ in range(2):
        x = gpu.tensor(image)
        for out in (x, x.view(x.shape)):
            st.sparse_res_block_bottleneck(x, tensors, listed[1], UNIT, out=out)
            assert not gpu.kernels() and plans.pop()
        project = gpu.tensor(arrays[2].new_ones(1, 1, 16, 16))
        with pytest.raises(ShapeError, match="out must not share memory with x"):
            st.sparse_res_block_bottleneck(x, tensors, listed[1], UNIT, w_project=project, out=x)
        with pytest.raises(ShapeError, match="out must not share memory with weights"):
            inside = tensors.w1.view(-1)
            big = gpu.tensor(torch.zeros(2 * 8 * 8 * 16 + 128).half())
            odd = big[:128].view(1, 1, 16, 8).copy_(tensors.w1)
            assert inside.numel() == 128
            held = sb.BottleneckWeights(odd, *tensors._arrays()[1:])
            out = big[: x.numel()].view(x.shape)
            st.sparse_res_block_bottleneck(x, held, listed[1], UNIT, out=out)
