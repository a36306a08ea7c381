"""Whole images by torch.compile: tune compiles them, and their numbers are those of the stack."""

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional

SIZE, BLOCK = (61, 84), 16


def image(n=2, size=SIZE, seed=7):
    """Return random images."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, *size, dtype=torch.float64, generator=generator)


class Backend:
    """A backend of torch.compile that counts what it compiles, and how often that runs."""

    def __init__(self):
        self.compiled = self.ran = 0

    def __call__(self, graph, inputs):
        """Compile."""
        self.compiled += 1

        def run(*args):
            self.ran += 1
            return graph.forward(*args)

        return run

    def steps(self):
        """Return (graphs compiled, runs) since the last time."""
        steps = self.compiled, self.ran
        self.compiled = self.ran = 0
        return steps


@pytest.fixture
def tuned(st, monkeypatch):
    """Return a function that makes a network whose whole images are compiled, and its backend.

    It finds that compiled images are faster at every share.
    """
    from sbnet_cupy.torch.network import tuning

    def times(runs):
        for run in runs.values():
            run()
        return {name: 0.1 if name == "compiled" else 1.0 for name in runs}

    monkeypatch.setattr(tuning, "_times_on_cpu", times)

    def make(dense, x=None, **options):
        sparse, backend = st.sparsify(dense, BLOCK, **options), Backend()
        assert sparse.tune(image() if x is None else x, compile={"backend": backend}) == {
            "dense": 1.0, "compiled": 0.1, **dict.fromkeys(tuning.SHARES, 1.0)
        }  # fmt: skip
        assert 0 < sparse.break_even < 0.1
        sparse.break_even = 0.0
        assert backend.steps() == (1, 2)
        return sparse, backend

    return make


def small():
    """Return a network of few layers."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return networks.random_statistics(dense).double().eval()


@pytest.mark.parametrize("name", networks.FAMILIES)
@torch.no_grad()
def test_it_has_the_numbers_of_the_stack(tuned, name):
    """The dense network's on a full mask, the oracle's on any other; for new weights as well."""
    dense = networks.network(name).double()
    x = image(size=(64, 84) if name == "csp" else SIZE)
    sparse, backend = tuned(dense, x)
    on, mask = networks.blocks((2, *x.shape[2:]), BLOCK, 0.5)
    for _ in range(2):
        assert_near(sparse(x, torch.ones_like(mask)), dense(x))
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))
        assert backend.steps() == (0, 2)
        for parameter in dense.parameters():
            parameter.mul_(1.25)
    assert sparse.sparse_layers and set(sparse.computed().values()) == {1.0}


def _fused_step(dense):
    """Change weights as PyTorch's fused optimizers do: no version tells."""
    for parameter in dense.parameters():
        parameter.detach().view(-1).data.mul_(2)


CHANGES = {
    "in place": (lambda dense: dense[0].weight.mul_(2), 0),
    "memory": (lambda dense: setattr(dense[0].weight, "data", dense[0].weight * 2), 0),
    "parameter": (lambda dense: setattr(dense[0], "bias", nn.Parameter(dense[0].bias * 2)), 0),
    "buffer": (lambda dense: dense[1].running_var.add_(1), 0),
    "state": (lambda dense: dense.load_state_dict({k: v + 1 for k, v in dense.state_dict().items()})
              , 0),
    "attribute": (lambda dense: setattr(dense[0], "dilation", (2, 2)), 1),
    "added": (lambda dense: dense.append(nn.Sigmoid()), 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
@torch.no_grad()
def test_changes_are_seen(tuned, kind):
    """New numbers are not compiled again, new layers are."""
    dense, x = small(), image()
    sparse, backend = tuned(dense)
    change, compilations = CHANGES[kind]
    before = sparse(x, torch.ones(2, *SIZE))
    backend.steps()
    change(dense)
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    after = sparse(x, mask)
    assert backend.steps() == (compilations, 1) and not torch.equal(before, after)
    sparse._compiled = None
    assert_near(after, sparse(x, mask))


@torch.no_grad()
def test_weights_that_no_version_tells_of_are_seen_after_training(tuned):
    dense, x, full = small(), image(), torch.ones(2, *SIZE)
    sparse, backend = tuned(dense)
    sparse.train()
    _fused_step(dense)
    sparse.eval()
    assert_near(sparse(x, full), dense(x))
    with torch.enable_grad():
        sparse(x, full)  # not compiled: gradients are recorded
    _fused_step(dense)
    assert_near(sparse(x, full), dense(x))
    assert backend.steps() == (0, 2)


@torch.no_grad()
def test_which_calls_are_compiled(tuned):
    dense, full = small(), torch.ones(2, *SIZE)
    x = image()
    sparse, backend = tuned(dense)
    for call in (
        lambda: sparse(x[:1], full[:1]),
        lambda: sparse(x.to(memory_format=torch.channels_last), full),
        lambda: sparse(x, full, outside=torch.ones(2, 4, *SIZE, dtype=torch.float64)),
        lambda: torch.enable_grad()(sparse)(x, full),
    ):
        call()
    assert backend.steps() == (0, 1)  # that with another outside
    sparse.break_even = 2.0
    sparse(x, full)
    for twin in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        twin.break_even = 0.0
        assert_near(twin(x, full), dense(x))
    assert backend.steps() == (0, 0)


@torch.no_grad()
def test_a_network_that_can_no_longer_be_compiled_runs_uncompiled(tuned):
    dense, x = small(), image()
    sparse, backend = tuned(dense)
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    hook = dense[0].register_forward_hook(lambda module, args, y: y * 2)
    with pytest.warns(RuntimeWarning, match="with hooks.*; its whole images run uncompiled"):
        found = sparse(x, mask)
    expected = networks.oracle(dense, x, on, BLOCK)
    assert_near(found, expected)
    assert_near(sparse(x, mask), expected)  # and warns once
    assert backend.steps() == (0, 0)
    hook.remove()
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))
    assert backend.steps() == (0, 1)


