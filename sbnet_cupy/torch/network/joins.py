"""Results that a network joins along channels are written side by side, so that no kernel copies.

A call learns which results are joined, and the next ones write each of these to its channels of the
joined stack: a part, whose pixels lie further apart than it has channels. Results are told apart by
their number in a call. What was learned is a hint: a result is where it was made, whatever is
joined, and what is not in its place is copied there, if nothing else is.
"""

import math
import threading
import weakref

from ...block_sparse.stack.stack_concat import side_by_side
from .. import _dispatch_state as state
from .current import Current
from .layout import VECTOR, channels_of, new_stack, pitch_of
from .padding import Padding, has_padding, padded, whole_of


class Joins:
    """What the calls of a network join, by numbers of results; a joined stack is one, too.

    Attributes
    ----------
    places : dict
        Of the number of a result: the number of the stack that it is written to, its first channel
        there, its channels and those of that stack. Of that stack itself as well.
    padding : Padding
        Which results are padded; those that have to lie apart are not.
    """

    def __init__(self):
        self.places = {}
        self._widths, self._parents, self._pieces, self._apart = {}, {}, {}, set()
        self.padding = Padding()
        self._lock = threading.Lock()

    def __reduce__(self):
        return type(self), ()  # copies have learned nothing

    def clear(self):
        """Forget everything."""
        self._apart.clear()
        self.padding.clear()
        self.forget_joins()

    def forget_joins(self):
        """Forget what is joined."""
        with self._lock:
            for known in (self._widths, self._parents, self._pieces):
                known.clear()
            self.places = {}

    def pads(self, number):
        """Whether a result is padded."""
        return number in self.padding.numbers and number not in self._apart

    def keep_apart(self, number):
        """Note that a result has to be copied where it is a part: it gets a stack of its own."""
        with self._lock:
            if number not in self._apart:
                self._apart.add(number)
                self._parents.pop(number, None)
                self._find_places()

    def learn(self, number, width, pieces, lanes):
        """Note of what a joined stack of so many channels was made.

        ``pieces`` are (number, first channel of its own, channels, all of its channels, first
        channel in the joined stack) of the results among them; ``lanes`` are the channels of a
        vector.
        """
        with self._lock:
            if self._pieces.get(number) == (width, pieces):
                return
            self._pieces[number] = width, pieces
            self._parents = {n: p for n, p in self._parents.items() if p[0] != number}
            self._note_width(number, width)
            covered = {}  # of a stack: the shift of its channels, and those that are joined
            for its, first, channels, own, at in pieces:
                self._note_width(its, own)
                root, begin = self._root(its, number)
                shift, parts = covered.setdefault(root, (at - begin - first, set()))
                if shift == at - begin - first:  # not twice
                    parts.add((begin + first, begin + first + channels))
            for root, (shift, parts) in covered.items():
                aligned = all(n % lanes == 0 for n in (shift, width, self._widths[root]))
                whole = aligned and _covers(parts, self._widths[root])
                if whole and root != number and root not in self._apart:
                    self._parents[root] = number, shift
            self._find_places()

    def _note_width(self, number, width):
        if self._widths.get(number) != width:  # so it lies elsewhere, and so do its parts
            self._widths[number] = width
            self._parents.pop(number, None)
            self._parents = {n: p for n, p in self._parents.items() if p[0] != number}

    def _root(self, number, end=math.inf):
        """Return the stack that a result is a part of, in the end, and its first channel there.

        Of those with numbers before ``end``: what is joined has a number before that of the joined
        stack. Others were learned of a call that joined something else.
        """
        begin = 0
        while number in self._parents and self._parents[number][0] < end:
            number, shift = self._parents[number]
            begin += shift
        return number, begin

    def _find_places(self):
        found = {}
        for number in self._parents:
            root, begin = self._root(number)
            width = self._widths[root]
            found[number] = root, begin, self._widths[number], width
            found[root] = root, 0, width, width
        self.places = found


def _covers(parts, width):
    """Whether ranges of channels are all of so many, each of them once."""
    end = 0
    for first, last in sorted(parts):
        if first != end:
            return False
        end = last
    return end == width


