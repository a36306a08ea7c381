"""Calls like earlier ones: how often they came, and what was recorded of them."""

import collections
import threading

import torch

from .._dispatch_state import is_watched
from .ends import check_device
from .state import State

_SEEN = 64  # calls of which it is remembered how often they came
_CHANGES = 3  # calls that change the network before it is never recorded
_MOST_PATIENCE = 1024


class Recordings:
    """What was recorded of a network's calls, by all that a call depends on but numbers in tensors.

    A recording repeats what a call computed, not the modules' Python code. So all are dropped when
    an attribute of a module was bound anew, or the memory or version of a parameter or buffer
    changed; and a network whose calls change its own attributes or buffers has none.
    """

    limit = 0  # recordings of a network
    kind = State

    def __init__(self):
        self.lock = threading.RLock()
        self.changes = 0  # calls that changed the network's own attributes or buffers
        self.patience = 1  # calls alike before one is recorded: doubled when recordings are lost
        self.unfit = False  # calls cannot be recorded, for good
        self.clear()

    def __reduce__(self):
        return type(self), ()

    def clear(self):
        """Drop all recordings."""
        with self.lock:
            self.kept = collections.OrderedDict()
            self.calls = collections.OrderedDict()
            self.state = None

    def state_of(self, model, x):
        """Return what the recordings were made of; drop them if that has changed.

        Of a network that has not changed it is known which device it is on.
        """
        with self.lock:
            if self.state is None or not self.state.holds(model):
                if self.kept:
                    self._lose_patience()
                self.clear()
                self.state = self.kind(model)
            if self.state.device != x.device:
                check_device(model, x)
                self.state.device = x.device
            return self.state

    def find(self, state, key):
        """Return the recording of such a call or None, and whether one is due."""
        with self.lock:
            if self.state is not state:  # another thread has seen a change
                return None, False
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key], False
            came = self.calls.pop(key, 0)
            self.calls[key] = came + 1
            if len(self.calls) > _SEEN:
                self.calls.popitem(last=False)
            return None, came >= self.patience

    def forget(self, key):
        """Take back that a call came, which has failed: the next one is to raise what it did."""
        with self.lock:
            self.calls.pop(key, None)

    def keep(self, state, key, recording):
        """Keep the recording of a call, in place of the one that was not used for longest."""
        with self.lock:
            if self.state is state:
                self.kept[key] = recording
                if len(self.kept) > self.limit:
                    self.kept.popitem(last=False)
                    self._lose_patience()

    def holds(self, state):
        """Whether the network is as it was before a call; count the call if it is not."""
        holds = state.holds()
        if not holds:
            with self.lock:
                self.changes += 1
                self.unfit = self.unfit or self.changes >= _CHANGES
        return holds

    def _lose_patience(self):
        self.patience = min(2 * self.patience, _MOST_PATIENCE)


def may_record(sparse, x, mask, args, kwargs):
    """Whether a call may be recorded, or replayed: in evaluation, with nothing that looks on."""
    if not sparse.replay or sparse.training or torch.is_grad_enabled() or args or kwargs:
        return False
    return are_usual(x, mask)


def are_usual(x, mask):
    """Whether an image and a mask may be recorded: plain ones, with nothing that looks on."""
    if type(x) is not torch.Tensor or type(mask) is not torch.Tensor or x.device != mask.device:
        return False
    if x.device.type not in ("cpu", "cuda") or x.dim() != 4 or x.numel() == 0 or is_watched():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def settings():
    """Return the settings of PyTorch by which a call may choose how it computes."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled,
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )  # fmt: skip
