"""Gradients by torch.func: those of torch.autograd, by block and at sites."""

import pytest

import sbnet_cupy as sb
from support.torch_cases import draw, grid, table
from support.torch_site_cases import made, values

OVERLAP = {"bsize": (4, 3), "boffset": (-1, 0), "bstride": (3, 2)}
# vmap computes Jacobians, and says of operators that it calls them row by row.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def check(torch, function, x):
    """Compare gradients, their gradients, and Jacobians with those of torch.autograd."""

    def total(x):
        return function(x).sin().sum()

    def slope(x):
        return torch.func.grad(total)(x).sin().sum()

    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(total(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), leaf)
    close = torch.testing.assert_close
    close(torch.func.grad(total)(x), first.detach())
    close(torch.func.grad(slope)(x), second)

    def few(x):
        return function(x).flatten()[:5]

    close(torch.func.jacrev(few)(x), torch.autograd.functional.jacobian(few, x))
    twice = torch.stack([x, x + 1])
    found = torch.vmap(torch.func.grad(total))(twice)
    close(found, torch.stack([torch.func.grad(total)(one) for one in twice]))
    with torch.no_grad():
        close(function(x), function(leaf).detach())


@pytest.mark.parametrize("name", ["gather", "scatter", "conv"])
def test_blocks(torch, st, name):
    x, listed = draw(torch, 2, 8, 8, 3).double(), table(torch)
    w = draw(torch, 3, 3, 3, 4).double()
    params = sb.calc_block_params((8, 8), 6, 3)
    active = st.reduce_mask((x[..., 0] > 0.5).float(), params.bcount, **grid(params))
    blocks = st.sparse_gather(x, *listed, **OVERLAP)
    function, given = {
        "gather": (lambda x: st.sparse_gather(x, *listed, **OVERLAP, activation="gelu"), x),
        "scatter": (
            lambda b: st.sparse_scatter(b, *listed, x, **OVERLAP, add=True, atomic=True), blocks
        ),
        "conv": (lambda x: st.sparse_conv2d(x, w, active, params, activation="relu"), x),
    }[name]
    check(torch, function, given)


@pytest.mark.parametrize("name", [
    "submanifold", "strided", "transposed", "inverse", "max", "average", "unfold", "global",
    "dense", "tensor",
])  # fmt: skip
def test_sites(torch, st, name):
    x = made(torch, st, shape=(4, 3), spatial_shape=(4, 3), channels=2)
    w = values(torch, 3, 3, 2, 2, seed=1)
    rows = x.indices
    functions = {
        "submanifold": lambda x: st.submanifold_conv(x, w, bias=w[0, 0, 0], activation="relu"),
        "strided": lambda x: st.strided_conv(x, w, stride=2, padding=1, activation="gelu"),
        "transposed": lambda x: st.transposed_conv(x, w, stride=2),
        "inverse": lambda x: st.inverse_conv(st.strided_conv(x, w, stride=2), w, onto=x),
        "max": lambda x: st.sparse_max_pool(x, 2),
        "average": lambda x: st.sparse_avg_pool(x, 2, count="active"),
        "unfold": lambda x: st.sparse_unfold(x.features, st.kernel_map(x, 3, onto=x)),
        "global": lambda x: st.global_pool(x, "max"),
        "dense": lambda x: st.sparse_to_dense(x),
        "tensor": lambda x: st.sparse_tensor(
            x.features, rows // 2, spatial_shape=(2, 2), batch_size=2, mode="mean"),
    }  # fmt: skip

    def function(features):
        y = functions[name](sb.SparseTensor(features, x.coordinates))
        return getattr(y, "features", y)

    check(torch, function, x.features)


def test_weights(torch, st):
    x = made(torch, st, shape=(4, 3), spatial_shape=(4, 3), channels=2)
    w = values(torch, 3, 3, 2, 2, seed=1)
    check(torch, lambda w: st.submanifold_conv(x, w).features, w)


def test_what_sites_keep_outlives_the_transform(torch, st):
    """It is made of plain tensors, which later calls find."""
    x = made(torch, st)
    w, found = values(torch, 2, 2, 4, 4), []

    def total(features):
        y = st.strided_conv(x.replace(features), w, stride=2)
        found.append(y.coordinates)
        return st.inverse_conv(y, w, onto=x).features.sum()

    first = torch.func.grad(total)(x.features)
    kept = [*found[0]._arrays(), found[0]._kept["valid"]]
    assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, kept))
    leaf = x.features.clone().requires_grad_()
    total(leaf).backward()
    assert torch.equal(leaf.grad, first) and found[1] is found[0]


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_network_is_mapped_with_one_mask(torch, st, break_even, recorded):
    """Over weights, over statistics alone and over images, as ensembles and TTA do."""
    from support import networks

    size, block = (64, 96), 16
    nets = [networks.network("shuffle", seed=seed).double() for seed in (0, 1)]
    sparse = st.sparsify(nets[0], block)
    sparse.break_even = break_even
    _, mask = networks.blocks((2, *size), block, 0.4)
    x = networks.image(size=size)
    weights, buffers = torch.func.stack_module_state(nets)

    def call(state, x):
        state = {f"model.{name}": t for name, t in state.items()}
        return torch.func.functional_call(sparse, state, (x, mask))

    with torch.set_grad_enabled(recorded):
        for state in ({**weights, **buffers}, buffers):
            each = [call({name: t[i] for name, t in state.items()}, x) for i in (0, 1)]
            found = torch.vmap(lambda state: call(state, x))(state)
            networks.assert_near(found.detach(), torch.stack(each).detach())
        found = torch.vmap(lambda x: sparse(x, mask))(torch.stack([x, 2 * x]))
        each = torch.stack([sparse(x, mask), sparse(2 * x, mask)])
        networks.assert_near(found.detach(), each.detach())


