"""What the last call of a network computed: overflow, shares of its layers, a table of them."""

import torch

from ...errors import CapacityError
from .ends import check_call
from .options import check_outside
from .trace import Trace, lines


class Report:
    """The part of a :class:`SparseModel` that says what its last call did."""

    @property
    def overflowed(self):
        """Whether more blocks were active in the last call than ``capacity`` has room for.

        Waits for the device. False before the first call.
        """
        if self._last is None or self._last[1][0] is None:
            return False
        count, capacity = self._last[1]
        return int(count) > capacity

    def check(self):
        """Raise CapacityError if the last call had more active blocks than room for them."""
        if self.overflowed:
            count, capacity = self._last[1]
            raise CapacityError(
                f"capacity must have room for all active blocks; {int(count)} were active in the "
                f"last call, and there is room for {capacity}"
            )

    def _rows(self):
        """Return the layers of the last call."""
        return [] if self._last is None else self._traces.rows(self._last[0])

    def _share(self):
        """Return which share of all blocks the last call computed."""
        (_, _, _, whole, _), (count, capacity), total = self._last
        return 1.0 if whole or not total else min(int(count), capacity) / total

    def computed(self):
        """Return which share of its blocks each layer computed in the last call.

        Waits for the device. Layers that ran on the whole image have 1, as all have where so many
        blocks were active that whole images were faster.

        Returns
        -------
        shares : dict of str to float
            By the layer's name; empty before the first call.
        """
        if self._last is None:
            return {}
        share, rows = self._share(), self._rows()
        worst = {}
        for row in rows:
            if row.flops or row.where == "image":
                here = share if row.where == "stack" else 1.0
                worst[row.name] = max(worst.get(row.name, 0.0), here)
        return worst

    @property
    def sparse_layers(self):
        """Names of the layers of the last call that multiplied on the stack."""
        rows = self._rows()
        return list(dict.fromkeys(r.name for r in rows if r.flops and r.where == "stack"))

    @property
    def dense_layers(self):
        """Name of each layer of the last call that ran on the whole image, and its functions."""
        rows = self._rows()
        found = {}
        for row in rows:
            if row.where == "image" and row.kind not in found.setdefault(row.name, []):
                found[row.name].append(row.kind)
        return {name: ", ".join(kinds) for name, kinds in found.items()}

    def table(self):
        """Return a table of the last call's layers as text.

        Each has its function, whether it ran on the stack or on the whole image, the work of the
        dense layer and the share of it that was computed. Before the first call the modules are
        listed alone. Layers are looked for at the first call of its kind (the image's size and
        dtype, training, other arguments), and again after the network has changed. Of a network
        whose calls change it themselves, by counting for example, the first call alone is listed.
        """
        if self._last is None:
            kinds = [(name, type(m).__name__) for name, m in self.model.named_modules()]
            width = max(len(name) for name, _ in kinds)
            return "\n".join(f"{name:{width}}  {kind}, not called yet" for name, kind in kinds)
        return lines(self._rows(), self._share(), self.model)

    @torch.no_grad()
    def profile(self, x, mask, *args, outside=None, **kwargs):
        """Return the table of one call with the time of each layer.

        It is called twice, the second time for the times, with the arguments of a call. Running
        statistics in training follow the first call alone. On a GPU every layer is waited for, so
        the sum is more than the time of a call.
        """
        self(x, mask, *args, outside=outside, **kwargs)
        outside = check_outside(self.outside if outside is None else outside)
        table, counted = self._table(x, check_call(x, mask), args, kwargs)
        table.trace = Trace(self.model, timing=True)
        buffers = [(b, b.clone()) for b in self.model.buffers()] if self.training else ()
        try:
            self._run(table, x, args, kwargs, outside)
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
        whole = 1.0 if table.whole else min(int(counted[0]), counted[1]) / max(table.on.numel(), 1)
        return lines(table.trace.rows, whole, self.model, profile=True)
