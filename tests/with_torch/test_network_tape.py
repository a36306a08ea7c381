"""Calls that run from a tape on a CPU: with which results, and until when."""

import collections
import copy
import dataclasses
import datetime
import functools
import itertools
import logging
import math
import pickle
import random
import re
import threading
import types
import warnings
import weakref
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import sbnet_cupy  # noqa: E402
from support import networks  # noqa: E402  (needs PyTorch)
from support.exhaustive import all_but  # noqa: E402
from support.network_tapes import BLOCK, SIZE, Using, image, masks, same, small, taped  # noqa: E402
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional

USUAL = ("unet", "mobilenet", "densenet", "preactivation", "convnext")


@pytest.mark.parametrize("name", all_but(sorted(networks.FAMILIES), USUAL))
@pytest.mark.parametrize("break_even", [2.0, 0.0])
@torch.no_grad()
def test_a_tape_has_the_bits_of_a_call(st, name, break_even):
    """Whatever the mask and the image, on the stack and on whole images."""
    dense, some = networks.network(name), masks(0.4, 0.7, 0.2, 0.0, 1.0)
    x = image() if name != "csp" else F.pad(image(), (0, 0, 0, 3))
    if name == "csp":
        some = [F.pad(mask, (0, 0, 0, 3)) for mask in some]
    sparse, plain = (st.sparsify(dense, BLOCK, replay=how) for how in ("auto", False))
    sparse.break_even = plain.break_even = break_even
    for seed in range(2):
        for mask in (*some, *some):
            given = x + seed
            assert same(sparse(given, mask), plain(given.clone(), mask))
            assert sparse.computed() == plain.computed()
    assert not plain._tapes.kept and not sparse._tapes.unfit
    assert len(sparse._tapes.kept) == 2


@torch.no_grad()
def test_a_tape_gives_what_the_oracle_does(st):
    x, dense = image(dtype=torch.float64), networks.network("unet").double()
    sparse = taped(st, dense, x, masks(0.4)[0])
    for seed in range(3):
        on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5, seed)
        x = image(seed, dtype=torch.float64)
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))


def _new_state(dense):
    other = small()
    other[0].weight.data *= 2
    dense.load_state_dict(other.state_dict())


CHANGES = {
    "in place": lambda dense: dense[0].weight.mul_(2),
    "memory": lambda dense: setattr(dense[0].weight, "data", dense[0].weight * 2),
    "parameter": lambda dense: setattr(dense[0], "weight", nn.Parameter(dense[0].weight * 2)),
    "state": _new_state,
    "buffer": lambda dense: dense[1].running_var.add_(1),
    "module": lambda dense: dense.__setitem__(0, nn.Conv2d(3, 4, 3, padding=1)),
    "added": lambda dense: dense.append(nn.Sigmoid()),
    "attribute": lambda dense: setattr(dense[1], "eps", 0.1),
}


@pytest.mark.parametrize("kind", CHANGES)
@torch.no_grad()
def test_a_change_of_the_network_shows(st, kind):
    dense, x, mask = small(), image(), masks(0.4)[0]
    sparse = taped(st, dense, x, mask)
    before = sparse(x, mask)
    CHANGES[kind](dense)
    expected = st.sparsify(dense, BLOCK, replay=False)(x, mask)
    for _ in range(4):
        assert same(sparse(x, mask), expected)
    assert sparse._tapes.kept and not torch.equal(before, expected)


@pytest.mark.parametrize("halo", ["zero", "exact"])
@torch.no_grad()
def test_another_network_shows(st, halo):
    """``sparse.model`` may be bound anew, to one that looks further, for example."""
    (mask,) = masks(0.2)
    sparse = taped(st, small(), image(), mask, halo=halo)
    sparse.model = nn.Sequential(small(), nn.Conv2d(4, 2, 5, padding=2)).eval()
    expected = st.sparsify(sparse.model, BLOCK, halo=halo, replay=False)(image(), mask)
    for _ in range(3):
        assert same(sparse(image(), mask), expected)


@dataclasses.dataclass(slots=True)
class Slotted:
    """A factor."""

    by: int


