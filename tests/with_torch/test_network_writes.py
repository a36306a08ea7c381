"""sparsify of networks that write in place: views see it, copies do not, or it is refused."""

import pytest

torch = pytest.importorskip("torch")


from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn = torch.nn
F = torch.nn.functional


class Net(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function, channels):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Conv2d(3, 4, 3, padding=1).double()
        self.pad, self.relu = nn.ReflectionPad2d(1), nn.ReLU(inplace=True)
        self.function = function
        self.after = nn.Conv2d(channels, 2, 3, padding=1).double()

    def forward(self, x):
        """Return the convolution of what the function makes of one."""
        return self.after(self.function(self, self.before(x)))


def written(x, y):
    """Write to y; return both, channels on top of each other."""
    y.mul_(3)
    return torch.cat([x, y], 1)


def last(x):
    """Return channels last, as a copy."""
    return x.permute(0, 2, 3, 1).contiguous()


def first(x):
    """Return channels as the second dimension."""
    return x.permute(0, 3, 1, 2)


def cut(net, x):
    """Write to parts of images that nothing reads afterwards."""
    top, bottom = x[:, :, :20], x[:, :, 25:]
    return net.relu(top.sub_(0.1)) + bottom.mul_(2)


def both(x, y, dim):
    """Write to both parts, and join them."""
    return torch.cat([x.mul_(2), y.relu_()], dim)


def gone(x):
    """Return means of tokens, views of which end here."""
    tokens = x.flatten(2).transpose(1, 2)
    return tokens.softmax(1).amax(1)


def spread(means, x):
    """Add means of channels."""
    return x + means[..., None, None]


ROW = slice(None), slice(None), 0


# name: (function, channels of its result)
RIGHT = {
    "padding": (lambda net, x: net.relu(net.pad(x)), 4),
    "padding by hand": (lambda net, x: F.pad(x, (1, 1, 2, 0)).add_(1).clamp_(max=2), 4),
    "padded before": (lambda net, x: (lambda y: net.relu(x)[:, :, 1:] + y[:, :, 2:-1, 1:-1])(
        net.pad(x)
    ), 4),
    "a view of channels": (lambda net, x: written(x, x[:, 1:3]), 6),
    "a copy of channels": (lambda net, x: written(x, x[:, 1:3].contiguous()), 6),
    "a copy in another order": (lambda net, x: written(x, first(last(x)) * 1), 8),
    "a view of a copy": (lambda net, x: written(x, first(last(x))), 8),
    "a part of a view of a copy": (lambda net, x: written(x, first(last(x))[:, 1:3]), 6),
    "what was copied": (lambda net, x: written(first(last(x)), x), 8),
    "another layout": (
        lambda net, x: written(x, x.contiguous(memory_format=torch.channels_last)), 8
    ),
    "itself": (lambda net, x: (x.contiguous().mul_(3), x)[1], 4),
    "no padding": (lambda net, x: written(x, F.pad(x, (0, 0, 0, 0))), 8),
    "no padding, itself": (lambda net, x: (F.pad(x, (0, 0, 0, 0)).relu_(), x)[1], 4),
    "a view of a copy, detached": (lambda net, x: (last(x).detach().relu_(), x)[1], 4),
    "a shuffle": (lambda net, x: written(x, F.channel_shuffle(x, 2)), 8),
    "parts that are read": (cut, 4),
    "each image": (lambda net, x: both(x[:1], x[1:], 0), 4),
    "both sides": (lambda net, x: both(x[..., :20], x[..., 20:], 3), 4),
    "rows of a copy": (lambda net, x: (x.clone()[:, :, 3:9].mul_(2), x)[1], 4),
    "a part that is a view": (
        lambda net, x: (lambda part: (x.mul_(3), part)[1])(x[:, :, :-4]), 4
    ),
    "means of tokens": (lambda net, x: spread(x.flatten(2).mean(2), x.mul_(2)), 4),
    "tokens that are gone": (lambda net, x: spread(gone(x), x.mul_(2)), 4),
    "a copy of rows": (lambda net, x: spread(x[:, :, 0].clone().sum(2), x.mul_(2)), 4),
    "one row like the next": (lambda net, x: (x.__setitem__(ROW, x[:, :, 1]), x)[1], 4),
    "an operator": (lambda net, x: (torch.ops.aten.add_.Tensor(x, x), x)[1], 4),
}  # fmt: skip

