"""sparsify: what is asked of it, and what a SparseModel says of itself."""

import copy
import pickle
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from sbnet_cupy import CapacityError, DTypeError, ShapeError  # noqa: E402
from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near, image  # noqa: E402

nn = torch.nn

SIZE, BLOCK = (61, 84), 16


@pytest.fixture(autouse=True)
def _same_weights():
    torch.manual_seed(0)


def shallow():
    """Return a network that looks 10 pixels around: 2, then 2 by 2, then 2 times 2 of half size."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(), nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(4, 2, 3, padding=1),
    ).double().eval()  # fmt: skip


@torch.no_grad()
def test_with_exact_halos_the_result_at_the_mask_is_the_dense_one(st):
    dense, x = shallow(), image(2, (60, 84))
    mask = torch.zeros(2, 60, 84, dtype=torch.bool)
    mask[0, 24:26, 30:33] = mask[1, 0, 0] = True
    exact, zero = st.sparsify(dense, 8, halo="exact"), st.sparsify(dense, 8)
    for sparse in (exact, zero):
        sparse.break_even = 2.0
    expected = dense(x)
    assert_near(exact(x, mask).movedim(1, -1)[mask], expected.movedim(1, -1)[mask])
    assert (zero(x, mask) - expected).movedim(1, -1)[mask].abs().max() > 1e-3
    assert zero.computed()["0"] < exact.computed()["0"] < 0.5


def test_exact_halos_need_a_network_that_looks_at_pixels_near(st):
    for name, word in (("resnet_basic", "a mean over the image"), ("mobilenet", "a mean")):
        sparse = st.sparsify(networks.network(name).double(), BLOCK, halo="exact")
        with pytest.raises(ValueError, match=word):
            sparse(image(), torch.ones(2, *SIZE))


@torch.no_grad()
def test_what_the_result_holds_outside(st):
    dense, x = networks.network("fcn").double(), image()
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.4)
    zero = st.sparsify(dense, BLOCK)(x, mask)["out"]
    base = torch.randn(2, 2, *SIZE, dtype=torch.float64)
    bias = dense.head.bias[:, None, None]

    class Output(nn.Module):
        def forward(self, x):
            return dense(x)["out"]

    output = Output().eval()
    for outside, expected in (
        (0, 0 * base),
        (2.5, 0 * base + 2.5),
        ("bias", 0 * base + bias),
        (base, base),
    ):
        expected = torch.where(mask[:, None], zero, expected)
        assert torch.equal(st.sparsify(output, BLOCK, outside=outside)(x, mask), expected)
        assert torch.equal(st.sparsify(output, BLOCK)(x, mask, outside=outside), expected)
    sparse = st.sparsify(output, BLOCK)
    half = st.sparsify(nn.Identity(), BLOCK)(x.half(), mask, outside=x)
    assert torch.equal(half, x.half())  # of the result's dtype, not of that of what is outside
    with pytest.raises(ShapeError, match="outside must have the shape"):
        sparse(x, mask, outside=base[:, :, 1:])
    with pytest.raises(ValueError, match="outside must be"):
        sparse(x, mask, outside="zero")
    with pytest.raises(ValueError, match="outside='bias' needs"):
        st.sparsify(nn.Softmax(1), BLOCK)(x, mask, outside="bias")


@torch.no_grad()
def test_capacity_too_small_shows(st):
    dense, x = networks.network("unet").double(), image()
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.4)
    count = int(on.sum())
    sparse = st.sparsify(dense, BLOCK, capacity=count)
    expected = sparse(x, mask)
    assert not sparse.overflowed
    sparse.check()
    sparse.capacity = 1.0
    sparse.break_even = 2.0
    assert_near(sparse(x, mask), expected)
    sparse.capacity = count - 3
    with pytest.warns(RuntimeWarning, match=f"{count} blocks are active, and capacity has room"):
        few = sparse(x, mask)
    assert sparse.overflowed and sparse.computed()["down.0.0.0"] == (count - 3) / on.numel()
    with pytest.raises(CapacityError, match=f"{count} were active in the last call"):
        sparse.check()
    first = on.flatten().cumsum(0).view(on.shape) <= count - 3
    assert_near(few, networks.oracle(dense, x, on & first, BLOCK))
    sparse.capacity = 0
    with pytest.warns(RuntimeWarning, match="room for 0"):
        assert not sparse(x, mask).any()


@torch.no_grad()
def test_sample_masks_choose_capacity_and_block(st):
    dense = networks.network("resnet_basic")
    _, mask = networks.blocks((4, 256, 256), 32, 0.2)
    sparse = st.sparsify(dense, "auto", "auto", sample_masks=[mask, mask[:, None]])
    share = mask[:, ::32, ::32].float().mean().item()
    assert sparse.block_size == (32, 32)
    assert sparse.capacity == pytest.approx(1.25 * share)
    full = torch.ones(1, 256, 256)
    assert st.sparsify(dense, "auto", sample_masks=[full]).block_size == (128, 128)
    assert st.sparsify(dense, capacity="auto", sample_masks=[full]).capacity == 1.0
    for options, word in (
        ({"block_size": "auto"}, 'block_size="auto" needs sample_masks'),
        ({"capacity": "auto"}, 'capacity="auto" needs sample_masks'),
        ({"capacity": "much"}, "capacity must be"),
    ):
        with pytest.raises(ValueError, match=word):
            st.sparsify(dense, **options)
    wrong = (
        5, "masks", full, [None], [full.numpy()], [full[0]], [full.expand(2, 3, 256, 256)],
        [full.to(torch.complex64)], [full[:0]], [full[:, :0]],
    )  # fmt: skip
    for masks in wrong:
        with pytest.raises((TypeError, ValueError), match=r"^sample_masks must be"):
            st.sparsify(dense, sample_masks=masks)


@torch.no_grad()
def test_it_says_what_a_call_computed(st):
    dense = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), nn.Linear(24, 2),
    ).eval()  # fmt: skip
    sparse = st.sparsify(dense, BLOCK)
    assert sparse.computed() == {} and not sparse.overflowed and sparse.dense_layers == {}
    assert "0  Conv2d, not called yet" in sparse.table()
    mask = torch.zeros(2, 64, 96)
    mask[1, :17, :16] = 1  # 2 of 2 * 4 * 6 blocks
    sparse(image(2, (64, 96)).float(), mask)
    assert sparse.computed() == {"0": 2 / 48, "4": 1.0, "6": 1.0}
    assert sparse.dense_layers == {"4": "adaptive_avg_pool2d", "6": "linear"}
    assert [line.split() for line in sparse.table().splitlines()] == [
        ["layer", "function", "runs", "GFLOP", "computed"],
        ["0", "conv2d", "stack,", "blocks", "of", "16x16", "0.003", "4.2%"],
        ["1", "batch_norm", "stack,", "blocks", "of", "16x16", "4.2%"],
        ["2", "relu", "stack,", "blocks", "of", "16x16", "4.2%"],
        ["3", "max_pool2d", "stack,", "blocks", "of", "16x16", "4.2%"],
        ["4", "adaptive_avg_pool2d", "dense:", "on", "the", "whole", "image", "100.0%"],
        ["6", "linear", "dense:", "on", "the", "whole", "image", "0.000", "100.0%"],
    ]
    profile = sparse.profile(image(2, (64, 96)).float(), mask).splitlines()
    assert profile[0].split()[-1] == "ms" and len(profile) == 7
    assert all(float(line.split()[-1]) >= 0 for line in profile[1:])
    assert all(float(line.split()[-1]) > 0 for line in profile if "dense" in line)
    sparse(image(2, (64, 96)).float(), torch.ones(2, 64, 96))
    assert sparse.computed() == {"0": 1.0, "4": 1.0, "6": 1.0}


class Tokens(nn.Module):
    """A product over the pixels of an image as tokens, beside a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.mix = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64, 128)
        self.back = nn.Conv2d(128, 64, 1)

    def forward(self, x):
        """Add to a convolution what products make of it."""
        x = self.conv(x)
        tokens = self.mix(x.flatten(2).transpose(1, 2)).relu()
        image = tokens.transpose(1, 2).unflatten(2, x.shape[2:])
        return x + self.back(image)