class Scale:
    """A product with a factor."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return self.by * x

    def times(self, x):
        """Return the product."""
        return self.by * x


KEPT = {
    "a list": ([2.0], lambda kept: kept.__setitem__(0, 3.0), lambda kept: kept[0]),
    "a dict": ({"by": 2}, lambda kept: kept.update(by=3), lambda kept: kept["by"]),
    "a list in a dict": (
        {"by": [[2.0]]}, lambda kept: kept["by"][0].append(3.0), lambda kept: sum(kept["by"][0]),
    ),
    "a list in a tuple": (
        ([2.0],), lambda kept: kept[0].__setitem__(0, 3.0), lambda kept: kept[0][0],
    ),
    "a set": ({2}, lambda kept: kept.add(3), len),
    "an object": (
        types.SimpleNamespace(by=2), lambda kept: setattr(kept, "by", 3), lambda kept: kept.by,
    ),
    "an object with slots": (
        Slotted(2), lambda kept: setattr(kept, "by", 3), lambda kept: kept.by,
    ),
    "an object that is called": (
        Scale(2), lambda kept: setattr(kept, "by", 3), lambda kept: kept(1),
    ),
    "a queue": (
        collections.deque([2]), lambda kept: kept.append(3), lambda kept: kept[-1],
    ),
    "a kind of dict": (
        collections.Counter(by=2), lambda kept: kept.update(by=3), lambda kept: kept["by"],
    ),
    "an array": (
        np.array([2.0]), lambda kept: kept.__setitem__(0, 3.0), lambda kept: float(kept[0]),
    ),
    "an array's shape": (
        np.ones((2, 3)), lambda kept: kept.resize((3, 2), refcheck=False), lambda kept: len(kept),
    ),
    "an array of lists": (
        np.array([[2.0], None], object), lambda kept: kept[0].append(3.0), lambda kept: sum(kept[0])
    ),
    "a method": (
        Scale(2).times, lambda kept: setattr(kept.__self__, "by", 3), lambda kept: kept(1),
    ),
    "a method of a list": (
        [2.0].count, lambda kept: kept.__self__.append(2.0), lambda kept: kept(2.0),
    ),
    "a function with arguments": (
        functools.partial(math.fsum, [2.0]), lambda kept: kept.args[0].append(3.0),
        lambda kept: kept(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
@torch.no_grad()
def test_numbers_that_a_module_keeps_show(st, kind):
    kept, change, read = KEPT[kind]
    dense, x, mask = Using(lambda self, y: y * read(self.kept)).eval(), image(), masks(0.4)[0]
    dense.kept = copy.deepcopy(kept)
    sparse, plain = taped(st, dense, x, mask), st.sparsify(dense, BLOCK, replay=False)
    before = sparse(x, mask)
    change(dense.kept)
    for _ in range(4):
        assert same(sparse(x, mask), plain(x, mask))
    assert sparse._tapes.kept and not torch.equal(before, sparse(x, mask))


def new_class():
    """Return the class of a module, with a number, a list and an object."""

    class Config:
        by, more = 2.0, {"by": [2.0]}

    class Scaled(nn.Module):
        by, items, config, kind = 2.0, [2.0], Config(), Config

        def __init__(self):
            super().__init__()
            self.inner, self.kept = small(), Config()

        def forward(self, x):
            factors = self.by, self.items[0], self.config.by, self.kept.by, self.kind.more["by"][0]
            return self.inner(x) * math.prod(factors)

    class Derived(Scaled):
        pass

    return Derived


# Changes of classes: that of the network, its base, and that of an object which it keeps.
CLASSES = {
    "a number": lambda derived, base, config: setattr(derived, "by", 5.0),
    "a number of a base": lambda derived, base, config: setattr(base, "by", 5.0),
    "a list": lambda derived, base, config: base.items.__setitem__(0, 5.0),
    "an object": lambda derived, base, config: setattr(base.config, "by", 5.0),
    "another object": lambda derived, base, config: setattr(base, "config", Scale(5.0)),
    "the class of an object": lambda derived, base, config: setattr(config, "by", 5.0),
    "in the class of an object": lambda derived, base, config: config.more["by"].insert(0, 5.0),
    "a function": lambda derived, base, config: setattr(
        base, "forward", lambda self, x: self.inner(x)
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CLASSES)
@torch.no_grad()
def test_changes_of_classes_show(st, change):
    derived = new_class()
    dense, x, mask = derived().eval(), image(), masks(0.4)[0]
    sparse, plain = taped(st, dense, x, mask), st.sparsify(dense, BLOCK, replay=False)
    before = sparse(x, mask)
    assert sparse._tapes.kept
    CLASSES[change](derived, derived.__base__, derived.kind)
    for _ in range(4):
        assert same(sparse(x, mask), plain(x, mask))
    assert sparse._tapes.kept and not torch.equal(before, sparse(x, mask))


@torch.no_grad()
def test_what_else_a_class_keeps_hinders_no_tape(st):
    """Libraries keep in classes what cannot be looked into, and much."""
    derived = new_class()
    derived.__base__.kept = {"lock": threading.local(), "all": [[i] for i in range(9000)]}
    dense, x, mask = derived().eval(), image(), masks(0.4)[0]
    assert taped(st, dense, x, mask)._tapes.kept


@torch.no_grad()
def test_classes_that_count_calls_have_no_tapes(st):
    derived = new_class()

    def forward(self, x):
        type(self).by += 1
        return self.inner(x) * self.by

    derived.forward = forward
    dense, x, mask = derived().eval(), image(), masks(0.4)[0]
    sparse, plain = st.sparsify(dense, BLOCK), st.sparsify(dense.inner, BLOCK, replay=False)
    for i in range(3, 9):
        assert same(sparse(x, mask), plain(x, mask) * i)


@torch.no_grad()
def test_variables_of_a_function_that_is_kept_show(st):
    by = 2.0
    dense, x, mask = Using(lambda self, y: self.kept(y)).eval(), image(), masks(0.4)[0]
    dense.kept = lambda y: y * by
    sparse, plain = taped(st, dense, x, mask), st.sparsify(dense, BLOCK, replay=False)
    assert sparse._tapes.kept
    by = 3.0
    for _ in range(4):
        assert same(sparse(x, mask), plain(x, mask))
    assert sparse._tapes.kept


MUCH = {
    "a list": lambda: [list(range(5000))],
    "an array": lambda: [np.zeros(1 << 24)],
    "an array of objects": lambda: np.zeros(5000, object),
}


@pytest.mark.parametrize("kind", MUCH)
@torch.no_grad()
def test_a_network_that_keeps_much_has_no_tape(st, kind):
    """To look through all of it at each call would take longer than a tape saves."""
    dense, x, mask = small(), image(), masks(0.4)[0]
    dense.kept = MUCH[kind]()
    sparse = st.sparsify(dense, BLOCK)
    expected = st.sparsify(dense, BLOCK, replay=False)(x, mask)
    assert all(same(sparse(x, mask), expected) for _ in range(3)) and not sparse._tapes.kept
    assert sum(map(len, sparse._tapes.state.items)) < 2  # no copy of it, and nothing to compare
    dense.kept = None
    for _ in range(2):
        assert same(sparse(x, mask), expected)
    assert sparse._tapes.kept


class Hiding(itertools.count):
    """An object with numbers in a base that Python does not see into."""

    def next(self):
        """Return the next number."""
        return next(self)


def _next_byte(kept):
    kept[0] += 1
    return kept[0]


HIDDEN = {
    "an iterator": (lambda: itertools.count(2), next),
    "a generator of numbers": (lambda: random.Random(0), lambda kept: kept.random()),
    "its method": (lambda: np.random.default_rng(0).normal, lambda kept: kept()),
    "bytes": (lambda: bytearray([2]), lambda kept: kept.append(3) or sum(kept)),
    "memory": (lambda: memoryview(bytearray([2])), _next_byte),
    "an object that hides": (Hiding, lambda kept: kept.next()),
}


@pytest.mark.parametrize("kind", HIDDEN)
@torch.no_grad()
def test_what_changes_where_python_does_not_see_it_is_on_no_tape(st, kind):
    make, read = HIDDEN[kind]
    dense, x, mask = Using(lambda self, y: y * read(self.kept)).eval(), image(), masks(0.4)[0]
    results = []
    for replay in ("auto", False):
        dense.kept, sparse = make(), st.sparsify(dense, BLOCK, replay=replay)
        results.append([sparse(x, mask) for _ in range(5)])
        assert not sparse._tapes.kept
    assert all(map(same, *results))


def test_what_cannot_change_does_not_keep_a_network_from_a_tape(st):
    dense, x, mask = small(), image(), masks(0.4)[0]
    dense.kept = [
        Fraction(1, 3), Path("."), re.compile("a"), datetime.date(2024, 1, 1), 1j, np.float32(2),
        torch.float32, torch.device("cpu"), range(3), slice(1),
        types.SimpleNamespace(kind=collections.namedtuple("Pair", "a b")(1, 2)), np.exp, torch.relu,
        logging.getLogger(), threading.Lock(), dense[0].extra_repr, torch.contiguous_format,
    ]  # fmt: skip
    with torch.no_grad():
        assert taped(st, dense, x, mask)._tapes.kept


@torch.no_grad()
def test_training_gradients_and_moves_drop_tapes(st):
    x, mask = image(), masks(0.4)[0]
    sparse = taped(st, small(), x, mask)
    for change in (lambda: sparse.train().eval(), sparse.float, lambda: sparse(x, mask).sum()):
        for _ in range(2):
            sparse(x, mask)
        assert sparse._tapes.kept
        with torch.enable_grad():
            change()
        assert not sparse._tapes.kept
    for twin in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        assert not twin._tapes.kept and same(twin(x, mask), sparse(x, mask))
    with torch.enable_grad():
        y = sparse(x, mask)
        y.sum().backward()
    assert all(p.grad is not None for p in sparse.parameters())


@torch.no_grad()
def test_hooks_run_at_each_call(st):
    dense, x, mask, seen = small(), image(), masks(0.4)[0], []
    sparse = taped(st, dense, x, mask)
    handle = dense[0].register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        sparse(x, mask)
    assert len(seen) == 3 and not sparse._tapes.kept
    handle.remove()
    for _ in range(4):
        sparse(x, mask)
    assert len(seen) == 3 and sparse._tapes.kept


@torch.no_grad()
def test_what_writes_to_its_image_is_not_run_twice(st):
    """A call that is given up on the way has written nothing that another run would find."""

    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            """Scale the image in place, and use a size that depends on numbers."""
            x[:, :2].mul_(2)
            y = self.conv(x)
            return y * len(torch.nonzero(y.mean((2, 3)) > 0))

    torch.manual_seed(0)
    dense, full = Writing().eval(), torch.ones(2, *SIZE)
    sparse, plain = (st.sparsify(dense, BLOCK, replay=how) for how in ("auto", False))
    for seed in range(6):
        x = (image(seed) + (seed % 4 - 2)).contiguous(memory_format=torch.channels_last)
        y = x.clone()
        assert same(sparse(x, full), plain(y, full)) and torch.equal(x, y)


@torch.no_grad()
def test_a_number_of_pixels_depends_on_the_image(st):
    """A tape is given up where what is left of the image has another size."""
    dense = Using(lambda self, y: y * y[y > 1].mean()).eval()
    sparse, plain = (st.sparsify(dense, BLOCK, replay=how) for how in ("auto", False))
    mask = masks(0.4)[0]
    for seed in range(5):
        assert same(sparse(image(seed), mask), plain(image(seed), mask))
    assert sparse._tapes.unfit


@torch.no_grad()
def test_parametrized_weights(st):
    dense = small()
    torch.nn.utils.parametrizations.weight_norm(dense[0])
    x, mask = image(), masks(0.4)[0]
    sparse = taped(st, dense, x, mask)
    for _ in range(3):
        assert same(sparse(x, mask), st.sparsify(dense, BLOCK, replay=False)(x, mask))
        dense[0].parametrizations.weight.original0.mul_(2)
    sparse = st.sparsify(dense, BLOCK, outside="bias")
    for _ in range(3):
        assert same(sparse(x, mask), st.sparsify(dense, BLOCK, outside="bias")(x, mask))


@torch.no_grad()
def test_random_numbers_are_drawn_at_each_call(st):
    sparse = taped(st, Using(lambda self, y: F.dropout(y, 0.5, True)).eval())
    x, mask = image(), masks(0.4)[0]
    assert not torch.equal(sparse(x, mask), sparse(x, mask))


@torch.no_grad()
def test_outside(st):
    dense, x = small(), image()
    shape = (2, 4, *SIZE)
    for outside in (1.5, "bias", torch.randn(shape)):
        sparse, plain = (
            st.sparsify(dense, BLOCK, outside=outside, replay=how) for how in ("auto", False)
        )
        for mask in masks(0.4, 0.6, 0.4):
            assert same(sparse(x, mask), plain(x, mask))
        assert sparse._tapes.kept
    sparse = taped(st, dense, x, masks(0.4)[0], outside=torch.zeros(shape))
    for seed in range(3):  # another tensor at each call
        given, mask = torch.full(shape, float(seed)), masks(0.5)[0]
        assert same(sparse(x, mask, outside=given), plain(x, mask, outside=given))
    with pytest.raises(sbnet_cupy.ShapeError, match="outside must have the shape"):
        sparse(x, mask, outside=torch.zeros(2, 4, 3, 3))


@torch.no_grad()
def test_threads_have_their_own_results(st):
    dense, some = networks.network("resnet_basic"), masks(0.3, 0.6)
    sparse, plain = (st.sparsify(dense, BLOCK, replay=how) for how in ("auto", False))
    x, wrong = image(), []
    expected = [plain(x, mask) for mask in some]

    @torch.no_grad()
    def call(mask, right):
        for _ in range(12):
            if not same(sparse(x, mask), right):
                wrong.append(mask)

    threads = [
        threading.Thread(target=call, args=pair) for pair in zip(some, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sparse._tapes.kept


@torch.no_grad()
def test_a_tape_holds_no_activation(st):
    """Neither while it is recorded, nor later."""
    kept, most = [], []

    def deep(self, y, kept=kept, most=most):  # no variables, which are seen to change
        for _ in range(6):
            y = F.relu(y.clone())
            kept.append(weakref.ref(y))
            y = y + 1
            most.append(sum(ref() is not None for ref in kept))
        return y

    sparse = taped(st, Using(deep).eval())
    assert max(most) <= 2 and all(ref() is None for ref in kept)
    steps = next(iter(sparse._tapes.kept.values())).steps
    assert sum(len(step.last) for step in steps) >= len(steps)  # freed as soon as it can be


class Masked(torch.nn.Module):
    """A network with a mask."""

    def __init__(self, sparse, mask):
        super().__init__()
        self.sparse, self.mask = sparse, mask

    def forward(self, x):
        return self.sparse(x, self.mask)


def last_line(code):
    return max(line for *_, line in code.co_lines() if line is not None)


@torch.no_grad()
def test_too_little_room_warns_at_each_call(st):
    """Of the line that calls the network, however the call is computed."""
    x, (few, many) = image(), masks(0.1, 0.9)
    sparse = taped(st, small(), x, few, capacity=8)
    wrapped = torch.nn.Sequential(Masked(sparse, many))  # PyTorch's code between the lines, too
    for replay, call in itertools.product(("auto", False), (lambda: sparse(x, many), wrapped)):
        sparse.replay = replay
        for _ in range(3):  # as usual, recorded, from the tape
            arguments = () if call is not wrapped else (x,)
            with pytest.warns(RuntimeWarning, match="capacity has room for 8") as seen:
                call(*arguments)
            assert sparse.overflowed
            code = (Masked.forward if call is wrapped else call).__code__
            assert (seen[0].filename, seen[0].lineno) == (__file__, last_line(code))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse(x, few)
    assert not sparse.overflowed


@torch.no_grad()
def test_what_has_no_tape(st):
    x, mask = image(), masks(0.4)[0]
    sparse = st.sparsify(small(), BLOCK)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            sparse(x, mask)
        with torch.profiler.profile(acc_events=True):
            sparse(x, mask)
        with torch.enable_grad():
            sparse(x, mask)
        st.sparsify(small(), BLOCK, replay=False)(x, mask)
    assert not sparse._tapes.kept


def _gain(module, y):
    """Multiply by the gradient of a function of a parameter of the network, and of y's pixels."""
    bias = module.conv.bias
    return y * torch.func.grad(lambda b: (y * b[:, None, None]).mean())(bias)[:, None, None]


