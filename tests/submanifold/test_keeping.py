"""What coordinate maps and kernel maps keep, in and out of the capture of a CUDA graph."""

import contextlib

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.submanifold import keeping_container
from sbnet_cupy.submanifold.keeping_container import kept_or_made, mark_capture
from support.assertions import assert_same


class Made:
    """Counts what is made, in captures that are stand-ins for those that a stream records."""

    def __init__(self, monkeypatch, own=0):
        self.kept, self.count, self.patch = {}, 0, monkeypatch
        mark_capture(self.kept, own)

    def __call__(self, capture):
        """Ask for it in a capture; return the number of the one that comes."""

        def make():
            self.count += 1
            return self.count

        self.patch.setattr(keeping_container, "capture_of", lambda like: capture)
        return kept_or_made(self.kept, ("key", 3), None, make)


def test_what_was_made_before_a_capture_serves_in_it(monkeypatch):
    made = Made(monkeypatch)
    assert [made(0), made(0), made(7), made(0)] == [1, 1, 1, 1]


def test_what_a_capture_makes_is_for_that_capture(monkeypatch):
    """A graph computes it when it runs, which may never be."""
    made = Made(monkeypatch)
    assert [made(7), made(7), made(8), made(0), made(0), made(9)] == [1, 1, 2, 3, 3, 3]


def test_what_a_capture_makes_of_its_own_serves_afterwards_too(monkeypatch):
    made = Made(monkeypatch, own=7)
    assert [made(7), made(0), made(8)] == [1, 1, 1]


def test_what_comes_of_a_graphs_results_is_not_kept(monkeypatch):
    """The next run of the graph may change them."""
    made = Made(monkeypatch, own=7)
    assert [made(0), made(0)] == [1, 2]


def test_what_ended_captures_made_is_dropped(monkeypatch):
    made = Made(monkeypatch)
    for capture in range(1, 6):
        assert made(capture) == capture
        assert len(made.kept) == 1
    assert [made(0), made(6)] == [6, 6]
    assert made.kept == {("key", 3): 6}


@pytest.mark.parametrize("own, capture, kept", [(0, 7, True), (7, 7, True), (0, 0, False)])
def test_what_a_capture_makes_stays_the_graphs_memory(monkeypatch, own, capture, kept):
    """Nothing may keep it once the next capture begins, but the graph may run again."""
    held = []

    @contextlib.contextmanager
    def memory_of_graphs(like):
        held.append(like)
        yield

    monkeypatch.setattr(keeping_container, "memory_of_graphs", memory_of_graphs)
    monkeypatch.setattr(keeping_container, "capture_of", lambda like: capture)
    like, container = np.zeros(1), {}
    mark_capture(container, own)
    assert kept_or_made(container, "key", like, lambda: 3) == 3
    assert held == ([like] if kept else [])


def test_a_map_is_found_again_however_its_options_are_spelled():
    sites, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 1, 2]]), spatial_shape=(4, 4))
    first = sb.kernel_map(sites, 3, onto=sites)
    again = sb.kernel_map(sites, (3, 3), dilation=(1, 1), onto=sites)
    listed = sb.kernel_map(sites, [3, np.int64(3)], onto=sites)
    assert first.rows is again.rows is listed.rows is sb.kernel_map(sites, 3, onto=sites).rows
    assert sb.kernel_map(sites, 3, onto=None).rows is not first.rows


def test_arrays_with_the_bytes_of_a_number_are_not_the_same_call():
    sites, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 2, 3]]), spatial_shape=8)
    assert sb.kernel_map(sites, 3, stride=2, padding=np.int64(1)).target.spatial_shape == (4, 4)
    with pytest.raises(sb.ShapeError, match=r"^padding must be"):
        sb.kernel_map(sites, 3, stride=2, padding=np.array([1, 0], np.int32))


