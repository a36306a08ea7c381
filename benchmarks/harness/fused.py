"""What the benchmarks of the fused ops share: arrays, checks, and the order of their cases.

Cases of one stage and dtype follow one another: the dense convolution first, then a case for each
mask. They share their arrays, which all contenders rotate alike, and the exact result.
"""

import concurrent.futures
from functools import cache, partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.cases import KERNEL
from benchmarks.harness.check import WrongResult
from benchmarks.harness.exact import norm
from benchmarks.harness.fused_cases import MOST_SETS
from benchmarks.harness.inputs import filled_sets, find_blocks
from benchmarks.harness.machine import cpu_cores
from benchmarks.harness.rows import DENSE, GATHER, GIVEN, OURS, WITH_MASK
from benchmarks.harness.session import Work
from benchmarks.harness.timing import Contender
from sbnet_cupy.core import libraries


class Problem:
    """Arrays of one stage and dtype: sets of images, of results, and the weights.

    ``layer`` is made from the session and the case, and knows the op: ``call``, ``gather``,
    ``exact`` and ``dense``.
    """

    def __init__(self, session, case, layer, sets=None):
        self.session, self.xp = session, session.xp
        sets = sets or MOST_SETS
        self.images = filled_sets(session, sets, case.shape, case.array_dtype)
        if case.array_dtype == np.float32:
            self.images *= np.float32(0.7310586)  # no longer exact in TF32
        self.results = self.xp.empty_like(self.images)
        self.layer = layer(session, case)
        self.arithmetic = case.arithmetic
        self.exact = cache(self._exact)

    def _exact(self, winograd):
        return self.layer.exact(self.images[0], self.arithmetic._replace(winograd=winograd))

    def ours(self, blocks):
        """Return a call for each set: the op at the blocks that are given."""
        run = partial(self.layer.call, blocks=blocks, active=blocks.active)
        return [partial(run, x, out=y) for x, y in self.sets()]

    def ours_with_mask(self, blocks):
        """Return a call for each set: list the blocks, then the op."""
        grid, bcount = blocks.scatter_grid, blocks.params.bcount
        capacity = blocks.mask.shape[0] * bcount[0] * bcount[1]

        def run(x, y):
            active = sb.reduce_mask(blocks.mask, bcount, capacity=capacity, **grid)
            return active, self.layer.call(x, blocks=blocks, active=active, out=y)

        return [partial(run, x, y) for x, y in self.sets()]

    def gathered(self, blocks):
        """Return a call for each set: the layer through a stack of blocks."""
        return [partial(self.layer.gather, x, blocks=blocks, out=y) for x, y in self.sets()]

    def sets(self):
        """Return pairs of an image and the result that belongs to it."""
        return list(zip(self.images, self.results, strict=True))

    def check(self, blocks, contender):
        """Run the first call on a result full of NaN, and compare the active pixels.

        No pixel of a result that is given may change outside the active blocks; the route through
        a stack writes those as well.
        """
        result = self.results[0]
        result.view(np.uint8).fill(255)  # NaN in every dtype
        contender.calls[0]()
        self.compare(blocks)
        if contender.name == OURS:
            untouched = (result.view(np.uint8) == 255).all(axis=-1)
            spoilt = int((~untouched & ~active_pixels(blocks, result.shape, self.xp)).sum())
            if spoilt:
                raise WrongResult(f"{spoilt} pixels outside the active blocks were written")

    def compare(self, blocks):
        """Compare the active pixels of the first result."""
        self.session.synchronize()
        result = self.results[0]
        active = active_pixels(blocks, result.shape, self.xp)
        compare_within(result, self.exact(False), active, self.xp)

    def check_dense(self, contender):
        """Compare all pixels of another library's result: a tensor [N, K, H, W]."""
        found = as_array(self.session, contender.calls[0]().permute(0, 2, 3, 1))
        everywhere = self.xp.ones(found.shape[:3], bool)
        compare_within(found, self.exact(True), everywhere, self.xp)


_LATEST = {}  # the problem whose cases are running


def problem_of(session, case, layer):
    """Return the arrays of a case; cases of the same stage and dtype share them."""
    key = session, layer, case.shared
    if key not in _LATEST:
        _LATEST.clear()
        _LATEST[key] = Problem(session, case, layer)
    return _LATEST[key]