REFUSED = {
    "rows": (lambda x: x[:, :, 3:9].mul_(2), "__getitem__"),
    "cut off": (lambda x: x[:, :, :-4].mul_(2), "a slice"),
    "channels, cut off": (lambda x: x[:, :, :-4][:, :2].mul_(2), "a slice"),
    "one image": (lambda x: x[0].mul_(2), "__getitem__"),
    "narrow": (lambda x: x.narrow(2, 0, 5).zero_(), "narrow"),
    "chunk": (lambda x: x.chunk(2, 3)[1].zero_(), "chunk"),
    "tokens": (lambda x: x.flatten(2).mul_(2), "flatten"),
    "tokens of half of the channels": (lambda x: x.chunk(2, 1)[0].flatten(2).mul_(2), "flatten"),
    "one image of a view": (lambda x: x[:, :2][0].mul_(2), "__getitem__"),
    "rows of a view": (lambda x: x[:, :2][:, :, :20].zero_(), "__getitem__"),
    "tokens of groups": (lambda x: x.view(2, 2, 2, 45, 51).flatten(3).mul_(2), "flatten"),
    "one image, channels last": (lambda x: x.permute(0, 2, 3, 1)[0].mul_(2), "__getitem__"),
    "tokens, channels last": (lambda x: x.permute(0, 2, 3, 1).flatten(1, 2).mul_(2), "flatten"),
    "one image, detached": (lambda x: x.detach()[0].mul_(2), "__getitem__"),
    "one image of what is cut off": (lambda x: x[:, :, :-4][0].mul_(2), "__getitem__"),
    "a list": (lambda x: torch._foreach_mul_([x], 2.0), "_foreach_mul_ cannot write to a list"),
}

# Parts that have pixels in common, of which one is written to.
OVERLAPPING = {
    "images": lambda x: (x[:1], x[0:2]),
    "images, the other way round": lambda x: (x[0:2], x[:1]),
    "rows": lambda x: (x[:, :, :20], x[:, :, 10:]),
    "rows and columns": lambda x: (x[:, :, :20], x[:, :, :, 10:]),
    "an image and its tokens": lambda x: (x[1], x.flatten(2)),
}


# What is a copy, or none, by the memory format of the dense activation: writes to one of two.
FORMATS = {
    "contiguous": lambda x: (lambda y: (y.relu_(), x + y)[1])(x.contiguous()),
    "contiguous, the source": lambda x: (lambda y: (x.relu_(), x + y)[1])(x.contiguous()),
    "contiguous, a view before": lambda x: (
        lambda view, y: (view.relu_(), y)[1]
    )(x[:, 1:3], x.contiguous()),
    "contiguous, a view behind": lambda x: (x.contiguous()[:, 1:3].relu_(), x)[1],
    "contiguous, twice": lambda x: (x.contiguous().contiguous().relu_(), x)[1],
    "what is detached": lambda x: (x.contiguous().detach().relu_(), x)[1],
    "channels_last": lambda x: (x.contiguous(memory_format=torch.channels_last).relu_(), x)[1],
    "to channels_last": lambda x: (x.to(memory_format=torch.channels_last).relu_(), x)[1],
    "to contiguous": lambda x: (x.to(memory_format=torch.contiguous_format).relu_(), x)[1],
    "another order": lambda x: (last(x).relu_(), x)[1],
}  # fmt: skip
# A copy of both, or of none.
KNOWN_FORMATS = {
    "channels": lambda x: (x[:, 1:3].contiguous().relu_(), x)[1],
    "listed channels": lambda x: (lambda y: (y.contiguous().relu_(), y)[1])(
        x.index_select(1, torch.tensor([0, 2, 1, 3]))
    ),
    "to another dtype": lambda x: (
        x.to(torch.float32, memory_format=torch.channels_last).relu_(), x
    )[1],
    "nothing written": lambda x: x.contiguous() + x.to(memory_format=torch.channels_last),
    "the result alone": lambda x: x.contiguous(memory_format=torch.channels_last).relu_(),
    "groups": lambda x: x.view(-1, 2, 2, 45, 51).transpose(1, 2).contiguous().view(x.shape) * x,
}  # fmt: skip
# Of images and weights in the usual format, but for what the function does.
MOVED = {
    "a norm of another order": lambda x: (
        lambda y: (y.contiguous().relu_(), first(y))[1]
    )(F.layer_norm(x.permute(0, 2, 3, 1), (4,))),
    "a shuffle": lambda x: (lambda y: (y.contiguous().relu_(), y)[1])(F.channel_shuffle(x, 2)),
}


