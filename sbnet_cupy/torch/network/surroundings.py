"""What the functions of a call depend on besides their arguments: settings, and random numbers."""

import torch

from .._dispatch_state import in_dispatch_mode, in_transform
from .generators import host_generators
from .recordings import settings

_CPU = torch.device("cpu")


class Surroundings:
    """PyTorch's settings and the host's generators of random numbers, as a call began.

    A network may change both on its way: by a region of autocast, say, by ``torch.func``, or by a
    seed. Functions that are run again by themselves have what their caller has.

    Attributes
    ----------
    changed_by : str or None
        What the network has changed that one of its functions depends on.
    """

    def __init__(self):
        self._settings, self._generator = _settings(), torch.get_rng_state()
        self._others = host_generators(_CPU)
        self._draws = self._seeds = False
        self.changed_by = None

    def before(self):
        """Look around ahead of a function of the call."""
        self._seeds = self._seeds or not self._is_as_it_was()
        self._note_seeds()

    def at_end(self):
        """Look around at the end of the call."""
        self.before()
        if host_generators(_CPU) != self._others:
            self.changed_by = self.changed_by or "random numbers of Python or NumPy"

    def after(self):
        """Look around behind a function of the call."""
        if _settings() != self._settings:
            self.changed_by = self.changed_by or "settings that hold for a part of the call"
        self._draws = self._draws or not self._is_as_it_was()
        self._note_seeds()

    def _note_seeds(self):
        if self._draws and self._seeds:
            self.changed_by = self.changed_by or "a seed of the random numbers that it draws"

    def _is_as_it_was(self):
        """Whether no random number was drawn, and no seed set, since this was last asked."""
        before, self._generator = self._generator, torch.get_rng_state()
        return torch.equal(before, self._generator)


def _settings():
    _, *others = settings()  # inference mode, which comes first, changes no number
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return *others, torch.is_grad_enabled(), *autocast, in_dispatch_mode(), in_transform()