def fused_works(case, session, layer):
    """Yield (density, active blocks, workload) of a case."""
    problem = problem_of(session, case, layer)
    if case.mask == DENSE:
        if session.torch is None:
            session.warnings.append(f"{case.op}: no PyTorch for this device, so no dense time")
            return
        with _torch_settings(session.torch, case.dtype == "tf32"):
            contenders = problem.layer.dense(problem.images)
            work = Work(DENSE, None, contenders, problem.check_dense, dense=True)
            bcount = sb.calc_block_params(case.shape, case.bsize, KERNEL).bcount
            yield 1.0, case.shape[0] * bcount[0] * bcount[1], work
        return
    blocks = find_blocks(case, session, halo=False)
    check, note = partial(problem.check, blocks), problem.layer.note
    contenders = [Contender(OURS, problem.ours(blocks), note=note)]
    if case.peers:
        contenders.append(Contender(GATHER, problem.gathered(blocks), note=note))
    yield blocks.density, blocks.count, Work(GIVEN, None, contenders, check)
    if case.suite != "density":
        contenders = [Contender(OURS, problem.ours_with_mask(blocks), note=note)]
        yield blocks.density, blocks.count, Work(WITH_MASK, None, contenders, check)


def compile_kernels(session, cases, layer):
    """Run the op once for every case, stages and dtypes at the same time: that compiles kernels.

    What fails here fails again in its own case, which says so.
    """
    groups = {}
    for case in cases:
        if case.mask != DENSE:
            groups.setdefault(case.shared, []).append(case)
    with concurrent.futures.ThreadPoolExecutor(cpu_cores()) as pool:
        concurrent.futures.wait(
            [pool.submit(_run_once, session, group, layer) for group in groups.values()]
        )
    session.release()


def _run_once(session, cases, layer):
    session.xp.cuda.Device().use()
    x = session.xp.zeros(cases[0].shape, cases[0].array_dtype)
    y = session.xp.empty_like(x)
    made = layer(session, cases[0])
    for case in cases:
        blocks = find_blocks(case, session, halo=False)
        made.call(x, blocks=blocks, active=blocks.active, out=y)


class _torch_settings:
    """The fastest algorithms of cuDNN, with TF32 or without, while a workload runs."""

    def __init__(self, torch, tf32):
        self.cudnn, self.matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        self.wanted = True, tf32, tf32

    def __enter__(self):
        before = self.cudnn.benchmark, self.cudnn.allow_tf32, self.matmul.allow_tf32
        self._set(*self.wanted)
        self.before = before

    def __exit__(self, *_):
        self._set(*self.before)

    def _set(self, benchmark, cudnn_tf32, matmul_tf32):
        self.cudnn.benchmark = benchmark
        self.cudnn.allow_tf32, self.matmul.allow_tf32 = cudnn_tf32, matmul_tf32


def active_pixels(blocks, shape, xp):
    """Return bool [N, H, W]: the pixels of the active blocks."""
    (rows, columns), (height, width) = blocks.params.bcount, blocks.params.bsize_out
    active = np.zeros((shape[0], rows, columns), bool)
    active[tuple(blocks.indices.T)] = True
    pixels = active.repeat(height, axis=1).repeat(width, axis=2)
    return xp.asarray(pixels[:, : shape[1], : shape[2]])


def compare_within(found, expected, where, xp):
    """Raise WrongResult unless values, or pixels, lie within their bounds where a mask is set."""
    if found.shape != expected.value.shape:
        raise WrongResult(f"{found.shape} is not {expected.value.shape}")
    off = found.astype(np.float64) - expected.value
    of_pixels = expected.error.shape != off.shape
    off = norm(off, xp) if of_pixels else xp.abs(off)
    wrong = ~(off <= expected.error) & where[..., None]
    count = int(wrong.sum())
    if count:
        first = tuple(int(axis[0]) for axis in wrong.nonzero())
        raise WrongResult(
            f"{count} of {int(where.sum()) * off.shape[-1]} {'pixels' if of_pixels else 'values'} "
            f"are out of bounds; the first is at {first}: off by {float(off[first]):.3g}, and "
            f"{float(expected.error[first]):.3g} is allowed"
        )


def as_tensor(session, array):
    """View an array as a tensor; bfloat16 crosses as its bits."""
    torch = session.torch
    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_array(session, tensor):
    """View a tensor as an array, once the device is done with it."""
    tensor = tensor.contiguous()
    if tensor.dtype == session.torch.bfloat16:
        bits = session.native(tensor.view(session.torch.int16))
        return bits.view(libraries.bfloat16("dtype"))
    return session.native(tensor)