TRANSFORMED = {
    "gradient": _gain,
    "derivative": lambda module, y: torch.func.jvp(torch.sin, (y,), (y,))[1],
    "mapped": lambda module, y: y * torch.vmap(torch.sin)(module.conv.bias)[:, None, None],
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", TRANSFORMED)
@torch.no_grad()
def test_functions_that_are_transformed_are_on_no_tape(st, kind):
    """They would be run again without what transforms them."""
    torch.manual_seed(0)
    sparse, plain = (
        st.sparsify(Using(TRANSFORMED[kind]), BLOCK, replay=how) for how in ("auto", False)
    )
    plain.model = sparse.eval().model
    for mask in masks(0.4, 0.7, 0.2, 1.0):
        assert same(sparse(image(), mask), plain(image(), mask))
    assert not sparse._tapes.kept


@torch.no_grad()
def test_bad_calls_are_refused_alike(st):
    x, mask = image(), masks(0.4)[0]
    sparse = taped(st, small(), x, mask)
    with pytest.raises(sbnet_cupy.ShapeError, match="mask must have shape"):
        sparse(x, mask[:, 1:])
    with pytest.raises(ValueError, match="outside must be"):
        sparse(x, mask, outside="zero")
    empty = sparse(x[:0], mask[:0])
    assert empty.shape == (0, 4, *SIZE)
