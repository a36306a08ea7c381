"""What a call of sbnet_cupy.torch costs the calling thread on a GPU.

The image is small, so that the GPU keeps up; the device is idle when a batch of calls begins.
"""

from functools import partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.block_sparse.bench_fused_bottleneck import Bottleneck
from benchmarks.harness.cases import KERNEL, ORIGINAL, Case
from benchmarks.harness.check import check_gather, check_indices, check_scatter, compare
from benchmarks.harness.exact import residual_unit
from benchmarks.harness.fused import active_pixels, as_tensor, compare_within
from benchmarks.harness.fused_cases import STAGES, stage_case
from benchmarks.harness.inputs import filled_sets, find_blocks, to_host
from benchmarks.harness.rows import OURS
from benchmarks.harness.session import Work
from benchmarks.harness.timing import Contender

OP = "torch_host_cost"
UNIT = "sparse_res_block_bottleneck"
CHANNELS = 8  # of the convolution, in and out: the device must keep up with the calls


def cases(session):
    """Return what is measured: on a CPU, where a call is its work, or without torch, nothing."""
    if session.cpu or not session.torch:
        return []
    shape, block, mask, _ = ORIGINAL[5]
    return [
        Case(op, "torch host", shape, "float32", (block, block), mask, 0.1)
        for op in ("reduce_mask", "sparse_gather", "sparse_scatter", "sparse_conv2d")
    ] + [
        stage_case(op, STAGES[-1], "float16", "torch host", mask, 0.1)
        for op in (UNIT, "SparseConv2d", "SparseBottleneck")
    ]


def works(case, session):
    """Yield (density, active blocks, workload) for each way to call the op of a case."""
    import sbnet_cupy.torch as st

    blocks = find_blocks(case, session)
    x = filled_sets(session, 1, case.shape, np.dtype(case.dtype))[0]
    session.synchronize()
    if case.op == UNIT:
        contender, check = _unit(session, st, blocks, x, case)
        yield blocks.density, blocks.count, Work("new result", None, [contender], check)
        return
    if case.op in ("SparseConv2d", "SparseBottleneck"):
        for variant, contender, check in _modules(session, st, blocks, x, case):
            yield blocks.density, blocks.count, Work(variant, None, [contender], check)
        return
    make = {
        "reduce_mask": _reduce_mask,
        "sparse_gather": _gather,
        "sparse_scatter": _scatter,
        "sparse_conv2d": _conv2d,
    }[case.op]
    for variant, contenders, check in make(session, st, blocks, x):
        yield blocks.density, blocks.count, Work(variant, None, contenders, check)


def _host(name, call):
    return Contender(name, [call], "host")


def _tensors(session, *arrays):
    return map(session.torch.from_dlpack, arrays)


def _reduce_mask(session, st, blocks, x):
    (mask,) = _tensors(session, blocks.mask)
    call = partial(st.reduce_mask, mask, blocks.params.bcount, **blocks.gather_grid)

    def check(contender):
        found = session.native(contender.calls[0]().active_block_indices)
        check_indices(blocks.mask, to_host(found), blocks.params.bcount, blocks.gather_grid)

    yield "capacity", [_host(OURS, partial(call, capacity=blocks.count))], check
    yield "waits for the count", [_host(OURS, call)], check


def _gather(session, st, blocks, x):
    image, *active = _tensors(session, x, *blocks.active)
    call = partial(st.sparse_gather, image, *active, **blocks.gather_grid)
    learned = partial(
        st.sparse_gather, image.clone().requires_grad_(), *active, **blocks.gather_grid
    )

    def check(contender):
        check_gather(x, session.native(contender.calls[0]().detach()), blocks, {})

    yield "new result", [_host(OURS, call)], check
    yield "out=", [_host(OURS, partial(call, out=call()))], check
    yield "new result, gradient recorded", [_host(OURS, learned)], check
    (eight,) = _tensors(session, session.xp.arange(8))

    def check_columns(contender):
        compare(to_host(session.native(contender.calls[0]())), to_host(x[:, :, :8]))

    other = _host("torch index_select", partial(image.index_select, 2, eight))
    yield "eight columns", [other], check_columns


def _scatter(session, st, blocks, x):
    shape = (*blocks.params.bsize_out, x.shape[3])
    stack = filled_sets(session, blocks.count, shape, x.dtype, seed=50)
    session.synchronize()
    image, values, *active = _tensors(session, x, stack, *blocks.active)
    call = partial(st.sparse_scatter, values, *active, image, **blocks.scatter_grid, out=image)

    def check(contender, **options):
        def run():
            contender.calls[0]()
            session.synchronize()

        check_scatter(x, stack, blocks, options, run)

    yield "in place", [_host(OURS, call)], check
    yield "add, in place", [_host(OURS, partial(call, add=True))], partial(check, add=True)