@torch.no_grad()
def test_blocks_of_another_size_are_seen(tuned):
    dense, x = small(), image()
    sparse, backend = tuned(dense)
    mask = torch.zeros(2, *SIZE)
    mask[0, 20:23, 30:33] = 1
    for block in (32, 8, BLOCK):
        sparse.block_size = block
        on = F.max_pool2d(mask[:, None], block, ceil_mode=True)[:, 0] > 0
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, block))
    assert backend.steps() == (3, 3)


@torch.no_grad()
def test_a_mode_that_looks_on_does_not_end_it(tuned):
    """As the one does that finds out, ahead of a capture, whether a network waits."""
    from sbnet_cupy.torch.network.graphs import NoSynchronization

    sparse, backend = tuned(small())
    x, full = image(), torch.ones(2, *SIZE)
    with NoSynchronization():
        watched = sparse(x, full)
    assert backend.steps() == (0, 0)
    assert_near(sparse(x, full), watched)
    assert backend.steps() == (0, 1)


@torch.no_grad()
def test_what_the_result_holds_outside(tuned):
    dense, x = small()[:1].eval(), image()
    sparse, backend = tuned(dense)
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    inside = sparse(x, mask)
    base, bias = torch.randn(2, 4, *SIZE, dtype=torch.float64), dense[0].bias[:, None, None]
    for outside, expected in ((0, 0.0), (2.5, 2.5), ("bias", bias), (base, base)):
        expected = torch.where(mask[:, None], inside, expected)
        assert torch.equal(sparse(x, mask, outside=outside), expected)
    assert backend.steps() == (0, 5)


@torch.no_grad()
def test_what_is_no_image_of_blocks_holds_nothing_outside(tuned):
    dense = nn.Sequential(*small()[:1], nn.Conv2d(4, 4, 3, 3, padding=1).double()).eval()
    sparse, _ = tuned(dense)
    x, (_, mask) = image(), networks.blocks((2, *SIZE), BLOCK, 0.5)
    assert_near(sparse(x, torch.ones_like(mask)), dense(x))
    with pytest.raises(ValueError, match=r"outside must be 0 .* left the stack in conv2d of '1'"):
        sparse(x, mask, outside=9.0)


