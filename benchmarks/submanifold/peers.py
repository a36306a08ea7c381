"""What else computes at sites: PyTorch by pair lists, spconv where it is installed."""

import numpy as np

from benchmarks.harness.timing import Contender, spread

TORCH = "torch, pair lists"
SPCONV = "spconv"
EXACT_SPCONV = "spconv, sums in float32"  # of float16 numbers, which it adds up in float16 if let
_PROFILED = 20  # calls that the profiler sees together


class Pairs:
    """A submanifold convolution by PyTorch: index_select, a product and index_add for each tap."""

    def __init__(self, torch, features, w, rows, device):
        self.torch = torch
        self.w = torch.from_numpy(w).to(device).flatten(0, -3)
        self.x = torch.from_numpy(features).to(device)
        self.pairs = []
        for read in rows:
            out = np.flatnonzero(read >= 0)
            self.pairs.append([torch.from_numpy(a).to(device) for a in (read[out], out)])

    def call(self):
        """Return the features of the convolution."""
        y = self.x.new_zeros(len(self.x), self.w.shape[-1])
        for (read, out), w in zip(self.pairs, self.w, strict=True):
            y.index_add_(0, out, self.x.index_select(0, read) @ w)
        return y

    def contender(self):
        """Return it as a contender of the clocks."""
        note = "pair lists made beforehand"
        return Contender(TORCH, [self.call], clock="torch", capturable=False, note=note)


def spconv_of(torch, scene, features, w, tf32=False, exact=False):
    """Yield spconv's layers with the same weights: (algorithm, call, step); none without it.

    ``features`` are those of the rows of the scene. A step is the call and the gradients of
    features and weights. ``exact``: sums of float16 numbers are taken in float32. Only its tuner in
    Python heeds that, which has no Native algorithm; the one in C++ takes the fastest kernel. Which
    one it is holds until the next call of this function.
    """
    try:
        import spconv.pytorch as spconv
        from spconv import constants
        from spconv.core import ConvAlgo
        from spconv.pytorch import ops
    except ImportError:
        return
    ops.SPCONV_CPP_GEMM = not exact
    constants.SPCONV_ALLOW_TF32 = tf32
    d, channels = len(scene.spatial_shape), features.shape[1]
    kind = {2: spconv.SubMConv2d, 3: spconv.SubMConv3d}[d]
    x = torch.from_numpy(features).cuda()
    rows = torch.from_numpy(scene.rows).cuda()
    weight = torch.from_numpy(w).cuda().movedim(-1, 0)  # [C_out, *kernel, C_in]
    algorithms = [ConvAlgo.MaskImplicitGemm, ConvAlgo.MaskSplitImplicitGemm]
    for algorithm in algorithms if exact else [ConvAlgo.Native, *algorithms]:
        layer = kind(
            channels, w.shape[-1], 3, bias=False, indice_key="sites", algo=algorithm,
            fp32_accum=True if exact else None,
        ).cuda().to(x.dtype)  # fmt: skip
        with torch.no_grad():
            layer.weight.copy_(weight)
        fresh = spconv.SparseConvTensor(x, rows, list(scene.spatial_shape), 1)
        known = layer(fresh).replace_feature(x)  # carries the map, that of gradients, too

        def call(layer=layer, known=known):
            return layer(known).features

        def step(layer=layer, known=known):
            with torch.enable_grad():
                given = x.detach().requires_grad_()
                y = layer(known.replace_feature(given)).features
                return torch.autograd.grad(y, (given, layer.weight), x)

        yield algorithm.name, call, step


def kernel_time(torch, call):
    """Return the Timing of the kernels of a call, by PyTorch's profiler: no time between them."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(5):
        call()
    samples, on_device = [], torch.autograd.DeviceType.CUDA
    for _ in range(3):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(_PROFILED):
                call()
            torch.cuda.synchronize()
        events = [event for event in found.events() if event.device_type == on_device]
        if not events or len(events) % _PROFILED:
            raise RuntimeError(f"the profiler saw {len(events)} kernels of {_PROFILED} calls")
        samples.append(sum(event.time_range.elapsed_us() for event in events) / _PROFILED)
    return spread(samples, "kernels")


def spconv_maps(torch, scene):
    """Return spconv's maps at distinct sites as (variant, call); none without it."""
    try:
        from spconv.core import ConvAlgo
        from spconv.pytorch import ops
    except ImportError:
        return
    rows, d = torch.from_numpy(scene.rows).cuda(), len(scene.spatial_shape)

    def find(stride, padding, same):
        return ops.get_indice_pairs_implicit_gemm(
            rows, 1, list(scene.spatial_shape), ConvAlgo.MaskImplicitGemm, [3] * d, [stride] * d,
            [padding] * d, [1] * d, [0] * d, subm=same, is_train=False,
        )  # fmt: skip

    yield "same", lambda: find(1, 1, True)
    yield "strided", lambda: find(2, 1, False)