class JoiningCall:
    """The results of one call, and the stacks that they are written to."""

    def __init__(self, joins):
        self.joins, self.count = joins, 0
        self.wholes = {}  # stacks that are not joined yet, by number
        self.made = {}  # memory and stream -> (its channels, [(first channel, channels, number)])
        self.unread = set()  # numbers of padded results whose padding nobody has read
        self.padded = weakref.WeakValueDictionary()  # memory -> the padded result there

    def place(self, like, block, channels, pads=False, sources=()):
        """Return memory for the next result, where it is joined to others if that is known.

        Where it is known that whole vectors are asked for, and it ``pads`` its pixels with channels
        of zeros, it has these. ``sources`` are stacks that have to have them first.
        """
        number = self.count
        self.count += 1
        place = self.joins.places.get(number)
        part = place and self._part(place, like, block, channels)
        if part is not None:
            self.made[_memory_of(part)][1].append((place[1], channels, number))
            return part
        if has_padding(channels, like.element_size()):
            if sources:
                origins = (self._origin(s) for s in sources if whole_of(s) is None)
                self.joins.padding.note_sources(number, [found[0] for found in origins if found])
            if pads and self.joins.pads(number):
                part = padded(like, block, channels)
                self.padded[part.untyped_storage().data_ptr()] = part
                self.unread.add(number)
                self.made[_memory_of(part)] = whole_of(part).shape[1], [(0, channels, number)]
                return part
        part = new_stack(like, like.shape[0], block, channels)
        self.made[_memory_of(part)] = channels, [(0, channels, number)]
        return part

    def in_vectors(self, stack):
        """Return :func:`whole_of` a stack that is read in whole vectors, or the stack itself.

        Then it has to be copied for that, which is noted.
        """
        whole, found = whole_of(stack), self._origin(stack)
        if found is not None and found[1:] == (0, stack.shape[1]):
            if whole is None:
                self.joins.padding.add(found[0])
            else:
                self.unread.discard(found[0])
        return stack if whole is None else whole

    def unpad(self, stack):
        """Read the padding of a stack no more, where something is written to it or a part of it."""
        part = self.padded.get(stack.untyped_storage().data_ptr())
        if part is not None:
            vars(part).pop("_stack_padded", None)

    def take_back(self, part):
        """Take back the last place: no kernel writes a result there."""
        self.count -= 1
        self.made[_memory_of(part)][1].pop()

    def join(self, stacks, channels, like, block):
        """Return (memory of the joined stack, which of the stacks have to be copied there).

        Parameters
        ----------
        stacks : list of tensor or None
            Those that are joined as they are; None in place of others.
        channels : sequence of int
            Channels of each in the joined stack.
        """
        number, width, lanes = self.count, sum(channels), VECTOR // like.element_size()
        self.count += 1
        firsts = side_by_side(channels)
        pieces = []
        for stack, count, at in zip(stacks, channels, firsts, strict=True):
            found = None if stack is None else self._origin(stack)
            if found is not None:
                own, first, all_channels = found
                pieces.append((own, first, count, all_channels, at))
        self.joins.learn(number, width, tuple(pieces), lanes)
        place = self.joins.places.get(number)
        out = None
        if place is not None and place[0] in self.wholes:
            out = self._found(place, stacks, channels, firsts, like, block)
        self.wholes.pop(number, None)
        if out is not None:
            self.made[_memory_of(out)][1].append((place[1], width, number))
            left = [k for k, s in enumerate(stacks) if not _lies_at(s, out, firsts[k])]
            return out, left
        out = new_stack(like, like.shape[0], block, width)
        self.made[_memory_of(out)] = width, [(0, width, number)]
        return out, list(range(len(stacks)))

    def copied(self, stack):
        """Note that a result that is a part was copied, as a kernel does not read parts."""
        found = self._origin(stack)
        if found is not None and found[1:] == (0, stack.shape[1]):
            self.joins.keep_apart(found[0])

    def finish(self):
        """Forget what was learned in vain: stacks that were not joined, padding nobody has read."""
        if self.wholes:
            self.joins.forget_joins()
        self.joins.padding.drop(self.unread)

    def _origin(self, stack):
        """Return (number, first channel of it, its channels) of the result that holds a stack."""
        pitch, entries = self.made.get(_memory_of(stack), (None, ()))
        if pitch is None or pitch_of(stack) != pitch:  # others are every second pixel, or so
            return None
        first, channels = stack.storage_offset() % pitch, stack.shape[1]
        holds = [e for e in entries if e[0] <= first and first + channels <= e[0] + e[1]]
        if not holds:
            return None
        begin, its_channels, number = min(holds, key=lambda e: e[1])
        return number, first - begin, its_channels

    def _taken(self, whole):
        """Return the entries of the results in a whole, or None if it is of another stream.

        Memory is only used again by the stream that it was taken on, so other ones have their own.
        """
        return self.made.get(_memory_of(whole), (None, None))[1]

    def _part(self, place, like, block, channels):
        """Return the part of a whole that a result is written to, or None where it cannot be."""
        root, first, width, all_channels = place
        if width != channels:
            return None
        whole = self.wholes.get(root)
        if whole is None:
            whole = new_stack(like, like.shape[0], block, all_channels)
            self.wholes[root], self.made[_memory_of(whole)] = whole, (all_channels, [])
        taken = self._taken(whole)
        if taken is None or not _fits(whole, like, block, place):
            return None
        return channels_of(whole, first, width) if _are_free(taken, first, width) else None

    def _found(self, place, stacks, channels, firsts, like, block):
        """Return the part of a whole that is a joined stack, or None if others lie there."""
        root, first, width, _ = place
        whole = self.wholes[root]
        if width != sum(channels) or not _fits(whole, like, block, place):
            return None
        taken = self._taken(whole)
        if taken is None:
            return None
        out = channels_of(whole, first, width)
        each = zip(stacks, channels, firsts, strict=True)
        right = all(_lies_at(s, out, at) or _are_free(taken, first + at, n) for s, n, at in each)
        return out if right else None


