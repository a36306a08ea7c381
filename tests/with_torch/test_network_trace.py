"""The work of functions of whole images, as PyTorch counts it."""

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
