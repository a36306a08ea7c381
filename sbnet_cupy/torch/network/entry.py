"""Entry: the image that a network is called with, whose blocks are gathered when they are read."""

from . import casts
from .layout import channels_last


class Entry:
    """The image of a call, in the place of its stack.

    A convolution of few channels reads the image itself, through the table. What else reads the
    input asks for :meth:`stack`, which is gathered once. It stands where a deferred convolution
    does (plans.py), and takes no step.
    """

    norm = residual = rest = done = records = options = None
    activation = "none"  # nothing can be added behind it
    requires_grad = False

    def __init__(self, image, table):
        self.image, self.table, self._stack, self._casts = image, table, None, {}
        self.shape, self.dtype, self.device = image.shape, image.dtype, image.device

    def stack(self):
        """Return the active blocks of the image."""
        if self._stack is None:
            self._stack = gathered(self.image, self.table)
        return self._stack

    run = stack

    def cast(self, to):
        """Return the entry of the image as autocast converts it to a dtype; None: as it is."""
        if casts.after(self.dtype, to) == self.dtype:
            return self
        if to not in self._casts:
            self._casts[to] = Entry(casts.cast(self.image, to), self.table)
        return self._casts[to]

    def takes(self, residual=None, activation=None):
        """Whether anything may be added behind it: it never is."""
        return False

    def reads(self, x):
        """Whether a StackTensor that waits is the source: it never is."""
        return False


def gathered(image, table):
    """Return the active blocks of an image ``[N, C, H, W]`` as channels_last ``[M, C, b, b]``."""
    return channels_last(table.gather(image, table.block, (2, 3)))
