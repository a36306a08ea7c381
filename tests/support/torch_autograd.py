"""Steps of training, second derivatives, and a function with a gradient of its own."""

import copy

import pytest

from support.networks import assert_near

torch = pytest.importorskip("torch")
tree_leaves = torch.utils._pytree.tree_leaves


class Double(torch.autograd.Function):
    """Twice its argument, by a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        """Double."""
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        """Double."""
        return grad * 2


def train_step(model, x, *mask, call=None, function=torch.square):
    """Return results, gradients of the image and of all parameters, and the buffers.

    The loss is the sum of a function of the results; ``call`` is what is called, if not the model.
    """
    x = x.clone().requires_grad_()
    results = tree_leaves((call or model)(x, *mask))
    results = [leaf for leaf in results if leaf.is_floating_point()]
    sum(function(leaf).sum() for leaf in results).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = dict(enumerate(leaf.detach() for leaf in results))
    return found | {"x": x.grad} | gradients | dict(model.named_buffers())


def assert_near_steps(actual, expected):
    """Compare what two steps return; gradients are sums over pixels, too."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(actual[name], value, terms=1 << 17)


def first_and_second(call, weights, x):
    """Return a result, and the derivatives of its sines and of their squares."""
    y, given = call(x), [x, *weights]
    first = torch.autograd.grad(y.sin().sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), given)
    return [t.detach() for t in (y, *first, *second)]


def check_second_derivatives(st, dense, image, block, capacity=None):
    """Compare a network on full masks with the dense one: result and derivatives."""
    sparse = st.sparsify(copy.deepcopy(dense), block, capacity=capacity)
    sparse.break_even = 2.0
    full = torch.ones(len(image), *image.shape[2:])
    found = [
        first_and_second(call, list(model.parameters()), image.clone().requires_grad_())
        for call, model in ((lambda x: sparse(x, full), sparse), (dense, dense))
    ]
    for actual, expected in zip(*found, strict=True):
        assert_near(actual, expected, terms=1 << 20)
