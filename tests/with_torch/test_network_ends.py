"""The ends of a sparsified network: objects that it returns, and halos of results at the mask."""

import dataclasses
import io
import itertools
import types

import pytest

torch = pytest.importorskip("torch")


from support.networks import assert_near, image  # noqa: E402  (needs PyTorch)

nn = torch.nn
F = torch.nn.functional

SIZE, BLOCK = (61, 84), 16


class Call(nn.Module):
    """A function of an image and more as a module, after padding."""

    def __init__(self, function):
        super().__init__()
        self.function, self.more = function, 0

    def forward(self, x, *more):
        """Return what the function makes."""
        x = F.conv2d(x, torch.ones(3, 3, 1, 2 * self.more + 1).double())
        return self.function(x, *more)


LOCAL = nn.Conv2d(3, 3, 3, padding=1).double()
NOT_LOCAL = {
    "circular padding": lambda x: F.pad(LOCAL(x), (1, 1, 1, 1), mode="circular"),
    "flatten of a whole image": lambda x: x + x.flatten(2).mean(2)[..., None, None],
    "adaptive_avg_pool2d of a whole image": lambda x: (
        x * F.interpolate(F.adaptive_avg_pool2d(x, 3), size=x.shape[2:])
    ),
    "cumsum_ of a whole image": lambda x: (x * 1).cumsum_(2),
}


@pytest.mark.parametrize("word", NOT_LOCAL)
def test_exact_halos_refuse_what_looks_far(st, word):
    sparse = st.sparsify(Call(NOT_LOCAL[word]), BLOCK, halo="exact")
    with pytest.raises(ValueError, match=word):
        sparse(image(), torch.ones(2, *SIZE))


@torch.no_grad()
def test_exact_halos_follow_the_network_and_its_other_arguments(st):
    network = Call(lambda x, times: F.conv2d(x, torch.ones(3, 3, 1, 2 * times + 1).double()))
    sparse, x = st.sparsify(network, 8, halo="exact"), image()
    mask = torch.zeros(2, *SIZE)
    mask[:, 10, 20] = 1
    for more in (0, 4):
        network.more = more
        for times in (1, 9):
            y, expected = sparse(x, mask, times), network(x, times)
            assert_near(y[..., 10, 20], expected[..., 10, 20])


@dataclasses.dataclass(frozen=True)
class Output:
    """What some networks return."""

    image: torch.Tensor
    number: int = 3


class Outputs(dict):
    """As it is in Hugging Face's transformers, where keys are attributes, too."""


class Slots:
    """As attrs and msgspec make classes; it can be called, too."""

    __slots__ = ("image",)

    def __init__(self, image):
        self.image = image

    def __call__(self):
        """Return the image."""
        return self.image


class Rows(list):
    """A list that PyTorch does not look into."""


def refers_to_itself(y):
    """Return an object with a part that refers to it."""
    whole = types.SimpleNamespace(image=y)
    whole.parts = [types.SimpleNamespace(of=whole)]
    return whole


OBJECTS = {
    "slots": (Slots, lambda y: y()),
    "mapping proxy": (lambda y: types.MappingProxyType({"a": [y]}), lambda y: y["a"][0]),
    "dataclass": (Output, lambda y: y.image),
    "namespace": (lambda y: types.SimpleNamespace(all=[y, y]), lambda y: y.all[1]),
    "dict": (lambda y: Outputs(image=Output(y)), lambda y: y["image"].image),
    "list": (lambda y: Rows([y, 1]), lambda y: y[0]),
    "refers to itself": (refers_to_itself, lambda y: y.parts[0].of.image),
    "others do": (lambda y: [y, refers_to_itself(1)], lambda y: y[0]),
    "set": (lambda y: {y}, lambda y: next(iter(y))),
    "keys": (lambda y: {y: 1}.keys(), lambda y: next(iter(y))),
    "values": (lambda y: {"a": [y]}.values(), lambda y: next(iter(y))[0]),
    "items": (lambda y: {"a": Output(y)}.items(), lambda y: dict(y)["a"].image),
    "values in a list": (lambda y: [{"a": y}.values()], lambda y: next(iter(y[0]))),
}