def test_sites_that_were_changed_in_place_and_cleared_are_found_anew():
    first, second = np.array([[0, 1, 1], [0, 1, 2]]), np.array([[0, 1, 1], [0, 5, 5]])
    sites, other = (sb.coordinate_map(rows, spatial_shape=8)[0] for rows in (first, second))
    sb.kernel_map(sites, 3, onto=sites)
    sites.indices[...] = other.indices
    sites.clear()
    expected = sb.kernel_map(other, 3, onto=other).rows
    np.testing.assert_array_equal(sb.kernel_map(sites, 3, onto=sites).rows, expected)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_maps_onto_sites_that_were_cleared_are_found_anew(library):
    """Also those that other sites keep, and those that made the sites."""
    module, array = sb, np.array
    if library == "torch":
        array = pytest.importorskip("torch").tensor
        module = pytest.importorskip("sbnet_cupy.torch")
    x, _ = module.coordinate_map(array([[0, 0], [0, 6]]), spatial_shape=8)
    y, _ = module.coordinate_map(array([[0, 0], [0, 2]]), spatial_shape=4)

    def read():
        return module.kernel_map(x, 2, stride=2, onto=y).rows.tolist()

    assert read() == [[0, -1], [-1, -1]]
    kept = len(x._kept)
    for _ in range(3):
        y.indices[:] = array([[0, 3], [0, 0]])
        y.clear()
        assert read() == [[1, 0], [-1, -1]]
    assert len(x._kept) == kept  # stale ones are not
    pooled = module.sparse_max_pool(sb.SparseTensor(array([[1.0], [2.0]]), x), 2)
    assert module.sparse_unpool(pooled, onto=x).features.all()
    pooled.indices[:] = 1
    pooled.coordinates.clear()
    with pytest.raises(ValueError, match="there was none"):
        module.sparse_unpool(pooled, onto=x)
    again = module.sparse_max_pool(sb.SparseTensor(array([[1.0], [2.0]]), x), 2)
    assert again.indices.tolist() == [[0, 0], [0, 3]]


def test_equal_options_of_another_type_are_not_the_same_call():
    sites, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 1, 2]]), spatial_shape=(4, 4))
    sb.kernel_map(sites, 3, dilation=1, onto=sites)
    for wrong in (True, 1.0):
        with pytest.raises(sb.ShapeError, match="dilation must be"):
            sb.kernel_map(sites, 3, dilation=wrong, onto=sites)


def in_capture(monkeypatch, number):
    """Let all that is computed from now on be so in a capture of this number, 0 for none."""
    for name in ("coordinate_map", "kernel_map", "keeping_container"):
        monkeypatch.setattr(f"sbnet_cupy.submanifold.{name}.capture_of", lambda array: number)


@pytest.mark.parametrize("makes_sites, convolves, later", [(7, 0, 0), (7, 8, 8), (0, 7, 8)])
def test_what_made_sites_is_known_where_nothing_is_kept(monkeypatch, makes_sites, convolves, later):
    """As for sites that a captured graph computes, which its next run may change."""
    from sbnet_cupy.submanifold import kernel_map as module

    in_capture(monkeypatch, makes_sites)
    sites, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 1, 2]]), spatial_shape=(4, 4))
    x = sb.SparseTensor(np.ones((2, 1)), sites)
    in_capture(monkeypatch, convolves)
    y = sb.strided_conv(x, np.ones((2, 2, 1, 1)), stride=2)
    in_capture(monkeypatch, later)
    if later != convolves:
        sb.strided_conv(x, np.ones((2, 2, 1, 1)), stride=2)
    assert not [key for key in sites._kept if isinstance(key, tuple) and key[0] != "capture"]
    assert module.made_by(sites, (2, 2), y.coordinates).target is y.coordinates
    assert sb.inverse_conv(y, np.ones((2, 2, 1, 1)), onto=x).features.ravel().tolist() == [1, 1]
    with pytest.raises(ValueError, match="kernel size"):
        sb.inverse_conv(y, np.ones((3, 3, 1, 1)), onto=x)


