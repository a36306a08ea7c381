"""PyTorch in place and in its odd states, JAX and TensorFlow while they trace."""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, DTypeError, ShapeError
from support.assertions import assert_same
from support.small_arrays import BLOCKS, COUNT, MASK, ROWS, X


def tensors(torch, *arrays):
    return [torch.from_numpy(a.copy()) for a in arrays]


def test_out_tensors_are_written_in_place(torch):
    x, blocks, count, rows = tensors(torch, X, BLOCKS, COUNT, ROWS)
    out = torch.full((4, 4, 4, 3), 7.0)
    address = out.data_ptr()
    assert sb.sparse_gather(x, count, rows, bsize=4, out=out) is out
    assert out.data_ptr() == address
    expected = sb.sparse_gather(X, COUNT, ROWS, bsize=4)
    assert_same(out, torch.from_numpy(expected))

    scattered = torch.from_numpy(sb.sparse_scatter(BLOCKS, COUNT, ROWS, X, bsize=4))
    fresh = sb.sparse_scatter(blocks, count, rows, x, bsize=4)
    assert_same(fresh, scattered)
    assert_same(x, torch.from_numpy(X.copy()))
    assert fresh.data_ptr() != x.data_ptr()
    assert sb.sparse_scatter(blocks, count, rows, x, bsize=4, out=x) is x
    assert_same(x, scattered)

    (x,) = tensors(torch, X)
    assert sb.sparse_scatter_var(blocks, count, rows, x, bsize=4) is x
    assert_same(x, scattered)


def test_an_out_view_writes_only_its_part(torch):
    x, count, rows = tensors(torch, X, COUNT, ROWS)
    whole = torch.full((8, 4, 4, 3), 7.0)
    sb.sparse_gather(x, count, rows, bsize=4, out=whole[2:6])
    assert (whole[:2] == 7).all() and (whole[6:] == 7).all()
    assert_same(whole[2:6].clone(), sb.sparse_gather(x, count, rows, bsize=4))


def test_a_bfloat16_out_tensor_is_written_in_place(torch):
    x, count, rows = tensors(torch, X, COUNT, ROWS)
    x = x.to(torch.bfloat16)
    out = torch.full((4, 4, 4, 3), 7, dtype=torch.bfloat16)
    assert sb.sparse_gather(x, count, rows, bsize=4, out=out) is out
    assert_same(out, sb.sparse_gather(x, count, rows, bsize=4))


@pytest.mark.parametrize("position", ["blocks", "x"])
@pytest.mark.parametrize("function", ["sparse_scatter", "sparse_scatter_var"])
def test_a_tensor_that_requires_grad_is_sent_to_the_adapter(torch, position, function):
    blocks, count, rows, x = tensors(torch, BLOCKS, COUNT, ROWS, X)
    {"blocks": blocks, "x": x}[position].requires_grad_()
    with pytest.raises(DTypeError, match=rf"^{position} requires grad.*sbnet_cupy\.torch"):
        getattr(sb, function)(blocks, count, rows, x, bsize=4)
    assert_same(x.detach(), torch.from_numpy(X.copy()))


def test_every_other_function_refuses_grad_too(torch):
    x, mask, count, rows = tensors(torch, X, MASK, COUNT, ROWS)
    w = torch.ones(3, 3, 3, 2)
    table, params = (count, rows), sb.calc_block_params((8, 8), 6, 3)
    grad = lambda t: t.clone().requires_grad_()  # noqa: E731
    unit = sb.BottleneckWeights.random(3, 4, xp=np)._map_arrays(torch.from_numpy)
    for argument, call in [
        ("mask", lambda: sb.reduce_mask(grad(mask), (2, 2), bsize=4)),
        ("x", lambda: sb.sparse_gather(grad(x), *table, bsize=4)),
        ("scale", lambda: sb.sparse_gather(x, *table, bsize=4, scale=grad(torch.ones(3)))),
        ("w", lambda: sb.conv2d(x, grad(w))),
        ("w", lambda: sb.sparse_conv2d(x, torch.nn.Parameter(w), table, params)),
        ("base", lambda: sb.sparse_conv2d(x, w, table, params, base=grad(x[..., :2]))),
        ("x", lambda: sb.mask_conv2d(grad(x), w, mask, (1, 1), "SAME")),
        ("weights", lambda: sb.sparse_res_block_bottleneck(
            x, unit._map_arrays(grad), table, params)),
    ]:  # fmt: skip
        with pytest.raises(DTypeError, match=rf"^{argument}\b.*sbnet_cupy\.torch"):
            call()


def test_a_detached_tensor_and_inference_mode_are_taken(torch):
    x, count, rows = tensors(torch, X, COUNT, ROWS)
    expected = sb.sparse_gather(x, count, rows, bsize=4)
    assert_same(sb.sparse_gather(x.requires_grad_().detach(), count, rows, bsize=4), expected)
    with torch.inference_mode():
        assert_same(sb.sparse_gather(x.detach().clone(), count, rows, bsize=4), expected)


