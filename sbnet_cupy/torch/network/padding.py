"""Pixels of whole vectors: results that are written with channels behind that pad them.

Convolutions read 16 bytes at a time. A stack ``[M, C, h, w]`` whose pixels are no multiple of that
is the first channels of a wider one, if a convolution had to copy it in the calls before. What lies
behind is zero, or NaN where the stack itself is not finite, and its weights are 0.
"""

import threading

from .layout import VECTOR, channels_of, new_stack


class Padding:
    """What the calls of a network have taught: which results convolutions read in whole vectors.

    Attributes
    ----------
    numbers : set
        Of these results, as :class:`~.joins.Joins` counts them.
    """

    def __init__(self):
        self.numbers, self._sources, self._vain = set(), {}, set()
        self._lock = threading.Lock()

    def clear(self):
        """Forget everything."""
        with self._lock:
            for known in (self.numbers, self._sources, self._vain):
                known.clear()

    def add(self, number):
        """Note that a result was copied to have whole vectors: it is to be written with them.

        So are those of which it is made, where it can only be written so if they are.
        """
        with self._lock:
            self._vain.discard(number)
            self._add([number])

    def _add(self, left):
        while left:
            number = left.pop()
            if number not in self.numbers and number not in self._vain:
                self.numbers.add(number)
                left += self._sources.get(number, ())

    def drop(self, numbers):
        """Note results whose padding nobody has read: they are padded when they are copied again.

        Not for what is made of them, which something else kept from being padded.
        """
        with self._lock:
            self.numbers.difference_update(numbers)
            self._vain.update(numbers)

    def note_sources(self, number, sources):
        """Note of which results one is made that can only be padded if they are."""
        with self._lock:
            self._sources[number] = sources
            if number in self.numbers:
                self._add(list(sources))


def has_padding(channels, itemsize):
    """Whether pixels are no whole vectors, and larger than one: with padding not twice as large."""
    lanes = VECTOR // itemsize
    return channels > lanes and channels % lanes > 0


def padded(like, block, channels):
    """Return a new stack whose pixels have channels of zeros behind, up to whole vectors."""
    lanes = VECTOR // like.element_size()
    whole = new_stack(like, like.shape[0], block, -(-channels // lanes) * lanes)
    part = channels_of(whole, 0, channels)
    part._stack_padded = whole
    return part


def whole_of(stack):
    """Return a stack with the channels behind that pad its pixels; None of others, and of None.

    What writes the stack writes these, too; weights for them are 0.
    """
    return getattr(stack, "_stack_padded", None)
