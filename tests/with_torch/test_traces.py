"""What torch.jit.trace and make_fx, which know no sites and no counts, may record."""

import pytest

torch = pytest.importorskip("torch")

make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx

from support.torch_cases import draw  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace", "ignore::torch.jit.TracerWarning"
)
ROWS = torch.tensor([[0, 1, 1], [0, 1, 2], [0, 5, 5]])


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


@pytest.mark.parametrize("tracer", [torch.jit.trace, lambda f, x: make_fx(f)(x)])
@pytest.mark.parametrize(
    "name", ["sparse_tensor", "coordinate_map", "dense_to_sparse", "mask", "voxelize", "scn"]
)
def test_no_trace_is_made_that_holds_for_one_list_of_sites(st, tracer, name):
    function, given = of_rows(st, draw(torch, 3, 3, 3, 4))[name]
    function(given)
    with pytest.raises(RuntimeError, match=r"those of this call would be constants; use torch\.co"):
        tracer(function, given)


@pytest.mark.parametrize("tracer", [torch.jit.trace, lambda f, x: make_fx(f)(x)])
def test_convolutions_at_sites_that_were_found_before_are_traced(st, tracer):
    x, w = st.sparse_tensor(draw(torch, 3, 3), ROWS, spatial_shape=8), draw(torch, 3, 3, 3, 4)
    v = draw(torch, 2, 2, 4, 5)

    def function(features):
        y = st.submanifold_conv(x.replace(features), w, activation="relu")
        return st.strided_conv(y, v, stride=2).features

    other = draw(torch, 3, 3, seed=1)
    expected = function(other)
    torch.testing.assert_close(tracer(function, x.features)(other), expected)