def test_strided_tensors_are_refused(torch):
    x, count, rows = tensors(torch, X, COUNT, ROWS)
    odd = [
        x.transpose(1, 2),
        x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last),
        x[:, ::2],
        x[:, :, :, :1].expand(-1, -1, -1, 3),
    ]
    for value in odd:
        with pytest.raises(ShapeError, match=r"^x must be C-contiguous.*contiguous\(\)"):
            sb.sparse_gather(value, count, rows, bsize=2)
    assert sb.sparse_gather(odd[0].contiguous(), count, rows, bsize=2).shape == (4, 2, 2, 3)


def test_lazy_conjugates_and_negatives_are_refused(torch):
    count, rows = tensors(torch, COUNT, ROWS)
    x = torch.complex(torch.from_numpy(X.copy()), torch.from_numpy(X.copy()))
    assert x.conj().is_conj() and x.conj().imag.is_neg()
    with pytest.raises(DTypeError, match=r"^x .*resolve_conj"):
        sb.sparse_gather(x.conj(), count, rows, bsize=4)
    with pytest.raises((DTypeError, ShapeError), match=r"^x "):
        sb.sparse_gather(x.conj().imag, count, rows, bsize=4)


def test_other_layouts_devices_and_dtypes_are_refused(torch):
    x, count, rows = tensors(torch, X, COUNT, ROWS)
    with pytest.raises(DTypeError, match=r"^x .*sparse"):
        sb.sparse_gather(x.to_sparse(), count, rows, bsize=4)
    meta = [t.to("meta") for t in (x, count, rows)]
    with pytest.raises(DeviceError, match="meta"):
        sb.sparse_gather(*meta, bsize=4)
    with pytest.raises(DeviceError, match=r"x is torch on meta.*active_block_indices is torch on"):
        sb.sparse_gather(meta[0], count, rows, bsize=4)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "complex32", "uint16"])
def test_a_dtype_that_numpy_lacks_is_refused_or_copied(torch, name):
    count, rows = tensors(torch, COUNT, ROWS)
    x = torch.zeros((2, 8, 8, 3), dtype=getattr(torch, name))
    try:
        blocks = sb.sparse_gather(x, count, rows, bsize=4)
    except DTypeError as error:
        assert str(error).startswith("x ") and name in str(error)
    else:
        assert blocks.dtype == x.dtype


def calls(make):
    """Each op as a function of one array."""
    table = make(COUNT), make(ROWS)
    return {
        "mask": lambda m: sb.reduce_mask(m[..., 0], (2, 2), bsize=4, capacity=8).bin_counts,
        "x": lambda x: sb.sparse_gather(x, *table, bsize=4),
        "blocks": lambda x: sb.sparse_scatter(x, *table, make(X), bsize=4),
    }


@pytest.mark.parametrize("argument", ["mask", "x", "blocks"])
@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_a_traced_array_is_sent_to_the_jax_adapter(jax, argument, transform):
    function = calls(jax.numpy.asarray)[argument]
    if transform == "grad":
        traced = jax.grad(lambda x: function(x).sum())
    else:
        traced = getattr(jax, transform)(function)
    value = np.stack([X, X]) if transform == "vmap" else BLOCKS if argument == "blocks" else X
    with pytest.raises(DTypeError, match=rf"^{argument} is traced.*sbnet_cupy\.jax"):
        traced(jax.numpy.asarray(value))


def test_everything_traced_at_once(jax):
    with pytest.raises(DTypeError, match=r"traced.*sbnet_cupy\.jax"):
        jax.jit(lambda *a: sb.sparse_gather(*a, bsize=4))(X, COUNT, ROWS)


@pytest.mark.parametrize("argument", ["mask", "x", "blocks"])
def test_a_symbolic_tensor_is_sent_to_the_tensorflow_adapter(tf, argument):
    function = calls(tf.constant)[argument]
    with pytest.raises(DTypeError, match=rf"{argument} .*sbnet_cupy\.tensorflow"):
        tf.function(function, autograph=False)(tf.constant(BLOCKS if argument == "blocks" else X))


def test_a_tensorflow_variable_is_refused_or_read(tf):
    variable = tf.Variable(X)
    table = tf.constant(COUNT), tf.constant(ROWS)
    with pytest.raises(DTypeError, match=r"^x .*value\(\)"):
        sb.sparse_gather(variable, *table, bsize=4)
    y = sb.sparse_gather(variable.value(), *table, bsize=4)
    assert_same(y, tf.constant(sb.sparse_gather(X, COUNT, ROWS, bsize=4)))


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_work_follows_the_stream_of_torch(torch, require, side):
    """The input is late on the caller's stream: read on any other, it would still be zeros."""
    require("gpu")
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    x = torch.zeros(2, 512, 512, 64, device="cuda")
    count, rows = (t.cuda() for t in tensors(torch, COUNT, ROWS))
    slow = torch.rand(4096, 4096, device="cuda")
    for value in range(1, 11):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(5):
                slow = torch.tanh(slow @ slow)
            x.fill_(value)
            blocks = sb.sparse_gather(x, count, rows, bsize=32)
            y = sb.sparse_scatter(blocks, count, rows, x, bsize=32, add=True)
            total, doubled = blocks.sum().item(), (y == 2 * value).sum().item()
        assert total == value * 3 * 32 * 32 * 64 and doubled == 3 * 32 * 32 * 64