@pytest.mark.parametrize("replay", ["auto", False])
@torch.no_grad()
def test_products_of_whole_images_are_listed(st, replay):
    """What follows a function that leaves the stack is dense, and is no secret."""
    dense, (h, w) = Tokens().double().eval(), SIZE
    sparse, x = st.sparsify(dense, BLOCK, replay=replay), image(1, SIZE)
    sparse.break_even = 2.0
    on, mask = networks.blocks((1, h, w), BLOCK, 0.5)
    for _ in range(3):
        kept = mask[:, None].double()
        first = dense.conv(x * kept) * kept
        tokens = dense.mix(first.flatten(2).transpose(1, 2)).relu()
        tokens = tokens.transpose(1, 2).unflatten(2, SIZE)
        assert_near(sparse(x, mask), (first + dense.back(tokens)) * kept)
        assert sparse.dense_layers == {"": "flatten", "mix": "linear", "back": "conv2d"}
    assert sparse.computed() == {"conv": on.double().mean().item(), "": 1, "mix": 1, "back": 1}
    rows = [line.split() for line in sparse.table().splitlines()]
    work = {row[0]: row[-2] for row in rows if row[0] in ("mix", "back")}
    assert work == dict.fromkeys(("mix", "back"), f"{2 * h * w * 64 * 128 / 1e9:.3f}")


