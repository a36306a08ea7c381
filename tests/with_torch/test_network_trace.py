"""The work of functions of whole images, as PyTorch counts it."""

import copy

import pytest

torch = pytest.importorskip("torch")
counting = pytest.importorskip("torch.utils.flop_counter")

from support.torch_cases import internal  # noqa: E402

F = torch.nn.functional
trace = internal("network.trace")


def draw(*shape):
    """Return numbers."""
    return torch.ones(shape)


CALLS = {
    "conv1d": (F.conv1d, (draw(2, 4, 9), draw(6, 2, 3)), {"groups": 2, "stride": 2}),
    "conv2d": (F.conv2d, (draw(2, 3, 9, 8), draw(6, 3, 3, 2), draw(6)), {"padding": 1}),
    "conv3d": (F.conv3d, (draw(1, 3, 4, 5, 6), draw(2, 3, 2, 2, 2)), {}),
    "transposed": (F.conv_transpose2d, (draw(2, 3, 5, 6), draw(3, 4, 2, 2)), {"stride": 2}),
    "linear": (F.linear, (draw(2, 7, 5), draw(6, 5)), {"bias": draw(6)}),
    "matmul": (torch.matmul, (draw(2, 3, 4, 5), draw(2, 3, 5, 6)), {}),
    "operator": (torch.Tensor.__matmul__, (draw(4, 5), draw(5, 6)), {}),
    "bmm": (torch.bmm, (draw(2, 4, 5), draw(2, 5, 6)), {}),
    "addmm": (torch.addmm, (draw(6), draw(4, 5), draw(5, 6)), {}),
    "baddbmm": (torch.baddbmm, (draw(2, 4, 6), draw(2, 4, 5), draw(2, 5, 6)), {}),
    "no product": (torch.mul, (draw(4, 5), draw(4, 5)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_work_of_functions(trace, name):
    function, args, kwargs = CALLS[name]
    with counting.FlopCounterMode(display=False) as counter:
        result = function(*args, **kwargs)
    work = trace._work(function.__name__, args, kwargs, result)
    assert work == counter.get_total_flops() and bool(work) == (name != "no product")


def test_work_of_attention(trace):
    """Two products: of queries with keys, and of weights with values; heads may share keys."""
    query, key, value = draw(2, 8, 5, 16), draw(2, 2, 7, 16), draw(2, 2, 7, 12)
    result = draw(2, 8, 5, 12)
    work = trace._work(
        "scaled_dot_product_attention", (query, key, value), {"enable_gqa": True}, result
    )
    assert work == 2 * 2 * 8 * 5 * 7 * 16 + 2 * 2 * 8 * 5 * 7 * 12


@torch.no_grad()
def test_products_that_functions_are_composed_of_are_listed(st):
    """PyTorch shows those of attention and of einsum as one function, whose work is not known."""

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 1)
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            """Mix pixels as tokens."""
            tokens = self.conv(x).flatten(2).transpose(1, 2)
            tokens = self.attention(tokens, tokens, tokens)[0]
            return torch.einsum("blc,bmc->blm", tokens, tokens)

    dense, x = Mixed().eval(), torch.randn(1, 3, 16, 32)
    sparse = st.sparsify(dense, 16)
    sparse.break_even = 2.0
    torch.testing.assert_close(sparse(x, torch.ones(1, 16, 32)), dense(x))
    named = {"": "flatten, einsum", "attention": "multi_head_attention_forward"}
    assert sparse.dense_layers == named


class Chosen(torch.nn.Module):
    """A convolution, and layers that an attribute and arguments choose."""

    def __init__(self, counts=False):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1))
        self.pools, self.counts, self.calls = False, counts, 0

    def forward(self, x, relu=False, by=1.0):
        """Return what was chosen."""
        self.calls += self.counts
        x = self.layers(x) * by
        x = torch.relu(x) if relu else x
        return torch.nn.functional.max_pool2d(x, 2) if self.pools else x


def listed(sparse):
    """Return the functions in the table of a network's last call."""
    return [line.split()[1 if line[0] != " " else 0] for line in sparse.table().splitlines()[1:]]


