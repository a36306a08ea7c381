"""Training by CUDA graphs, with ``replay=True``: calls like earlier ones, and their gradients."""

import contextlib
import weakref

import torch

from .._dispatch_state import is_watched_in_backward
from . import replay
from .recordings import are_usual
from .training_graphs import Graphs, Memory, TrainingState, replay_of


class TrainingReplays(replay.Replays):
    """The CUDA graphs of a network's calls with gradients.

    There is memory for the activations of one call. While its gradients may still be asked for,
    other calls run one by one.
    """

    kind = TrainingState
    is_off = False  # while a call runs by itself

    def find(self, state, key):
        """Return the recording of such a call or None, and whether one is due."""
        run, due = super().find(state, key)
        return (None, False) if run is not None and run.graphs.is_partial else (run, due)

    def _new_memory(self, device):
        return Memory(device)

    def _is_free(self, x):
        memory = self.memory.get(replay.place_of(x))
        return memory is None or not memory.is_awaited()

    def _capture(self, sparse, x, mask, outside, room, memory):
        capacity = sparse.capacity if room is None else room[1]
        options, alone = {} if outside is None else {"outside": outside}, _Alone(sparse)

        @contextlib.contextmanager
        def again():
            network = alone.sparse
            last = network._last
            with network._fixed(capacity):
                yield
            network._last = last

        with sparse._fixed(capacity):
            graphs = Graphs(alone, (x, mask), sparse.model, options, memory, again)
        run = replay_of(sparse, graphs)
        run.graphs = graphs
        return run


class _Alone(torch.nn.Module):
    """A network without the hooks of its own, which the call around a replay runs.

    It does not hold the network, which holds its graphs, and through them this: all are freed with
    the network's last reference.
    """

    def __init__(self, sparse):
        super().__init__()
        self._sparse = weakref.ref(sparse)

    @property
    def sparse(self):
        """The network."""
        network = self._sparse()
        if network is None:
            raise RuntimeError(
                "the gradients of a call of what sparsify returned are computed by calling it once "
                "more, but it is gone; keep it until then"
            )
        return network

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        """Yield the modules of the network, for its parameters and buffers."""
        within = f"{prefix}.sparse" if prefix else "sparse"
        return self.sparse.named_modules(memo, within, remove_duplicate)

    def forward(self, *args, **kwargs):
        """Call the network."""
        return self.sparse.forward(*args, **kwargs)


def may_replay(sparse, x, mask, args, kwargs, outside):
    """Whether a call with gradients is replayed where one like it came before."""
    if sparse.replay is not True or not torch.is_grad_enabled() or args or kwargs:
        return False
    replays = sparse._training_replays
    if replays.unfit or replays.is_off or isinstance(outside, torch.Tensor):
        return False
    return are_usual(x, mask) and replay.on_gpu(x, mask) and not is_watched_in_backward()
