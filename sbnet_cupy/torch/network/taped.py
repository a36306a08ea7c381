"""Calls like earlier ones on a CPU: recorded once, and run again from the tape."""

import torch

from .ends import check_call
from .options import check_outside
from .recordings import Recordings, settings
from .tape import Changed, Tape


class Tapes(Recordings):
    """The tapes of a network's calls; threads may run one tape at a time."""

    limit = 8

    def call(self, sparse, x, mask, outside):
        """Run a call from its tape, or as usual; record it if it came before."""
        state = self.state_of(sparse.model, x)
        if not state.fit:
            return sparse._call(x, mask, outside=outside)
        mask = check_call(x, mask)
        wanted = check_outside(sparse.outside if outside is None else outside)
        table, counted = sparse._table(x, mask)
        key = _key(sparse, x, table, wanted)
        tape, due = self.find(state, key)
        if sparse._is_compiled(table, x, (), {}) or (tape is None and not due):
            try:
                result = sparse._on_table(table, counted, x, wanted)
            except BaseException:
                self.forget(key)
                raise
            self.holds(state)
            return result
        kind = sparse._kind(x, table.whole)
        if tape is not None:
            try:
                result = tape.run(table, x, wanted)
            except Changed:
                self.unfit = True
                return sparse._call(x, mask, outside=outside)
        else:
            result = self._recorded(sparse, state, key, table, x, wanted)
        return sparse._done(result, kind, counted, table)

    def _recorded(self, sparse, state, key, table, x, outside):
        """Run a call as usual, and keep its tape."""
        tape = table.tape = Tape(table, x, outside, state.tensors)
        result = sparse._run(table, x, outside=outside)
        done = tape.finish(result)
        table.tape = None
        if self.holds(state):
            if done is None:
                self.unfit = True
            else:
                self.keep(state, key, done)
        return result


def may_tape(sparse, x, outside):
    """Whether a call that may be recorded runs from a tape: on a CPU."""
    if outside is None:
        outside = sparse.outside
    if isinstance(outside, torch.Tensor) and (type(outside) is not torch.Tensor or outside is x):
        return False
    if torch.is_autocast_enabled("cpu"):  # which a network may turn off for a part of it
        return False
    return x.device.type == "cpu" and not sparse._tapes.unfit


def _key(sparse, x, table, outside):
    """Return all that a tape depends on besides the network's state and numbers in tensors."""
    if isinstance(outside, torch.Tensor):
        outside = tuple(outside.shape), outside.dtype, outside.device
    return (
        tuple(x.shape), x.stride(), x.dtype, x.is_inference(), type(outside), outside,
        sparse.block_size, table.whole, table.known_live, settings(),
    )  # fmt: skip