@torch.no_grad()
def test_graphed_and_tuned(st, device):
    """On a CPU the call itself; on a GPU a replay, on masks that change."""
    dense = networks.network("fcn").to(device)
    sparse = st.sparsify(dense, BLOCK, capacity=0.6)
    x = image().float().to(device)
    masks = [networks.blocks((2, *SIZE), BLOCK, 0.4, seed)[1].to(device) for seed in range(3)]
    run = sparse.graphed(x, masks[0])
    for mask in masks:
        with torch.enable_grad():
            first = run(x * 2, mask)["out"]
        assert not first.requires_grad
        expected = sparse(x * 2, mask)["out"]
        run(x, mask)  # a result is not written again
        assert_near(first, expected, "float32")
    with pytest.raises(ShapeError, match="x and mask must be like those"):
        run(x[:1], masks[0][:1])
    times = sparse.tune(x)
    assert sparse.break_even > 0 and min(times.values()) > 0 and "dense" in times
    sparse.train()
    with pytest.raises(RuntimeError, match="in training"):
        sparse.tune(x)


@pytest.mark.parametrize(
    ("dense", "found"), [(1.0, 0.5), (1.5, 0.75), (2.0, 1.0), (2.5, 2.0), (0.25, 0.125)]
)
def test_where_a_stack_takes_as_long_as_whole_images(st, dense, found):
    from sbnet_cupy.torch.network.tuning import _crossing

    assert _crossing({"dense": dense, 0.25: 0.5, 0.5: 1.0, 1.0: 2.0}) == found


@torch.no_grad()
def test_networks_that_are_cut_where_blocks_end(st):
    """A block of 6 meets a stride of 4: from there on the network is dense, and says so."""
    dense = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, padding=1), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
    ).double()  # fmt: skip
    sparse, x = st.sparsify(dense, 6), image()
    sparse.break_even = 2.0
    assert_near(sparse(x, torch.ones(2, *SIZE)), dense(x))
    assert sparse.dense_layers == {"2": "conv2d", "4": "conv2d"}
    on, mask = networks.blocks((2, *SIZE), 6, 0.5)
    stages = {SIZE: 6, (31, 42): 3}
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, 6, stages))


@torch.no_grad()
def test_masks_and_other_arguments(st):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3, padding=1).double()

        def forward(self, x, scale, *, shift=0.0):
            return self.conv(x) * scale + shift

    dense, x = Scaled(), image()
    dense.register_module("left_out", None)
    sparse = st.sparsify(dense, (8, 16))
    on = torch.rand(2, 8, 6) < 0.5
    mask = on.repeat_interleave(8, 1).repeat_interleave(16, 2)[:, : SIZE[0], : SIZE[1]]
    expected = torch.where(mask[:, None], dense(x * mask[:, None], 3.0, shift=1.0), 0)
    for given in (mask, mask[:, None], mask.float(), mask.long() * 5, mask.double()[:, None]):
        assert_near(sparse(x, given, 3.0, shift=1.0), expected)
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        largest = 255 << 8 * (dtype.itemsize - 1)  # which is under 0 in a signed dtype
        given = torch.from_numpy(mask.numpy() * np.array(largest, str(dtype).split(".")[1]))
        assert_near(sparse(x, given, 3.0, shift=1.0), expected)
    few = mask & (torch.rand(2, *SIZE) < 0.3)  # a block is active when a pixel of its own is set
    few[:, ::8, ::16] |= mask[:, ::8, ::16]
    last = x.contiguous(memory_format=torch.channels_last)
    assert_near(sparse(last, few, 3.0, shift=1.0), expected)
    assert not sparse(x, -mask.float(), 3.0).any()
    assert sparse(x[:0], mask[:0], 3.0).shape == (0, 2, *SIZE)