@pytest.mark.parametrize("name", OBJECTS)
@torch.no_grad()
def test_objects_hold_images(st, name):
    make, take = OBJECTS[name]
    network, x, full = Call(lambda x: make(LOCAL(x))), image(), torch.ones(2, *SIZE)
    for break_even in (2.0, 0.0):
        sparse = st.sparsify(network, BLOCK)
        sparse.break_even = break_even
        for _ in range(3):
            y, expected = sparse(x, full), network(x)
            assert type(y) is type(expected) and type(take(y)) is torch.Tensor
            assert_near(take(y), take(expected))


LATER = {
    "generator": lambda y: (x for x in [y]),
    "list_iterator": lambda y: iter([y]),
    "list_reverseiterator": lambda y: reversed([y]),
    "tuple_iterator": lambda y: [iter((y,))],
    "map": lambda y: {"a": map(F.relu, [y])},
    "zip": lambda y: zip([y], [1], strict=True),
    "enumerate": lambda y: enumerate([y]),
    "filter": lambda y: filter(torch.is_tensor, [y]),
    "chain": lambda y: itertools.chain([y], [y]),
    "dict_valueiterator": lambda y: iter({"a": y}.values()),
}


@pytest.mark.parametrize("kind", LATER)
@pytest.mark.parametrize("replay", ["auto", False])
def test_what_is_made_after_the_call_is_refused(st, kind, replay):
    later = st.sparsify(Call(LATER[kind]).eval(), BLOCK, replay=replay)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(TypeError, match=rf"got a {kind}, .*; return a list"):
            later(image(), torch.ones(2, *SIZE))


class Uncopied:
    """An image, in an object that cannot be copied: its class has to be given what it holds."""

    def __new__(cls, y):
        """Make one of an image."""
        self = super().__new__(cls)
        self.y = y
        return self


@torch.no_grad()
def test_objects_that_cannot_be_copied_are_named(st):
    sparse = st.sparsify(Call(lambda y: [Uncopied(y)]), BLOCK)
    with pytest.raises(TypeError, match=r"got a Uncopied .*missing 1 .*; give Uncopied"):
        sparse(image(), torch.ones(2, *SIZE))
    sparse = st.sparsify(Call(lambda y: [Uncopied(y.sum((2, 3)))]), BLOCK)
    assert type(sparse(image(), torch.ones(2, *SIZE))[0]) is Uncopied


@torch.no_grad()
def test_other_iterators_are_returned_as_they_are(st):
    sparse = st.sparsify(Call(lambda y: (y, io.StringIO("a"))), BLOCK)
    assert sparse(image(), torch.ones(2, *SIZE))[1].read() == "a"


@torch.no_grad()
def test_sizes_are_returned_as_sizes(st):
    sparse = st.sparsify(Call(lambda y: [y, {"of": y.shape}]).eval(), BLOCK)
    for _ in range(3):
        _, sizes = sparse(image(), torch.ones(2, *SIZE))
        assert sizes["of"].numel() == image().numel()


class Ends(nn.Module):
    """A convolution, and a function of its result."""

    def __init__(self, function, conv=None):
        super().__init__()
        self.conv, self.function = conv or nn.Conv2d(3, 4, 3, padding=1), function
        self.double()

    def forward(self, x):
        """Return what the function makes of the convolution."""
        y = self.conv(x)
        return self.function(y)


def norm():
    """Return a batch norm in evaluation that changes what it gets."""
    made = nn.BatchNorm2d(4).double().eval()
    made.running_mean.fill_(0.5)
    return made