def _are_free(taken, first, count):
    """Whether so many channels, from the first one on, are of no result."""
    return all(begin + n <= first or first + count <= begin for begin, n, _ in taken)


def _memory_of(stack):
    """Return the address of the memory of a stack, and the stream that uses it."""
    return stack.untyped_storage().data_ptr(), _stream_of(stack)


def _stream_of(stack):
    """Return the current stream of a GPU, None of other devices."""
    return state.current_stream(stack.get_device()) if stack.is_cuda else None


def _fits(whole, like, block, place):
    """Whether a stack has the dtype, rows and pixels of a result, and whole vectors at its place.

    What was learned may be of another call: of other channels, or of another dtype.
    """
    _, first, width, channels = place
    lanes, sizes = VECTOR // like.element_size(), (like.shape[0], channels, *block)
    aligned = all(n % lanes == 0 for n in (first, width, channels))
    there = whole.dtype == like.dtype and tuple(whole.shape) == sizes
    return aligned and there and first + width <= channels


def _lies_at(stack, out, first):
    """Whether a stack is channels of another already, from the first on."""
    if stack is None:
        return False
    return stack.data_ptr() == out.data_ptr() + first * out.element_size() and all(
        n == 1 or a == b for n, a, b in zip(stack.shape, stack.stride(), out.stride(), strict=True)
    )


_CALL = Current()  # that runs


def joining(call):
    """Return a context for a call, in which copies of its results are noted; it may be None."""
    return _CALL.set_to(call)


def note_copy(stack):
    """Note that a stack was copied, since a kernel does not read parts of others."""
    if _CALL.value is not None:
        _CALL.value.copied(stack)


def place(like, table, block, channels, pads=False, sources=()):
    """Return memory for a result, a stack ``[M, C, *block]`` of the dtype of ``like``.

    Its pixels may lie further apart than it has channels: see ``layout.pitch_of``. Only where it
    ``pads`` may there be a :func:`whole_of` it, which is to be written; ``sources`` are stacks of
    which there has to be one, too.
    """
    if table.joins is None:
        return new_stack(like, like.shape[0], block, channels)
    return table.joins.place(like, block, channels, pads, sources)


def place_like(sources, table, block, channels):
    """Return memory for a result of such stacks, channel by channel, and what is to be used.

    These are the stacks and the memory, all with the channels that pad them or all without.
    """
    pads = all(whole_of(s) is not None and s.dtype == sources[0].dtype for s in sources)
    y = place(sources[0], table, block, channels, pads, sources)
    if whole_of(y) is None:
        return y, sources, y
    return y, [table.joins.in_vectors(s) for s in sources], whole_of(y)


def in_vectors(stack, table):
    """Return a stack with the channels that pad its pixels to whole vectors, if it has any."""
    if table.joins is None or not has_padding(stack.shape[1], stack.element_size()):
        return stack
    return table.joins.in_vectors(stack)


def unpad(stack, table):
    """Note that something is written to a stack, or a part of one, in place.

    What was not finite may be then, but for the padding, which was made of it: it is not read.
    """
    if table.joins is not None:
        table.joins.unpad(stack)


def take_back(part, table):
    """Take back the place that was found last, where no kernel writes the result."""
    if table.joins is not None:
        table.joins.take_back(part)


def join(stacks, channels, like, table, block):
    """Return memory for joined stacks, and which have to be copied there: :meth:`JoiningCall.join`.

    All of them have to, where no results are written side by side.
    """
    if table.joins is None:
        return new_stack(like, like.shape[0], block, sum(channels)), list(range(len(stacks)))
    return table.joins.join(stacks, channels, like, block)