@pytest.mark.parametrize("capture", [0, 7])
def test_a_map_between_given_sites_is_known_in_its_capture(monkeypatch, capture):
    from sbnet_cupy.submanifold import kernel_map as module

    in_capture(monkeypatch, 0)
    fine, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 1, 2]]), spatial_shape=(4, 4))
    coarse, _ = sb.coordinate_map(np.array([[0, 0, 0], [0, 0, 1]]), spatial_shape=(2, 2))
    in_capture(monkeypatch, capture)
    made = sb.kernel_map(fine, 2, stride=2, onto=coarse)
    assert module.made_by(fine, (2, 2), coarse).rows is made.rows
    assert sb.kernel_map(fine, 2, stride=2, onto=coarse).rows is made.rows
    in_capture(monkeypatch, 8)  # which the map is not of, unless it was made outside of captures
    if capture:
        with pytest.raises(ValueError, match="there was none"):
            module.made_by(fine, (2, 2), coarse)
    else:
        assert module.made_by(fine, (2, 2), coarse).rows is made.rows


@pytest.mark.parametrize("make", ["coordinate_map", "raster", "select", "plain"])
def test_all_sites_know_the_capture_that_made_them(make, monkeypatch):
    sites, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 1, 2]]), spatial_shape=(4, 4))
    monkeypatch.setattr("sbnet_cupy.submanifold.coordinate_map.capture_of", lambda array: 7)
    if make in ("coordinate_map", "raster"):
        order = "raster" if make == "raster" else "leaf"
        made, _ = sb.coordinate_map(sites.indices, spatial_shape=(4, 4), order=order)
    elif make == "select":
        made, _ = sites.select(np.array([True, False]))
    else:
        made = sb.CoordinateMap(sites.indices, sites.count, (4, 4), 1)
    assert made._kept["capture"] == 7 and "capture" not in sites._kept


def test_transposed_maps_share_what_they_keep():
    sites, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 1, 2]]), spatial_shape=(4, 4))
    down = sb.kernel_map(sites, 2, stride=2)
    back = down.transposed()
    assert back.rows is down.transposed().rows
    assert back.transposed().rows is down.rows


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda a: np.repeat(a, 2, 1)[:, ::2]])
def test_features_that_are_not_contiguous_stay_on_the_coordinates_that_they_came_with(layout):
    """The features are copied for a call, and the coordinates are not."""
    rows = np.array([[0, 1], [0, 2], [0, 5]])
    x = sb.sparse_tensor(np.arange(6.0).reshape(3, 2), rows, spatial_shape=8)
    odd = x.replace(layout(x.features))
    same, two = np.ones((3, 2, 2)), np.ones((2, 2, 2))
    assert sb.submanifold_conv(odd, same).coordinates is x.coordinates
    y = sb.submanifold_conv(x, same, residual=odd)
    assert_same(y.features, sb.submanifold_conv(x, same, residual=x).features)
    back = sb.inverse_conv(sb.strided_conv(odd, two, stride=2), two, onto=x)
    assert_same(
        back.features, sb.inverse_conv(sb.strided_conv(x, two, stride=2), two, onto=x).features
    )
    assert sb.sparse_unpool(sb.sparse_max_pool(odd, 2), onto=odd).coordinates is x.coordinates


def test_rows_that_are_not_contiguous_are_copied_once():
    """As those that ``argwhere`` returns: a call finds the sites of another call again."""
    rows = np.asfortranarray(np.array([[0, 1], [0, 2], [0, 5]], np.int32))
    sites = sb.CoordinateMap(rows, np.array([3], np.int32), (8,), 1)
    x, two = sb.SparseTensor(np.arange(6.0).reshape(3, 2), sites), np.ones((2, 2, 2))
    assert sb.kernel_map(sites, 3, onto=sites).rows is sb.kernel_map(x, 3, onto=x).rows
    back = sb.inverse_conv(sb.strided_conv(x, two, stride=2), two, onto=x, residual=x)
    assert sb.submanifold_conv(x, np.ones((3, 2, 2)), residual=back).features.shape == (3, 2)
    rows[0, 1] = 0
    sites.clear()
    assert sb.kernel_map(sites, 3, onto=sites).rows.tolist() == [[-1] * 3, [0, 1, 2], [-1] * 3]