class Own(nn.Module):
    """A result of a tuple, a dict and what is no tensor; a scale of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 2, 3, padding=1), torch.tensor(3.0).double()

    def forward(self, x):
        """Return an image, a vector and a word."""
        y = self.conv(x) * self.scale
        return y, {"mean": y.mean((2, 3)), "name": "own"}


@torch.no_grad()
def test_results_of_several_parts(tuned):
    dense, x = Own().double().eval(), image()
    sparse, _ = tuned(dense)
    (y, more), (image_, expected) = sparse(x, torch.ones(2, *SIZE)), dense(x)
    assert_near([y, more["mean"]], [image_, expected["mean"]])
    assert more["name"] == "own"


def hooked():
    """Return a network with a hook."""
    dense = small()
    dense[0].register_forward_hook(lambda module, args, out: out * 2)
    return dense


class Reading(nn.Module):
    """A network that asks for a number on the host."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        """Scale by a number of the image."""
        y = self.conv(x)
        return y * (1 + y.sum().item() ** 2)


class Counting(nn.Module):
    """A network that counts its calls."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """Convolve, and count."""
        self.calls += 1
        return self.conv(x)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (hooked, "with hooks"),
        (Reading, "cannot be compiled, RuntimeError"),
        (Counting, "changes its attributes"),
    ],
)
@torch.no_grad()
def test_what_is_not_compiled_says_so(st, make, why):
    dense, x, full = make().double().eval(), image(), torch.ones(2, *SIZE)
    sparse = st.sparsify(dense, BLOCK)
    with pytest.warns(RuntimeWarning, match=why):
        times = sparse.tune(x, compile={"backend": Backend()})
    assert "compiled" not in times
    sparse.break_even = 0.0
    assert_near(sparse(x, full), dense(x))


def test_bad_options(st):
    sparse = st.sparsify(small(), BLOCK)
    for compile in ("always", None, 3, np.ones(2)):
        with pytest.raises(ValueError, match="compile must be"):
            sparse.tune(image(), compile=compile)
    assert "compiled" not in sparse.tune(image(), compile=False)


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_it_is_compiled_and_replayed(st):
    if not torch.cuda.is_available():
        pytest.skip("needs gpu")
    dense = networks.network("resnet_basic").cuda().half()
    x = image().cuda().half().to(memory_format=torch.channels_last)
    sparse = st.sparsify(dense, BLOCK, capacity=1.0)
    times = sparse.tune(x)
    assert times["compiled"] > 0 and sparse._compiled is not None
    sparse.break_even = 0.5
    bound = 2 * 20 * torch.finfo(torch.float16).eps
    for factor in (1.0, 0.5):
        for parameter in dense.parameters():
            parameter.mul_(factor)
        wide = copy.deepcopy(dense).double()
        for seed in range(5):
            on, mask = (t.cuda() for t in networks.blocks((2, *SIZE), BLOCK, 0.4, seed))
            expected = networks.oracle(wide, x.double(), on, BLOCK)
            for _ in range(3):
                y = sparse(x, mask).double()
                assert (y - expected).norm() <= bound * (expected.norm() + 1)
    assert sparse._replays.kept


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.no_grad()
def test_no_trace_is_made_that_holds_for_one_mask(st, on):
    """Make_fx and torch.jit.trace would keep the number of blocks, and results on a GPU."""
    if on == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs gpu")
    sparse = st.sparsify(small().to(on, torch.float16 if on == "cuda" else None), BLOCK)
    x = image().to(sparse.model[0].weight)
    mask = torch.ones(2, *SIZE, dtype=torch.bool, device=on)
    for sparse.capacity in (None, 1.0):
        for trace in (lambda: make_fx(sparse)(x, mask), lambda: torch.jit.trace(sparse, (x, mask))):
            with pytest.raises(RuntimeError, match="would be a constant"):
                trace()
    assert sparse(x, mask).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("inside", [False, True])
def test_torchscript_is_refused(st, inside):
    sparse = st.sparsify(small(), BLOCK)
    with pytest.raises(RuntimeError, match=r"cannot be scripted by torch.jit.script.* export it"):
        torch.jit.script(nn.Sequential(sparse) if inside else sparse)


@torch.no_grad()
def test_under_torch_compile_the_graph_breaks_at_a_sparsified_network(st):
    """What is around it is compiled, and the result is the same; a full graph is refused."""
    sparse = st.sparsify(small(), BLOCK)
    x, mask = image(), networks.blocks((2, *SIZE), BLOCK, 0.5)[1]

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = sparse

        def forward(self, x, mask):
            """Run it between other functions."""
            return self.inner(x * 2 + 1, mask).relu() - 3

    around, backend = Around(), Backend()
    expected = sparse(x * 2 + 1, mask).relu() - 3
    for model, given in ((around, (x, mask)), (sparse, (x * 2 + 1, mask))):
        compiled = torch.compile(model, backend=backend)
        result = compiled(*given)
        assert_near(result if model is around else result.relu() - 3, expected)
    assert backend.steps() == (2, 2)  # ahead of it and after it
    torch.compiler.reset()
    with pytest.raises(Exception, match="disable"):
        torch.compile(around, backend=backend, fullgraph=True)(x, mask)