@torch.no_grad()
def test_images_smaller_than_a_block_and_networks_without_convolutions(st):
    x = image(2, (5, 7))
    for dense in (networks.network("resnet_basic").double(), nn.ReLU(), nn.Identity()):
        sparse = st.sparsify(dense)
        assert_near(sparse(x, torch.ones(2, 5, 7)), dense(x))
        on = torch.zeros(2, 1, 1, dtype=torch.bool)
        assert_near(sparse(x, torch.zeros(2, 5, 7)), networks.oracle(dense, x, on, 32))


@torch.no_grad()
def test_the_model_is_held_as_it_is(st):
    dense = networks.network("resnet_basic").double()
    kinds = [type(module) for module in dense.modules()]
    sparse = st.sparsify(dense, BLOCK)
    assert sparse.model is dense and [type(module) for module in dense.modules()] == kinds
    x, mask = image(), networks.blocks((2, *SIZE), BLOCK, 0.4)[1]
    expected = sparse(x, mask)
    for twin in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        assert torch.equal(twin(x, mask), expected) and twin.model is not dense
    assert torch.equal(dense(x), sparse.model(x))


BAD_OPTIONS = {
    "block_size": (0, 2.5, (8,), "many", None, True),
    "capacity": (-1, 0.0, 1.5, True, "all", float("nan"), [1], torch.tensor(1)),
    "halo": ("full", None, 1, ["zero"], np.array([1, 2])),
    "outside": (
        "a", None, True, 1j, [1], b"bias", np.zeros(2), torch.zeros(1, dtype=torch.complex64),
        torch.zeros(1).to_sparse(),
    ),
    "replay": ("always", None, 1, np.array([True, False]), torch.ones(2)),
    "break_even": ("a", True, float("nan"), [0.5]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(st, name):
    """Errors of our own that begin with the option, also where it is set later."""
    dense = nn.Conv2d(3, 4, 3)
    sparse = st.sparsify(dense)
    good = getattr(sparse, name)
    for value in BAD_OPTIONS[name]:
        with pytest.raises((ValueError, TypeError), match=f"^{name} must be .*, got "):
            setattr(sparse, name, value)
        if name != "break_even":
            with pytest.raises((ValueError, TypeError), match=f"^{name} must be .*, got "):
                st.sparsify(dense, **{name: value})
    assert getattr(sparse, name) == good


@torch.no_grad()
def test_numbers_of_numpy_are_options(st):
    dense, x = nn.Conv2d(3, 4, 3, padding=1).double(), image()
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.4)
    total = 2 * -(-SIZE[0] // BLOCK) * -(-SIZE[1] // BLOCK)
    expected = st.sparsify(dense, BLOCK, total - 1, outside=0.5)(x, mask)
    sparse = st.sparsify(dense, np.int64(BLOCK), np.int64(total - 1), outside=np.float32(0.5))
    assert torch.equal(sparse(x, mask), expected)
    sparse.capacity, sparse.break_even, sparse.block_size = np.float32(1), np.float64(0.5), BLOCK
    assert torch.equal(sparse(x, mask), expected) and sparse.block_size == (BLOCK, BLOCK)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_a_network_of_torchscript_has_no_layers(st):
    """It would run on whole images, and give what no mask changes; in a network it is named."""
    dense, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).double().eval(), image()
    scripts = torch.jit.script(dense), torch.jit.trace(dense, x)
    for script in scripts:
        with pytest.raises(TypeError, match=r"of TorchScript, .* give the module that it was made"):
            st.sparsify(script, BLOCK)
    sparse = st.sparsify(nn.Sequential(nn.Identity(), scripts[0]), BLOCK)
    assert_near(sparse(x, torch.ones(2, *SIZE)), dense(x))
    assert list(sparse.dense_layers) == ["1"]
    sparse.model[1].to("meta")
    with pytest.raises(RuntimeError, match=r"got 1.0.weight on meta; use .to\('cpu'\)"):
        sparse(x, torch.ones(2, *SIZE))


def test_bad_calls(st):
    dense = networks.network("resnet_basic")
    sparse = st.sparsify(dense, BLOCK)
    x, mask = image().float(), torch.ones(2, *SIZE)
    moved = st.sparsify(copy.deepcopy(dense), 16)
    moved(x, mask)
    moved.to("meta")
    with warnings.catch_warnings():  # that nested tensors are a prototype
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor(list(x))
    for error, word, call in [
        (TypeError, "model must be a torch.nn.Module, got type", lambda: st.sparsify(nn.Conv2d)),
        (TypeError, "not be compiled yet, got a network of torch.compile; give it uncompiled",
         lambda: st.sparsify(torch.compile(dense))),
        (TypeError, "got a network of which torch.compile has compiled '0'; give it uncompiled",
         lambda: st.sparsify(nn.Sequential(torch.compile(dense)))),
        (ShapeError, "block_size", lambda: st.sparsify(dense, 0)),
        (ShapeError, "block_size", lambda: st.sparsify(dense, (4, 2.5))),
        (ValueError, 'halo must be "zero" or "exact"', lambda: st.sparsify(dense, halo="full")),
        (ValueError, "outside must be", lambda: st.sparsify(dense, outside=None)),
        (ShapeError, "mask must have shape", lambda: sparse(x, mask[:, 1:])),
        (ShapeError, r"mask must have shape .* got \(\d+, \d+\)$", lambda: sparse(x, mask[0])),
        (ShapeError, r"mask must have shape .*; use mask\[None\]$", lambda: sparse(x[:1], mask[0])),
        (ShapeError, r"use x.permute\(0, 3, 1, 2\) where its channels are last",
         lambda: sparse(x.permute(0, 2, 3, 1), mask)),
        (ShapeError, r"use x.permute\(0, 3, 1, 2\) where its channels are last",
         lambda: sparse(x.permute(0, 2, 3, 1), mask[:, None])),
        (ShapeError, r"mask must have shape .* got \(2,\)$", lambda: sparse(x, mask[:, 0, 0])),
        (ShapeError, "x must have shape", lambda: sparse(x[0], mask)),
        (ShapeError, "with a pixel at least", lambda: sparse(x[:, :, :0], mask[:, :0])),
        (ShapeError, "x must have shape", lambda: sparse.tune(x[0])),
        (DTypeError, "x must be a torch.Tensor", lambda: sparse.tune(x.numpy())),
        (DTypeError, "mask must be a torch.Tensor.*as_tensor", lambda: sparse(x, mask.numpy())),
        (DTypeError, "mask must be of bool", lambda: sparse(x, mask.to(torch.complex64))),
        (DTypeError, "mask must be of bool.*got torch.float8_e5m2; convert it",
         lambda: sparse(x, mask.to(torch.float8_e5m2))),
        (DTypeError, "sample_masks must be of bool.*got torch.float8_e5m2",
         lambda: st.sparsify(dense, sample_masks=[mask.to(torch.float8_e5m2)])),
        (DTypeError, "x must be a torch.Tensor", lambda: sparse(x.numpy(), mask)),
        (DTypeError, "x must be of floating point.* x.float", lambda: sparse(x.long(), mask)),
        (DTypeError, "got torch.complex64; use .*x.imag", lambda: sparse(x + 0j, mask)),
        (DTypeError, "x must be a torch.Tensor, got None$", lambda: sparse(None, mask)),
        (DTypeError, "mask must be .* got None; .* use torch.ones", lambda: sparse(x, None)),
        (DTypeError, r"x must be dense.*x.to_dense\(\)", lambda: sparse(x.to_sparse(), mask)),
        (DTypeError, "mask must be dense", lambda: sparse(x, mask.to_sparse())),
        (DTypeError, "x must be dense, got a nested", lambda: sparse(nested, mask)),
        (RuntimeError, "x must be on a device with memory", lambda: sparse(x.to("meta"), mask)),
        (DTypeError, "x must be a torch.Tensor", lambda: sparse.graphed(x.numpy(), mask)),
        (ShapeError, "mask must have shape", lambda: sparse.graphed(x, mask[:1])),
        (DTypeError, "mask must be a torch.Tensor", lambda: sparse.graphed(x, mask)(x, None)),
        (RuntimeError, r"outside must be on the device of the result, cpu, got meta; use .to\('cpu",
         lambda: st.sparsify(nn.ReLU(), 16)(x, mask, outside=x.to("meta"))),
        (DTypeError, "x must have the dtype", lambda: sparse(x.double(), mask)),
        (ShapeError, "x must have shape .N, 3, H, W.", lambda: sparse(x[:, :2], mask)),
        (RuntimeError, "mask must be on the device of x", lambda: sparse(x, mask.to("meta"))),
        (RuntimeError, r"on the device of x, cpu, got .*weight on meta; use .to\('cpu'\)",
         lambda: st.sparsify(copy.deepcopy(dense).to("meta"), 16)(x, mask)),
        (RuntimeError, "got .*weight on meta", lambda: moved(x, mask)),
        (RuntimeError, "got 0.running_mean on meta; use .to", lambda: st.sparsify(
            nn.Sequential(nn.BatchNorm2d(3, affine=False)).to("meta"), 16)(x, mask)),
    ]:
        with pytest.raises(error, match=word):
            call()
    sparse(x, mask)  # the failed calls left nothing behind