def test_gradients_of_each_image_by_a_network(torch, st):
    from support import networks

    size, block = (48, 64), 16
    dense = networks.network("unet").double()
    sparse, x = st.sparsify(dense, block), networks.image(size=size)
    sparse.break_even = 2.0
    _, mask = networks.blocks((1, *size), block, 0.4)
    weights = {name: p.detach() for name, p in sparse.named_parameters()}

    def loss(weights, x, mask):
        return torch.func.functional_call(sparse, weights, (x[None], mask)).square().sum()

    gradient = torch.func.grad(loss)
    found = torch.vmap(gradient, in_dims=(None, 0, None))(weights, x, mask)
    each = [gradient(weights, one, mask) for one in x]
    for name, grads in found.items():
        exact = torch.stack([one[name] for one in each])
        networks.assert_near(grads, exact, terms=1 << 17)
    with pytest.raises(NotImplementedError, match="mask must not be mapped"):
        torch.vmap(gradient, in_dims=(None, 0, 0))(weights, x, mask[None].expand(2, -1, -1, -1))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_networks_that_reduce_images_are_transformed(torch, st, break_even):
    """Sums of several images have gradients and forward-mode derivatives, of mapped numbers too."""
    from support import networks

    nn, F = torch.nn, torch.nn.functional

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)

        def forward(self, x):
            y = torch.tanh(self.norm(self.conv(x)))
            return y * F.adaptive_avg_pool2d(y, 1)

    size, block = (32, 48), 16
    sparse, x = st.sparsify(Net().double(), block), networks.image(size=size)
    sparse.break_even = break_even
    _, mask = networks.blocks((2, *size), block, 0.4)
    direction = x.flip(0)

    def loss(x):
        return sparse(x, mask).square().sum()

    def along(t):
        return loss(x + t * direction)

    leaf, zero = x.clone().requires_grad_(), torch.zeros((), dtype=x.dtype)
    (exact,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    slope = (exact * direction).sum()
    (twice,) = torch.autograd.grad(slope, leaf)
    gradient = torch.func.grad(loss)
    torch.testing.assert_close(gradient(x), exact)
    torch.testing.assert_close(torch.func.jvp(gradient, (x,), (direction,))[1], twice)
    torch.testing.assert_close(torch.func.jacfwd(along)(zero), slope)
    curved = torch.func.hessian(along)(zero)
    torch.testing.assert_close(curved, (twice * direction).sum())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("where", ["blocks", "sites"])
def test_hessians_are_jacobians_of_jacobians(torch, st, where):
    if where == "sites":
        sites, w = made(torch, st, shape=(4, 3), spatial_shape=(4, 3)), values(torch, 3, 3, 2, 2)
        x = sites.features[:, :2].contiguous()

        def total(x):
            return st.submanifold_conv(sites.replace(x), w).features.pow(3).sum()
    else:
        x, w, mask = draw(torch, 1, 4, 4, 2).double(), values(torch, 3, 3, 2, 2), torch.eye(4)[None]

        def total(x):
            return st.sparse_conv2d(x, w.double(), mask, bsize=2).pow(3).sum()

    found = torch.func.jacrev(torch.func.jacrev(total))(x)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(total, x))
    with pytest.raises(NotImplementedError, match=r"no forward-mode .* use torch\.func\.jacrev"):
        torch.func.hessian(total)(x)


@pytest.mark.parametrize("layer", ["conv", "unit"])
def test_masks_of_several_counts_are_mapped(torch, st, layer):
    """Each has as many active blocks as it has, and room for all."""
    if layer == "conv":
        net = st.nn.SparseConv2d(4, 4, 3, padding=1, block_size=6).double()
    else:
        net = st.nn.SparseBottleneck(4, 2, 4, block_size=6).double().eval()
    x, masks = draw(torch, 3, 2, 4, 9, 8).double(), torch.zeros(3, 2, 9, 8, dtype=torch.bool)
    masks[0, 1, 2, 3] = masks[2] = True

    def gradient(x, mask):
        return torch.func.grad(lambda x: net(x, mask).sin().sum())(x)

    for function in (net, gradient):
        found = torch.vmap(function)(x, masks)
        for one, image, mask in zip(found, x, masks, strict=True):
            torch.testing.assert_close(one, function(image, mask))
    listed = torch.vmap(lambda mask: tuple(st.reduce_mask(mask, (2, 2), bsize=6)))(masks)
    assert listed[0].ravel().tolist() == [1, 0, 8] and listed[1].shape == (3, 8, 3)
