"""The work that PyTorch's FlopCounterMode counts for the operators of the package."""

import pytest

import sbnet_cupy as sb

torch = pytest.importorskip("torch")
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode

from support.torch_cases import bottleneck_weights, draw  # noqa: E402


def counted(function):
    """Return the work of a call, and of its gradients."""
    with FlopCounterMode(display=False) as forward:
        y = function()
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_convolution_of_all_blocks_counts_as_the_dense_one(st, dtype, capacity, activation):
    conv = torch.nn.Conv2d(3, 5, 3, padding=1, dtype=dtype)
    how = {"block_size": 10, "capacity": capacity, "activation": activation}
    sparse = st.nn.SparseConv2d.from_dense(conv, **how)
    x, mask = draw(torch, 2, 3, 16, 16, dtype=dtype).requires_grad_(), torch.ones(2, 16, 16)
    work = counted(lambda: conv(x))
    assert counted(lambda: sparse(x, mask)) == work
    mask[:] = 0
    mask[1, 3, 3] = 1
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sparse(x, mask)
    assert counter.get_total_flops() == work[0] // 8


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("project", [False, True])
def test_a_residual_unit_counts_its_products(st, based, project):
    x = draw(torch, 1, 16, 16, 4)
    weights = sb.BottleneckWeights(*bottleneck_weights(torch, 4, 2, 4))
    mask = torch.zeros(1, 16, 16)
    mask[0, 3, 3] = 1
    params = st.calc_block_params_res_block((16, 16), 10, (1, 3, 1))
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    active = st.reduce_mask(mask, params.bcount, **grid)
    how = {"base": x if based else None}
    how["w_project"] = draw(torch, 1, 1, 4, 4) if project else None
    with FlopCounterMode(display=False) as counter:
        st.sparse_res_block_bottleneck(x, weights, active, params, **how)
    products = 100 * 4 * 2 + 64 * (9 * 2 * 2 + 2 * 4)
    products += project * (64 if based else 256) * 4 * 4
    assert counter.get_total_flops() == 2 * products


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_at_sites_count_pairs(st, groups):
    rows = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 4, 4], [1, 4, 4]])
    x = st.sparse_tensor(draw(torch, 4, 4), rows, spatial_shape=8, capacity=6)
    x.features.requires_grad_()
    w = draw(torch, 3, 3, 4 // groups, 6).requires_grad_()
    pair = 2 * 4 * 6 // groups
    work = counted(lambda: st.submanifold_conv(x, w, groups=groups).features)
    assert work == (6 * pair, 12 * pair)
    w = draw(torch, 2, 2, 4 // groups, 6).requires_grad_()
    back = draw(torch, 2, 2, 6 // groups, 4).requires_grad_()

    def there_and_back():
        y = st.strided_conv(x, w, stride=2, groups=groups)
        return st.inverse_conv(y, back, onto=x, groups=groups).features

    assert counted(there_and_back) == (8 * pair, 16 * pair)


def test_what_cannot_be_read_counts_as_the_most_there_may_be(st):
    x, w, mask = draw(torch, 1, 16, 16, 3), draw(torch, 3, 3, 3, 5), torch.zeros(1, 16, 16)
    features, rows = draw(torch, 7, 3), torch.full((9, 7), -1, dtype=torch.int32)
    options = [3, 3], 7, 1, None, None
    with torch._subclasses.FakeTensorMode() as mode:
        x, w, mask, features, rows = map(mode.from_tensor, (x, w, mask, features, rows))
        with FlopCounterMode(display=False) as counter:
            st.sparse_conv2d(x, w, mask, bsize=10, capacity=3)
        assert counter.get_total_flops() == 2 * 3 * 100 * 9 * 3 * 5
        with FlopCounterMode(display=False) as counter:
            torch.ops.sbnet_cupy.site_conv(features, rows, None, w, None, None, None, *options)
        assert counter.get_total_flops() == 2 * 9 * 7 * 3 * 5