ACTIVATIONS = {
    "relu": F.relu,
    "relu in place": nn.ReLU(inplace=True),
    "leaky relu in place": nn.LeakyReLU(0.1, inplace=True),
    "elu": F.elu,
    "norm, elu": nn.Sequential(norm(), nn.ELU()),  # while the convolution's result is held
    "norm, relu in place": nn.Sequential(norm(), nn.ReLU(inplace=True)),
    "upsampling, relu in place": nn.Sequential(nn.Upsample(scale_factor=2), nn.ReLU(inplace=True)),
    "relu of a copy in place": lambda x: x.clone().relu_(),
    "dropout in evaluation": nn.Dropout(inplace=True).eval(),
    "softmax": nn.Softmax2d(),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "relu, norm, relu": nn.Sequential(nn.ReLU(), norm(), nn.ReLU()),
    "logsigmoid": nn.LogSigmoid(),
    "threshold": nn.Threshold(0.05, -2.0),
    "threshold in place": nn.Threshold(0.05, -2.0, inplace=True),
    "clamp": lambda x: x.clamp(0, 6),
    "clamp of one side": lambda x: x.clamp(min=-0.05),
    "clamp in place": lambda x: x.clip_(max=0.05).clamp_(-0.02, 0.04),
    "clip": lambda x: torch.clip(x, -0.05, max=0.05),
    "clamp_min": lambda x: x.clamp_min(-0.05).clamp_max_(0.05),
    "prelu": nn.PReLU(init=0.5),
    "prelu of channels": nn.Sequential(nn.ELU(), nn.PReLU(4, 0.5)),
}


@pytest.mark.parametrize("share", [0.0, 2.0])
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_bias_outside_after_activations(st, name, records, share):
    """Also where gradients are recorded, and nothing waits for what follows a convolution."""
    dense, x = Ends(ACTIVATIONS[name]).eval(), image()
    sparse = st.sparsify(dense, BLOCK, outside="bias", replay=False)
    sparse.break_even = share
    mask = torch.zeros(len(x), *SIZE, dtype=torch.bool)
    mask[0, :BLOCK, :BLOCK] = True
    with torch.set_grad_enabled(records):
        y, expected = sparse(x, mask), dense(torch.zeros_like(x))[-1, :, 9, 9]
        assert_near(y[-1], expected[:, None, None].expand_as(y[-1]))
        assert_near(y[0, :, -1, -1], expected)
    if records:
        y[-1].sum().backward()
        assert dense.conv.bias.grad is not None


TRANSPOSED = {
    "in pairs": lambda: nn.ConvTranspose2d(3, 4, 2, 2),
    "overlapping": lambda: nn.ConvTranspose2d(3, 4, 4, 2, 1),
    "with gaps": lambda: nn.ConvTranspose2d(3, 4, 1, 2, output_padding=1),
    "dilated": lambda: nn.ConvTranspose2d(3, 4, 3, 1, 2, dilation=2),
    "in groups": lambda: nn.ConvTranspose2d(3, 6, 3, 1, 1, groups=3),
    "without a bias": lambda: nn.ConvTranspose2d(3, 4, 2, 2, bias=False),
}


@pytest.mark.parametrize("share", [0.0, 2.0])
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_the_bias_outside_of_transposed_convolutions(st, name, records, share):
    """At calls that are recorded and replayed, too, and behind a batch norm and an activation."""
    conv, x = TRANSPOSED[name](), image()
    mask = torch.zeros(len(x), *SIZE, dtype=torch.bool)
    mask[0, :BLOCK, :BLOCK] = True
    after = nn.Sequential(nn.BatchNorm2d(conv.out_channels), nn.LeakyReLU(0.1))
    after[0].running_mean.fill_(0.5)
    for function in (nn.Identity(), after):
        dense = Ends(function, conv).eval()
        sparse = st.sparsify(dense, BLOCK, outside="bias")
        sparse.break_even = share
        with torch.set_grad_enabled(records):
            expected = dense(torch.zeros_like(x))[-1]
            for _ in range(3):
                y = sparse(x, mask)
                assert_near(y[-1], expected)
                assert_near(y[0, :, -1, -1], expected[:, -1, -1])


