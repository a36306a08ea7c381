"""SparseModel: a network that is called with an image and a mask."""

import contextlib
import copy
import math

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from ...block_sparse.checks import blocks_of_capacity
from .._dispatch_state import in_dispatch_mode, in_one_piece, is_mapped
from . import aliases, casts, cuda, graphs, left, training_graphs, training_replay, tuning
from . import tensor as T
from .ends import check_call, check_device, finished_tree, warn_left_out
from .entry import Entry, gathered
from .image_values import flush, plainly
from .joins import JoiningCall, Joins, joining
from .misfits import misfit, refused
from .options import CHECKS, check_outside
from .order import order_of
from .piles import as_images
from .recordings import may_record
from .rehearsal import Rehearsals
from .replay import Replays, may_replay
from .report import Report
from .state import State
from .table import BlockTable, PictureTable, active_blocks, rows_for
from .tape import Recorder
from .taped import Tapes, may_tape
from .trace import Trace, Traces
from .trees import tree_flatten, tree_leaves, tree_map
from .weights import Weights, is_sharded

# Share of active blocks from which whole images, 0 outside active blocks, are faster than a stack.
# Where CUDA kernels compute the stack they are faster at any share.
BREAK_EVEN = {"cpu": 0.7, "cuda": 0.75}
_NEVER = 2.0