def _unit(session, st, blocks, x, case):
    weights = Bottleneck(session, case).weights
    image, *active = _tensors(session, x, *blocks.active)
    tensors = weights._map_arrays(partial(as_tensor, session))
    call = partial(st.sparse_res_block_bottleneck, image, tensors, tuple(active), blocks.params)

    def check(contender):
        found = session.native(contender.calls[0]())
        expected = residual_unit(x, weights, case.arithmetic, session.xp)
        shown = active_pixels(blocks, x.shape, session.xp)
        compare_within(found, expected, shown, session.xp)
        compare(to_host(found[~shown]), to_host(x[~shown]))

    return _host(OURS, call), check


def _modules(session, st, blocks, x, case):
    """Yield a module's calls, in evaluation: with a list of blocks, and with a mask."""
    torch, channels = session.torch, x.shape[3]
    image, mask = _tensors(session, x, blocks.mask)
    torch.manual_seed(0)
    if case.op == "SparseConv2d":
        make = partial(st.nn.SparseConv2d, channels, channels, KERNEL, padding=1)
    else:
        make = partial(st.nn.SparseBottleneck, channels, case.middle)
    module = make(block_size=case.bsize, capacity=1.0).to(image.device, image.dtype).eval()
    module.requires_grad_(False)  # torch.no_grad() in each call would be timed, too
    seen = image.permute(0, 3, 1, 2)  # in channels_last memory
    active, params = module.active_blocks(seen, mask)

    def check(contender):
        """A module gives what its function gives; that has a check of its own."""
        expected = _function(st, case, module, image, active, params)
        found = contender.calls[0]().permute(0, 2, 3, 1)
        compare(to_host(session.native(found)), to_host(session.native(expected)))

    yield "list of blocks", _host(OURS, partial(module, seen, active, params)), check
    yield "mask, capacity", _host(OURS, partial(module, seen, mask)), check


def _function(st, case, module, image, active, params):
    """Call the function that a module calls."""
    if case.op == "SparseConv2d":
        options = {"bias": module.bias, "w_format": "OIHW", "padding": ((1, 1), (1, 1))}
        return st.sparse_conv2d(image, module.weight, active, params, **options)
    kernels = [
        conv.weight.permute(2, 3, 1, 0).contiguous()
        for conv in (module.conv1, module.conv2, module.conv3)
    ]
    tables = []
    for norm in (module.bn1, module.bn2, module.bn3):
        scale = (norm.running_var + norm.eps).rsqrt() * norm.weight
        tables += [scale, norm.bias - norm.running_mean * scale]
    weights = sb.BottleneckWeights(*kernels, *tables)
    return st.sparse_res_block_bottleneck(image, weights, active, params)


def _conv2d(session, st, blocks, x):
    x = session.xp.ascontiguousarray(x[..., :CHANNELS])
    w = filled_sets(session, 1, (KERNEL, KERNEL, CHANNELS, CHANNELS), x.dtype, seed=70)[0]
    session.synchronize()
    image, kernel, *active = _tensors(session, x, w, *blocks.active)
    call = partial(st.sparse_conv2d, image, kernel, tuple(active), blocks.params)
    learned = partial(
        st.sparse_conv2d, image, kernel.clone().requires_grad_(), tuple(active), blocks.params
    )

    def check(contender):
        arrays = (to_host(x), to_host(w), tuple(map(to_host, blocks.active)), blocks.params)
        terms = w[..., 0].size  # products of at most 1/4 each
        tolerance = (terms + 2) * float(np.finfo(np.float32).eps) * terms / 4
        found = to_host(session.native(contender.calls[0]().detach()))
        compare(found, sb.sparse_conv2d(*arrays), tolerance)

    yield "new result", [_host(OURS, call)], check
    yield "new result, gradient recorded", [_host(OURS, learned)], check
    dense = partial(
        session.torch.nn.functional.conv2d,
        image.permute(0, 3, 1, 2),
        kernel.permute(3, 2, 0, 1).contiguous(),
        padding="same",
    )

    def check_shape(contender):
        if tuple(contender.calls[0]().shape) != (x.shape[0], CHANNELS, *x.shape[1:3]):
            raise AssertionError("the dense convolution has another shape")

    yield "dense, for comparison", [_host("torch conv2d", dense)], check_shape