@torch.no_grad()
def test_the_bias_outside_may_have_slopes_that_are_made_in_the_call(st):
    """No replay holds those of an earlier image."""
    dense = Ends(lambda x: F.prelu(x, x.mean((0, 2, 3)))).eval()
    dense.conv.bias.fill_(-1)
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, :BLOCK, :BLOCK] = True
    sparse, plain = (st.sparsify(dense, BLOCK, outside="bias", replay=how) for how in (True, False))
    for seed in range(4):
        x = image() * (seed + 1)
        assert torch.equal(sparse(x, mask), plain(x, mask))


@torch.no_grad()
def test_the_bias_outside_may_be_made_in_the_call(st):
    """Of one that each image has anew no replay holds an old one."""

    def function(x):
        y = F.conv_transpose2d(x, torch.ones(4, 2, 2, 2).double(), x.mean((0, 2, 3))[:2], 2)
        return F.relu(y)

    dense, mask = Ends(function).eval(), torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, :BLOCK, :BLOCK] = True
    sparse, plain = (st.sparsify(dense, BLOCK, outside="bias", replay=how) for how in (True, False))
    for seed in range(4):
        x = image() * (seed + 1)
        assert torch.equal(sparse(x, mask), plain(x, mask))


@pytest.mark.parametrize("share", [0.0, 2.0])
@torch.no_grad()
def test_padding_at_the_end_stays_as_it_is(st, share):
    """It lies in no block, active or not."""
    dense, x = Ends(nn.ConstantPad2d((1, 2, 3, 0), 5.0)).eval(), image()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = share
    mask = torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, :BLOCK, :BLOCK] = True
    expected = sparse(x, mask)
    expected[:, :, 3:, 1:-2][..., BLOCK:, :] = expected[1, :, 3:, 1:-2] = 9
    expected[:, :, 3:, 1:-2][..., BLOCK:] = 9
    for _ in range(3):
        assert torch.equal(sparse(x, mask, outside=9.0), expected)
    assert torch.equal(sparse(x, mask, outside=torch.full_like(expected, 9)), expected)


MADE = {
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "add": lambda x: F.relu(torch.add(x, x)),
    "mul_": lambda x: x.mul_(2),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "cumsum": lambda x: x.cumsum(2),
    "clamp": lambda x: F.relu(x.clamp(min=torch.zeros(SIZE).double())),
    "clamp_": lambda x: x.clamp_(torch.zeros(4, 1, 1).double()),
}


@pytest.mark.parametrize("share", [0.0, 2.0])
@pytest.mark.parametrize("name", MADE)
@torch.no_grad()
def test_what_has_no_bias_is_named(st, name, share):
    sparse = st.sparsify(Ends(MADE[name]).eval(), BLOCK, outside="bias")
    sparse.break_even = share
    words = f"outside='bias' needs .*, got what {name} made; give a number, or a tensor"
    with pytest.raises(ValueError, match=words):
        sparse(image(), torch.ones(2, *SIZE))


WRITES = {
    "mul_": lambda x: x.mul_(2),
    "fill_": lambda x: x.fill_(3),
    "an image": lambda x: x.copy_(torch.ones(x.shape)),
    "where a mask is set": lambda x: x.masked_fill_(x < 0, 0),
    "channels": lambda x: (x[:, :2].relu_(), x)[1],
    "channels of an image": lambda x: (x.__setitem__((slice(None), 0), 7), x)[1],
}


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_no_bias_outside_of_what_was_written_to(st, name, records):
    sparse = st.sparsify(Ends(WRITES[name]).eval(), BLOCK, outside="bias", replay=False)
    x, mask = image(), torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, :BLOCK, :BLOCK] = True
    with torch.set_grad_enabled(records), pytest.raises(ValueError, match="outside='bias' needs"):
        sparse(x, mask)


def test_the_bias_outside_has_the_dtype_of_the_result(st):
    """Under autocast a convolution's bias is float32 and its result is not."""
    dense, mask = nn.Conv2d(3, 4, 3, padding=1), torch.zeros(2, *SIZE, dtype=torch.bool)
    mask[0, 0, 0] = True
    with torch.autocast("cpu", torch.bfloat16):
        y = st.sparsify(dense, BLOCK, outside="bias")(image().float(), mask)
    assert y.dtype == torch.bfloat16
