"""What torch.jit.trace and make_fx, which know no sites and no counts, may record."""

import pytest

import sbnet_cupy as sb

torch = pytest.importorskip("torch")

make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx

from support.torch_cases import draw, grid  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace", "ignore::torch.jit.TracerWarning"
)
ROWS = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 5, 5]])
TRACERS = [torch.jit.trace, lambda f, x: make_fx(f)(x)]


def of_rows(st, w):
    """Return functions that find sites in their argument, and arguments."""
    from sbnet_cupy.torch import scn

    features, image = draw(torch, 3, 3), torch.ones(1, 4, 4, 3)
    layer = scn.InputLayer(2, 8)

    def convolved(x):
        return st.submanifold_conv(x, w).features

    return {
        "sparse_tensor": (
            lambda rows: convolved(st.sparse_tensor(features, rows, spatial_shape=8)), ROWS
        ),
        "coordinate_map": (lambda rows: st.coordinate_map(rows, spatial_shape=8)[1], ROWS),
        "dense_to_sparse": (lambda image: convolved(st.dense_to_sparse(image)), image),
        "mask": (lambda mask: convolved(st.dense_to_sparse(image, mask=mask)), image[..., 0]),
        "voxelize": (
            lambda points: st.voxelize(points, ranges=[(0, 8)] * 2, voxel_size=1)[1],
            ROWS[:, 1:].float(),
        ),
        "scn": (lambda rows: convolved(layer([rows, features]).sparse), ROWS[:, 1:]),
    }  # fmt: skip


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize(
    "name", ["sparse_tensor", "coordinate_map", "dense_to_sparse", "mask", "voxelize", "scn"]
)
def test_no_trace_is_made_that_holds_for_one_list_of_sites(st, tracer, name):
    function, given = of_rows(st, draw(torch, 3, 3, 3, 4))[name]
    function(given)
    with pytest.raises(RuntimeError, match=r"those of this call would be constants; use torch\.co"):
        tracer(function, given)


def of_listed_rows(st, w):
    """Return functions of rows that are the sites of a CoordinateMap made by hand."""
    features, count = draw(torch, 3, 3), torch.tensor([3], dtype=torch.int32)

    def x(rows):
        return sb.SparseTensor(features, sb.CoordinateMap(rows, count, (8, 8), 1))

    return {
        "submanifold_conv": lambda rows: st.submanifold_conv(x(rows), w).features,
        "strided_conv": lambda rows: st.strided_conv(x(rows), w, stride=2).features,
        "kernel_map": lambda rows: st.kernel_map(x(rows).coordinates, 3, stride=2).rows,
        "sparse_max_pool": lambda rows: st.sparse_max_pool(x(rows), 2).features,
        "global_pool": lambda rows: st.global_pool(x(rows)),
        "sparse_to_dense": lambda rows: st.sparse_to_dense(x(rows)),
        "valid": lambda rows: x(rows).coordinates.valid(),
        "select": lambda rows: x(rows).coordinates.select(rows[:, 1] > 1)[0].indices,
    }


LISTED = ["submanifold_conv", "strided_conv", "kernel_map", "sparse_max_pool", "global_pool",
          "sparse_to_dense", "valid", "select"]  # fmt: skip


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", LISTED)
def test_no_trace_is_made_of_sites_that_are_traced_themselves(st, tracer, name):
    function, rows = of_listed_rows(st, draw(torch, 3, 3, 3, 4))[name], ROWS.int()
    function(rows)
    with pytest.raises((RuntimeError, sb.DTypeError), match=r"would be (constants|a constant)"):
        tracer(function, rows)


@pytest.mark.parametrize("name", LISTED)
def test_sites_without_memory_are_refused(st, name):
    function = of_listed_rows(st, draw(torch, 3, 3, 3, 4))[name]
    with pytest.raises(sb.DTypeError, match=r"has none, as inside of torch\.func\.functionalize"):
        torch.func.functionalize(function)(ROWS.int())
    function, given = of_rows(st, draw(torch, 3, 3, 3, 4))["dense_to_sparse"]
    with pytest.raises(sb.DTypeError, match=r"has none, as inside of torch\.func\.functionalize"):
        torch.func.functionalize(function)(given)


@pytest.mark.parametrize("tracer", [*TRACERS, lambda f, x: torch.func.functionalize(f)(x)])
def test_functions_of_arrays_refuse_tensors_that_are_traced(st, tracer):
    mask = torch.ones(1, 8, 8)
    active = st.reduce_mask(mask, (2, 2), bsize=4)
    for name, function, given in (
        ("x", lambda x: sb.sparse_gather(x, *active, bsize=4), mask[..., None]),
        ("mask", lambda mask: sb.reduce_mask(mask, (2, 2), bsize=4, capacity=4)[1], mask),
        ("mask", lambda mask: sb.block_table(mask, 4, capacity=4).grid, mask),
        ("active", lambda x: sb.ActiveBlocks(active[0], x, (1, 2, 2)).to_dense(), active[1]),
    ):
        function(given)
        with pytest.raises(sb.DTypeError, match=rf"^{name} (is traced by torch|must have memory)"):
            tracer(function, given)


@pytest.mark.parametrize("tracer", TRACERS)
def test_convolutions_at_sites_that_were_found_before_are_traced(st, tracer):
    x, w = st.sparse_tensor(draw(torch, 3, 3), ROWS, spatial_shape=8), draw(torch, 3, 3, 3, 4)
    v = draw(torch, 2, 2, 4, 5)

    def function(features):
        y = st.submanifold_conv(x.replace(features), w, activation="relu")
        return st.strided_conv(y, v, stride=2).features

    other = draw(torch, 3, 3, seed=1)
    expected = function(other)
    torch.testing.assert_close(tracer(function, x.features)(other), expected)


def test_traced_layers_of_blocks_name_torch_export(st):
    conv = st.nn.SparseConv2d(3, 8, 3, padding=1, block_size=10, capacity=1.0)
    unit = st.nn.SparseBottleneck(3, 2, 3, block_size=10).eval()
    x, mask, w = draw(torch, 1, 3, 16, 16), torch.ones(1, 16, 16), draw(torch, 3, 3, 3, 8)
    last, params = x.permute(0, 2, 3, 1).contiguous(), sb.calc_block_params((16, 16), 10, 3)
    active = st.reduce_mask(mask, params.bcount, **grid(params))
    for function, *given in (
        (conv, x, mask),
        (unit, x, mask),
        (lambda x, mask: st.sparse_conv2d(x, w, mask, bsize=8), last, mask),
        (lambda x: st.sparse_conv2d(x, w, active, params), last),
        (lambda x, mask: st.mask_conv2d(x, w, mask), last, mask),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace, .* use torch\.export\.export"):
            torch.jit.trace(function, tuple(given))
    exported = torch.export.export(conv, (x, mask)).module()
    torch.testing.assert_close(exported(x, mask), conv(x, mask))
    pads = {"padding": ((1, 1), (1, 1))}
    traced = torch.jit.trace(lambda x: st.sparse_conv2d(x, w, active, params, **pads), last)
    torch.testing.assert_close(traced(2 * last), st.sparse_conv2d(2 * last, w, active, params))
