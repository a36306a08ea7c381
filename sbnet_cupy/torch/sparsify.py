"""sparsify: a whole network on active blocks only."""

import math
import torch
from torch import nn
from torch.utils._pytree import tree_map
from ..blocks import pair
from .network import tensor as T
from .network.table import BlockTable, PictureTable, active_blocks
from .network.weights import Weights

def sparsify(model, block_size=32, capacity=None):
    return SparseModel(model, pair(block_size, "block_size"), capacity)

class SparseModel(nn.Module):
    def __init__(self, model, block, capacity):
        super().__init__()
        self.model, self.block_size, self.capacity = model, block, capacity
        self.break_even = 0.75
        self._weights = Weights()

    def forward(self, x, mask):
        n, _, h, w = x.shape
        mask = mask.reshape(n, h, w) > 0
        on = active_blocks(mask, self.block_size)
        size = (h, w)
        count = int(on.sum())
        if count >= self.break_even * on.numel():
            table = PictureTable(on, self.block_size, size, count == on.numel(), count)
        else:
            table = BlockTable(on, max(count, 1), count, self.block_size, size)
        table.weights = self._weights
        value = table.gather(x.contiguous(memory_format=torch.channels_last), self.block_size, (2, 3))
        y = self.model(T.StackTensor(value, table, self.block_size, size))
        return tree_map(T.dense, y)