@pytest.fixture
def image():
    return torch.randn(2, 3, 45, 51, generator=torch.Generator().manual_seed(2)).double()


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("records", [False, True])
def test_views_see_what_is_written_and_copies_do_not(st, image, name, records):
    dense = Net(*RIGHT[name])
    full = torch.ones(2, 45, 51, dtype=torch.bool)
    with torch.set_grad_enabled(records):
        for break_even in (2.0, 0.0):
            sparse = st.sparsify(dense, 16)
            sparse.break_even = break_even
            for _ in range(3):  # the third from a tape, where nothing is recorded
                assert_near(sparse(image, full).detach(), dense(image).detach())


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_would_not_be_seen_is_refused(st, image, name, mode):
    write, words = REFUSED[name]
    sparse = st.sparsify(Net(lambda net, x: (write(x), x)[1], 4), 16)
    _, mask = networks.blocks((2, 45, 51), 16, 0.5)
    for break_even in (2.0, 0.0):
        sparse.break_even = break_even
        with mode(), pytest.raises(NotImplementedError, match=words):
            sparse(image, mask)


def assert_refused(st, image, function, mode, words):
    """Call a network that ends in a function: on the stack and on whole images, three times."""
    net = Net(function, 4)
    net.after = nn.Identity()
    sparse, mask = st.sparsify(net.eval(), 16), torch.ones(2, 45, 51)
    for break_even in (2.0, 0.0):
        sparse.break_even = break_even
        for _ in range(3):
            with mode(), pytest.raises(NotImplementedError, match=words):
                sparse(image, mask)


@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_parts_that_would_not_see_each_other_are_refused(st, image, name, mode):
    def function(net, x):
        one, other = OVERLAPPING[name](x)
        one.mul_(3)
        return other

    assert_refused(st, image, function, mode, "was written to in place")