class SparseModel(Report, nn.Module):
    """What :func:`sbnet_cupy.torch.sparsify` returns.

    Its options may be set later, too; they are checked then.

    Attributes
    ----------
    model : torch.nn.Module
        The network that was given, unchanged.
    block_size : (int, int)
        Pixels of a block in the input.
    capacity : None, int or float
        Blocks that there is room for, or the share of all.
    halo : {"zero", "exact"}
        Whether blocks are active as far around the mask as the network looks.
    outside : number, "bias" or tensor
        What the result holds outside active blocks.
    replay : "auto", True or False
        Whether calls like earlier ones are replayed as CUDA graphs, True: in training, too, see
        :func:`sparsify`.
    break_even : float or None
        Share of active blocks from which whole images are computed, 0 outside active blocks, which
        gives the same numbers up to rounding. None is a usual value of the device: on a GPU, over 1
        (never) where CUDA kernels compute the stack. :meth:`tune` measures it.
    """

    def __init__(
        self, model, block_size, capacity=None, halo="zero", outside=0.0, replay="auto"
    ):  # fmt: skip
        super().__init__()
        self.model, self.training = model, model.training
        self.block_size, self.capacity = block_size, capacity
        self.halo, self.outside, self.replay = halo, outside, replay
        self.break_even = None
        self._weights, self._is_trained = Weights(), False
        self._joins = Joins()
        self._replays, self._tapes = Replays(), Tapes()
        self._training_replays = training_replay.TrainingReplays()
        self._rehearsals = Rehearsals()
        self._compiled = None
        self._reaches = {}
        self._traces = Traces()
        self._last = None

    def __setattr__(self, name, value):
        """Set an attribute; an option must be a possible one."""
        super().__setattr__(name, CHECKS[name](value) if name in CHECKS else value)
        if name == "replay" and value is not True and "_training_replays" in vars(self):
            self._training_replays.clear()

    def forward(self, x, mask, *args, outside=None, **kwargs):
        """Run the network where ``mask`` is set.

        With a ``capacity`` and ``halo="zero"``, on a CPU, ``torch.compile`` of PyTorch 2.13 and
        later makes a call part of its graph, also with ``fullgraph=True``; there is then no warning
        of blocks that were left out. Without a capacity shapes depend on data, and on a GPU the
        network has kernels and CUDA graphs of its own: such calls run as they do outside, between
        two graphs.

        Parameters
        ----------
        x : tensor, shape (N, C, H, W)
            The image.
        mask : tensor, shape (N, H, W) or (N, 1, H, W)
            Where it matters: over 0, or True. NaN is not over 0.
        outside : number, "bias" or tensor, optional
            In place of that of :func:`sparsify`, for this call.
        args, kwargs
            What else the network takes, handed to it as it is: another image is not 0 outside
            active blocks, and what is computed of it alone is dense.

        Returns
        -------
        What the network returns, images in place of stacks.
        """
        if torch.compiler.is_dynamo_compiling():
            kwargs |= {} if outside is None else {"outside": outside}  # Dynamo passes no None on
            if self.capacity is None or self.halo != "zero" or x.is_cuda:
                return _apart(self, x, mask, args, kwargs)
            check_call(x, mask)  # here, as Dynamo shows no error from inside
            if self.training or torch.is_grad_enabled():
                self._is_trained = True
            return _in_graph(self, x, mask, args, kwargs)
        if self._is_trained:  # by a graph, which may leave no trace in the weights
            self._forget()
        if training_replay.may_replay(self, x, mask, args, kwargs, outside):
            return self._replayed(self._training_replays, x, mask, outside)
        if may_record(self, x, mask, args, kwargs):
            if may_replay(self, x, mask, outside):
                return self._replayed(self._replays, x, mask, outside)
            if may_tape(self, x, outside):
                return self._tapes.call(self, x, mask, outside)
        return self._call(x, mask, args, kwargs, outside)

    def _replayed(self, replays, x, mask, outside):
        """Replay a call, if one like it came before."""
        check_call(x, mask)
        check_outside(self.outside if outside is None else outside)
        return replays.call(self, x, mask, outside)

    @contextlib.contextmanager
    def _fixed(self, capacity):
        """Within this, calls have a capacity and run by themselves."""
        before, replays = self.capacity, self._training_replays
        self.capacity, replays.is_off = capacity, True
        try:
            yield
        finally:
            self.capacity, replays.is_off = before, False

    def _call(self, x, mask, args=(), kwargs=None, outside=None, room=None):
        """Run the network once, without a CUDA graph; for ``room`` see :meth:`_table`."""
        mask = check_call(x, mask)
        check_device(self.model, x)
        outside = check_outside(self.outside if outside is None else outside)
        if self.training or torch.is_grad_enabled():
            self._forget()
        table, counted = self._table(x, mask, args, kwargs, room)
        if x.is_cuda and not args and not kwargs:
            self._rehearsals.before(self, x, table, outside)
        return self._on_table(table, counted, x, outside, args, kwargs)

    def _on_table(self, table, counted, x, outside, args=(), kwargs=None):
        """Run the network once on the blocks of a table."""
        count, capacity = counted
        table.model = self.model
        table.occupied = isinstance(count, int) and min(count, capacity) > 0
        if cuda.is_tracing():
            return self._run(table, x, args, kwargs, outside)
        key = self._kind(x, table.whole, args, kwargs)
        if self._is_compiled(table, x, args, kwargs):
            result = self._compiled(self, x, table, outside)
        else:
            if self._traces.lacks(self.model, key):
                table.trace = Trace(self.model)
            result = self._run(table, x, args, kwargs, outside)
            if table.trace is not None:
                self._traces.keep(key, table.trace)
        return self._done(result, key, counted, table)

    def _done(self, result, key, counted, table):
        """Note how much a call computed, and return its result."""
        self._last = key, counted, table.grid[0] * table.grid[1] * table.batch
        warn_left_out(*counted)
        return result

    def _kind(self, x, whole, args=(), kwargs=None):
        """Return what calls have in common that run the same layers in the same way."""
        more = _kinds(args, kwargs) if args or kwargs else None
        return tuple(x.shape), x.dtype, self.training, whole, more

    def _is_compiled(self, table, x, args, kwargs):
        """Whether a call runs on whole images for which :meth:`tune` compiled the network."""
        evaluated = not (self.training or torch.is_grad_enabled())
        there = table.whole and self._compiled is not None
        serves = there and evaluated and self._compiled.serves(x, args, kwargs)
        return serves and self._compiled.follows(self, x, table)

    def _run(self, table, x, args=(), kwargs=None, outside=0.0):
        """Run the network on a table's blocks."""
        left.watch(table, outside)
        try:
            y = self._result(table, x, args, kwargs)
            return finished_tree(y, outside, table, self.model)
        except Exception as error:
            found = misfit(self.model, x, error) or refused(table, error)
            if found is None:
                raise
            raise found from error
        finally:
            table.order = None  # what the network keeps may be used when no graph is captured

    def _result(self, table, x, args=(), kwargs=None):
        """Return what the network returns, with stacks in place of images."""
        trained = self.training or torch.is_grad_enabled()
        trained = trained or is_sharded(self.model)  # whose layers have weights while they run
        kept = Weights(keeps=False) if cuda.is_tracing() else self._weights
        if kept.keeps and not trained:
            kept.follow(self.model)
        table.weights = None if trained else kept
        by_kernels = not table.whole and cuda.serves(x)
        if by_kernels and not trained:
            table.joins, table.order = JoiningCall(self._joins), order_of(x)
        value = plan = None
        aliases.note_order(x, table)
        if by_kernels:
            plan = Entry(x, table)
        else:
            value = table.compute(gathered, x, table)
        image = T.StackTensor(value, table, table.block, table.size, plan=plan)
        watching = contextlib.nullcontext() if table.trace is None else table.trace.watching()
        try:
            recorder = Recorder(table.tape) if table.tape is not None else watching
            with joining(table.joins):
                with T.calling(table), recorder:
                    y = self.model(image, *args, **kwargs or {})
                y = tree_map(lambda leaf: as_images(plainly(leaf)), y)
                T.flush(table)  # what the network keeps is computed with the weights of the call
            aliases.check_overlapping(table)
            if table.joins is not None:
                table.joins.finish()
                table.joins = None
            return y
        finally:
            flush()

    def _table(self, x, mask, args=(), kwargs=None, room=None):
        """Return the table of a call, and (count of active blocks, capacity).

        ``room`` takes the place of both: the count is None where it is not known.
        """
        if is_mapped(mask):
            raise NotImplementedError(
                "mask must not be mapped by torch.vmap, as each has a number of active blocks of "
                "its own; call the network for each, or give vmap one mask with in_dims=None"
            )
        size = tuple(x.shape[2:])
        mask = self._widened(mask, x, args, kwargs)
        total = self._blocks_of(x)
        count, capacity = room or (None, self._capacity_of(total))
        share = self._break_even(x)
        if cuda.is_tracing():
            return self._table_of_trace(mask, size, total, capacity, share)
        if torch.jit.is_tracing() or (in_dispatch_mode() and get_proxy_mode() is not None):
            raise RuntimeError(
                "a sparsified network cannot be traced by torch.jit.trace or make_fx: the number "
                "of active blocks would be a constant, and on a GPU PyTorch does not see its "
                "kernels; export it on a CPU, with a capacity, or use graphed(x, mask) on a GPU"
            )
        if x.is_cuda and x.shape[0]:
            return self._table_on_gpu(mask, size, total, count, capacity, share)
        on = active_blocks(mask, self.block_size)
        count = int(on.sum())
        capacity = total if capacity is None else capacity
        if x.shape[0] == 0 or (min(capacity, count) >= share * total and capacity >= count):
            table = PictureTable(mask, self.block_size, size, count == total)
            table.on = on
            return table, (count, total)
        table = BlockTable.of_blocks(on, min(capacity, count), count, self.block_size, size)
        return table, (count, capacity)

    def _break_even(self, x):
        """Return the share of active blocks from which whole images are computed."""
        if self.break_even is not None:
            return self.break_even
        if x.is_cuda and cuda.convolves(casts.after(x.dtype, casts.dtype_for(x))):
            return _NEVER
        return BREAK_EVEN.get(x.device.type, 1.0)

    def _table_of_trace(self, mask, size, total, capacity, share):
        """Return the table of a call of which PyTorch makes a graph: no number is known."""
        if capacity is None:
            raise RuntimeError(
                "capacity must be given to export a sparsified network, got None; without one the "
                "number of active blocks is data"
            )
        if capacity >= share * total:
            table, capacity = PictureTable(mask, self.block_size, size), total
        else:
            on = active_blocks(mask, self.block_size)
            table = BlockTable.of_blocks(on, capacity, None, self.block_size, size)
        table.static = True
        return table, (None, capacity)

    def _table_on_gpu(self, mask, size, total, count, capacity, share):
        """Return the table of a call on a GPU; with a capacity the host waits for nothing."""
        if capacity is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "capacity must be given where a CUDA graph is captured, got None; without one the "
                "number of active blocks is read from the device"
            )
        if capacity is None and count is None:
            count, capacity = self._counted(mask, total, share)
        if capacity is None or capacity >= max(share * total, 1):
            return PictureTable(mask, self.block_size, size, count == total), (None, total)
        listed = cuda.list_blocks(mask, self.block_size, capacity)
        known = listed[0] if count is None else count
        if capacity == 0:
            on = torch.zeros_like(listed[2], dtype=torch.bool)
            return BlockTable.of_blocks(on, 0, 0, self.block_size, size), (known, 0)
        return BlockTable(*listed, self.block_size, size, capacity == count), (known, capacity)

    def _room(self, x, mask):
        """Return how many blocks are active on a GPU, and how many their stack has room for.

        It waits for the device. There is no room, None, where whole images are computed.
        """
        mask = self._widened(check_call(x, mask), x)
        return self._counted(mask, self._blocks_of(x), self._break_even(x))

    def _counted(self, mask, total, share):
        count = cuda.list_blocks(mask, self.block_size, None)[1].shape[0]
        rows = rows_for(count, total)
        return count, rows if rows < max(share * total, 1) else None

    def _blocks_of(self, x):
        """Return the number of blocks of images."""
        each = zip(x.shape[2:], self.block_size, strict=True)
        return x.shape[0] * math.prod(-(-s // b) for s, b in each)

    def _capacity_of(self, total):
        """Return the capacity in blocks, of so many in all; None without one."""
        capacity = blocks_of_capacity(self.capacity, total)
        return None if capacity is None else min(capacity, total)

    def _widened(self, mask, x, args=(), kwargs=None):
        """Widen a mask by what the network's result at one pixel depends on, for halo="exact"."""
        if self.halo != "exact":
            return mask
        kwargs = kwargs or {}
        kinds = [getattr(leaf, "shape", leaf) for leaf in tree_leaves((args, kwargs))]
        key = (tuple(x.shape[2:]), x.shape[1], x.dtype, x.device, str(kinds))
        state, reach = self._reaches.get(key, (None, 0))
        if state is None or not state.looks_alike(self.model):
            reach = graphs.receptive_field(self, x, args, kwargs)
            self._reaches[key] = State(self.model, most=math.inf), reach
        wide = mask[:, None].to(torch.float32)
        wide = F.max_pool2d(wide, (2 * reach + 1, 1), 1, (reach, 0))
        return F.max_pool2d(wide, (1, 2 * reach + 1), 1, (0, reach))[:, 0] > 0

    def graphed(self, x, mask):
        """Return a function like this network that replays a CUDA graph: no host time is left.

        It takes images and masks of the shape, dtype and device of these. Of a network in
        evaluation see :func:`sbnet_cupy.torch.network.graphs.graphed`; of one in training, with
        gradients, :func:`sbnet_cupy.torch.network.training_graphs.graphed`.
        """
        kind = training_graphs if self.training else graphs
        return kind.graphed(self, x, mask)

    def tune(self, x, masks=None, *, compile="auto"):
        """Measure from which share of active blocks whole images are faster, and use them there.

        Whole images are 0 outside active blocks, so the result is the same up to rounding, with
        whatever mask. On a GPU they are compiled, for calls with images like ``x``: later calls
        with so much room, or so many active blocks, run the compiled network. It takes new weights
        without being compiled again. A network that cannot be compiled says so in a RuntimeWarning,
        and its whole images run uncompiled.

        On a GPU CUDA graphs are measured, so the host's time is in none. Where a stack is faster
        even with every block active, ``break_even`` is over 1: never.

        Parameters
        ----------
        x : tensor, shape (N, C, H, W)
            An image of the usual size, dtype and memory format.
        masks : list of tensors, optional
            Not needed; the share alone counts.
        compile : "auto", bool or dict
            Whether whole images are compiled, "auto": on a GPU; a dict has keywords of
            ``torch.compile``, as ``{"mode": "max-autotune-no-cudagraphs"}``. It takes as long as
            compiling the network takes, up to a minute or two.

        Returns
        -------
        times : dict
            Milliseconds: "dense" for whole images, "compiled" for compiled ones, and a number for
            each share of active blocks.
        """
        return tuning.tune(self, x, compile)

    def _forget(self):
        """Drop what was made of the weights."""
        self._is_trained = False
        self._weights.clear()
        self._joins.clear()
        self._replays.clear()
        self._tapes.clear()
        if self._compiled is not None:
            self._compiled.forget()

    def train(self, mode=True):
        """Set the network to training or evaluation."""
        self._forget()
        before = self.training
        try:
            return super().train(mode)
        except NotImplementedError as refusal:
            self.training = before
            if not any(isinstance(module, torch.fx.GraphModule) for module in self.modules()):
                raise
            raise NotImplementedError(
                "train() and eval() cannot be called on a sparsified network that has a module "
                "made by torch.export, which stays in the mode in which it was exported; export it "
                "after model.train() or model.eval(), and after eval() sparsify "
                "torch.fx.GraphModule(module, module.graph), which takes eval() and is faster"
            ) from refusal

    def _apply(self, *args, **kwargs):
        self._forget()
        self._training_replays.clear()
        return super()._apply(*args, **kwargs)

    def __prepare_scriptable__(self):
        """Refuse ``torch.jit.script``, which asks here for what it compiles in place of this."""
        raise RuntimeError(
            "a sparsified network cannot be scripted by torch.jit.script, as Python chooses what "
            "it runs; export it by torch.export, on a CPU and with a capacity"
        )

    def __getstate__(self):
        state = super().__getstate__()  # without what compile() made of the module
        state.update(
            _weights=Weights(), _joins=Joins(), _replays=Replays(), _tapes=Tapes(),
            _traces=Traces(), _training_replays=training_replay.TrainingReplays(),
            _rehearsals=Rehearsals(), _compiled=None, _last=None, _reaches={},
        )  # fmt: skip
        return state

    def __deepcopy__(self, memo):
        twin = SparseModel.__new__(SparseModel)
        memo[id(self)] = twin
        nn.Module.__init__(twin)
        twin.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__getstate__().items()})
        return twin


def _kinds(args, kwargs):
    """Return what other arguments say of the layers of a call: shapes, and what chooses."""
    leaves, tree = tree_flatten((args, kwargs))
    chosen = (bool, str, type(None))
    kinds = [getattr(v, "shape", v if isinstance(v, chosen) else type(v)) for v in leaves]
    return str(tree), str(kinds)


@torch.compiler.disable
def _apart(sparse, x, mask, args, kwargs):
    """Make a call outside of what torch.compile compiles, where the hooks of the network ran."""
    return SparseModel.forward(sparse, x, mask, *args, **kwargs)


@in_one_piece
def _in_graph(sparse, x, mask, args, kwargs):
    """Make a call as a part of the graph, which is of images of one size."""
    x, mask = (t.expand([int(n) for n in t.shape]) for t in (x, mask))
    return sparse._call(x, mask, args, kwargs, kwargs.pop("outside", None))