@pytest.mark.parametrize("how", ["replayed", "called", "trained"])
def test_layers_that_change_are_listed_anew(st, how):
    dense, x, mask = Chosen().eval(), torch.randn(1, 3, 32, 32), torch.ones(1, 32, 32)
    sparse = st.sparsify(dense, 16, replay=how == "replayed")
    changes = [
        lambda: None,
        lambda: dense.layers.append(torch.nn.Sigmoid()),
        lambda: setattr(dense, "pools", True),
        lambda: dense.layers.__setitem__(0, torch.nn.Conv2d(3, 4, 1, groups=1)),
        lambda: delattr(dense.layers, "1"),
    ]
    expected = ["conv2d", "mul"], ["sigmoid"], ["max_pool2d"]
    first, after, last = expected
    results = [first, first[:1] + after + first[1:], first[:1] + after + first[1:] + last]
    results += [results[2], first + last]
    with torch.set_grad_enabled(how == "trained"):
        for change, functions in zip(changes, results, strict=True):
            change()
            for _ in range(3):
                sparse(x, mask)
                assert listed(sparse) == functions


@torch.no_grad()
def test_layers_that_arguments_choose_are_listed(st):
    sparse, x = st.sparsify(Chosen().eval(), 16), torch.randn(1, 3, 32, 32)
    mask = torch.ones(1, 32, 32)
    for _ in range(2):
        sparse(x, mask, True)
        assert listed(sparse) == ["conv2d", "mul", "relu"]
        sparse(x, mask, relu=False)
        assert listed(sparse) == ["conv2d", "mul"]
    for i in range(5):
        sparse(x, mask, by=float(i))
    assert len(sparse._traces.of) == 3  # numbers choose no layers, and are many


@torch.no_grad()
def test_a_network_that_counts_is_traced_once(st, trace, monkeypatch):
    sparse, x = st.sparsify(Chosen(counts=True).eval(), 16), torch.randn(1, 3, 32, 32)
    made, init = [], trace.Trace.__init__
    monkeypatch.setattr(trace.Trace, "__init__", lambda *args: made.append(1) or init(*args))
    for _ in range(4):
        sparse(x, torch.ones(1, 32, 32))
        assert listed(sparse) == ["conv2d", "mul"]
    assert len(made) == 1
    sparse.model = Chosen().eval()
    sparse(x, torch.ones(1, 32, 32))
    assert len(made) == 2


@torch.no_grad()
def test_a_profile_hands_other_arguments_to_the_network(st):
    class Scaled(torch.nn.Conv2d):
        def forward(self, x, by):
            """Return a product."""
            return super().forward(x) * by

    x, mask = torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32)
    mask[0, 3, 3] = 1
    for halo, share in (("zero", "25.0%"), ("exact", "25.0%")):
        sparse = st.sparsify(Scaled(3, 4, 3, padding=1).eval(), 16, halo=halo)
        assert share in sparse.profile(x, mask, 2.0) and share in sparse.profile(x, mask, by=2.0)


@torch.no_grad()
def test_a_profile_takes_what_is_wanted_outside_blocks(st):
    x, mask = torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32)
    mask[0, 3, 3] = 1
    sparse = st.sparsify(torch.nn.Conv2d(3, 4, 3, padding=1).eval(), 16, outside=2.0)
    for outside in (None, 1.0, "bias", torch.randn(1, 4, 32, 32)):
        assert "25.0%" in sparse.profile(x, mask, outside=outside)
    with pytest.raises(ValueError, match="outside must be a number"):
        sparse.profile(x, mask, outside="zero")


def test_a_profile_in_training_is_one_call_for_running_statistics(st):
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    sparse, other = st.sparsify(dense, 16), st.sparsify(copy.deepcopy(dense), 16)
    x, mask = torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32)
    mask[0, 3, 3] = 1
    sparse.profile(x, mask)
    other(x, mask)
    for name, buffer in other.state_dict().items():
        assert torch.equal(sparse.state_dict()[name], buffer), name