# What is taken of an activation, and how that is written to later.
OLD = {
    "tokens": (lambda x: x.flatten(2), lambda x: F.relu(x, inplace=True)),
    "tokens of a view": (lambda x: x[:, :2].flatten(2), torch.Tensor.relu_),
    "tokens, channels of which are written": (
        lambda x: x.flatten(2), lambda x: x.__setitem__((slice(None), slice(2)), 0)
    ),
    "tokens of what is detached": (lambda x: x.detach().flatten(2), torch.Tensor.relu_),
    "views of tokens": (lambda x: x.view(2, 4, -1).transpose(1, 2), lambda x: x.add_(1)),
    "rows": (lambda x: x[:, :, :20], torch.Tensor.relu_),
    "an image on its side": (lambda x: x.transpose(2, 3), lambda x: x.mul_(2)),
    "one image": (lambda x: x[0], lambda x: x[:, :2].mul_(2)),
    "one image of what is cut off": (lambda x: x[:, :, :-4][0], lambda x: x.mul_(2)),
    "both sides": (lambda x: x.chunk(2, 3), lambda x: x.mul_(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_what_would_become_old_is_refused(st, image, name, mode):
    """Also in calls that might be recorded."""
    take, write = OLD[name]

    def function(net, x):
        part = take(x)
        write(x)
        return part[0] if type(part) is tuple else part

    assert_refused(st, image, function, mode, "which it does not see; take it")


def test_parts_in_function_transforms(st, image):
    """They are watched there, too."""
    mask, kept = torch.ones(2, 45, 51), []

    def derivative(net, *more):
        return torch.func.grad(lambda x: net(x, *more).sum())(image)

    net = Net(lambda net, x: spread(x.flatten(2).mean(2), x.mul_(2)), 4)
    sparse = st.sparsify(net, 16)
    assert_near(derivative(sparse, mask).detach(), derivative(net).detach())
    net.function = lambda net, x: (kept.append(x.flatten(2)), x.mul_(2))[1]
    with pytest.raises(NotImplementedError, match=r"flatten took .* is still there"):
        derivative(sparse, mask)
    net.function = lambda net, x: (x.flatten(2).mul_(2), x)[1]
    with pytest.raises(NotImplementedError, match=r"flatten took .* was written to in place"):
        derivative(sparse, mask)


def erased(net, x):
    """Set the first channel of a copy to 0."""
    x = x.clone()
    x[:, 0] = 0
    return x


@pytest.mark.parametrize("capacity", [None, 0.9])
def test_written_channels_have_gradients_where_no_block_is_active(st, image, capacity):
    mask, grads = torch.zeros(2, 45, 51), []
    for function in (erased, lambda net, x: torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1)):
        net = Net(function, 4)
        st.sparsify(net, 16, capacity=capacity)(image, mask).square().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert_near(*grads)


# What keeps a copy for its gradient, before that of which it is a copy is written.
READ = {
    "another order": lambda x: first(last(x).square()),
    "another layout": lambda x: F.elu(x.contiguous(memory_format=torch.channels_last)),
    "no padding": lambda x: F.pad(x, (0, 0, 0, 0)).square(),
}


@pytest.mark.parametrize("name", READ)
def test_gradients_of_copies_are_not_those_of_what_is_written(st, image, name):
    def function(net, x):
        y = READ[name](x)
        return y + x.mul_(2)

    dense = Net(function, 4)
    weight, full = dense.before.weight, torch.ones(2, 45, 51)
    (wanted,) = torch.autograd.grad(dense(image).square().sum(), weight)
    for break_even in (2.0, 0.0):
        sparse = st.sparsify(dense, 16)
        sparse.break_even = break_even
        (grad,) = torch.autograd.grad(sparse(image, full).square().sum(), weight)
        assert_near(grad, wanted)


@torch.no_grad()
def test_padding_that_was_written_to_is_not_read_again(st, image):
    def function(net, x):
        padded = net.pad(x)
        padded[:, 0] = 1.0
        return padded

    sparse = st.sparsify(Net(function, 4), 16)
    with pytest.raises(NotImplementedError, match="__setitem__ wrote in place to a padded"):
        sparse(image, torch.ones(2, 45, 51))


def in_format(function, image, memory_format):
    """Return a network, and an image, of a memory format."""
    net = Net(lambda net, x: function(x).double()[:, :2], 2)
    return net.to(memory_format=memory_format), image.to(memory_format=memory_format)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("part", ["image", "weight", "both"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_may_be_a_copy_is_not_read_once_the_other_was_written_to(st, image, name, part, mode):
    net, moved = in_format(FORMATS[name], image, torch.channels_last)
    net = net.to(memory_format=torch.contiguous_format) if part == "image" else net
    image, sparse = image if part == "weight" else moved, st.sparsify(net, 16)
    for break_even in (2.0, 0.0):
        sparse.break_even = break_even
        with mode(), pytest.raises(NotImplementedError, match="the memory format"):
            sparse(image, torch.ones(2, 45, 51))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", [*FORMATS, *KNOWN_FORMATS, "a shuffle"])
@torch.no_grad()
def test_copies_of_known_formats_are_those_of_the_dense_network(st, image, name, batch):
    function = (FORMATS | KNOWN_FORMATS | MOVED)[name]
    known = [torch.contiguous_format, torch.channels_last]
    for memory_format in known[: 1 + (name in KNOWN_FORMATS and batch > 1)]:
        dense, given = in_format(function, image[:batch], memory_format)
        for break_even in (2.0, 0.0):
            sparse = st.sparsify(dense, 16)
            sparse.break_even = break_even
            for _ in range(3):
                assert_near(sparse(given, torch.ones(batch, 45, 51)), dense(given))


@torch.no_grad()
def test_order_is_unknown_behind_a_norm_of_another_order(st, image):
    net, image = in_format(MOVED["a norm of another order"], image, torch.contiguous_format)
    with pytest.raises(NotImplementedError, match="contiguous"):
        st.sparsify(net, 16)(image, torch.ones(2, 45, 51))


@torch.no_grad()
def test_formats_make_no_copies_where_nothing_is_written(st, image, monkeypatch):
    net, image = in_format(KNOWN_FORMATS["nothing written"], image, torch.channels_last)
    wanted = net(image)
    monkeypatch.setattr(torch, "clone", None)
    assert_near(st.sparsify(net, 16)(image, torch.ones(2, 45, 51)), wanted)


def alone(x):
    """Write to small tensors that no module keeps, by keywords."""
    scale = torch.zeros(4, 1, 1, dtype=x.dtype)
    nn.init.constant_(scale, 2.0)
    F.silu(input=scale, inplace=True)
    pooled = x.mean((2, 3), keepdim=True)
    torch.sigmoid_(input=pooled)
    return x * scale * pooled


NAMED = {
    "a keyword": lambda x: torch.exp_(input=x),
    "a keyword, padded": lambda x: torch.exp_(input=F.pad(x, (1, 1, 1, 1)))[:, :, 1:-1, 1:-1],
    "an initializer": lambda x: nn.init.constant_(x[:, :2], 0.5),
    "small tensors": alone,
}


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("name", NAMED)
@torch.no_grad()
def test_what_is_written_may_be_named(st, image, name, break_even):
    net = Net(lambda net, x: (lambda y: x + y.mean(1, keepdim=True))(NAMED[name](x)), 4).eval()
    sparse = st.sparsify(net, 16)
    sparse.break_even = break_even
    for _ in range(3):
        assert_near(sparse(image, torch.ones(2, *image.shape[2:])), net(image))


@pytest.fixture(scope="module")
def operators():
    """Return operators of a user that write to an argument: the only one, and another one."""
    namespace = "sbnet_cupy_tests_of_writes"

    @torch.library.custom_op(f"{namespace}::triple", mutates_args=("x",))
    def triple(x: torch.Tensor) -> None:
        x.mul_(3)

    @torch.library.custom_op(f"{namespace}::into", mutates_args=("target",))
    def into(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.copy_(2 * x)
        return x + 1

    return triple, into, getattr(torch.ops, namespace).triple


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@torch.no_grad()
def test_operators_write_to_what_their_schema_says(st, image, operators, break_even):
    triple, into, packet = operators

    def function(net, x):
        view, small = x[:, :2], x.mean((2, 3), keepdim=True)
        triple(view)
        triple(small)
        packet(x=x)
        y = into(x * small, target=x)
        out = torch.zeros(x.shape, dtype=x.dtype)
        return torch.cat([x, y, into(x, out), view, out], 1)

    net = Net(function, 18).eval()
    sparse = st.sparsify(net, 16)
    sparse.break_even = break_even
    for _ in range(3):
        assert_near(sparse(image, torch.ones(2, *image.shape[2:])), net(image))
