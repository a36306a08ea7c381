"""What objects that hold arrays print: a short line, for which nothing waits for a device."""

import copy
import pickle

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core.readable import describe_array, place_of

TABLE = sb.block_table(np.eye(64)[None], 2, capacity=40)
WEIGHTS = sb.BottleneckWeights.random(32, 16)
PACKED = sb.PackedWeights(np.ones((3, 3, 16, 32), np.float16), bias=np.ones(32), precision="ieee")
UNIT = sb.PackedBottleneck(WEIGHTS)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (TABLE, "BlockTable: 32 blocks, grid (1, 32, 32), block_size (2, 2), image_size (64, 64), "
                "capacity 40, on cpu"),
        (WEIGHTS, "BottleneckWeights: w1 float32 (1, 1, 32, 16) on cpu, w2 (3, 3, 16, 16), "
                  "w3 (1, 1, 16, 32)"),
        (PACKED, "PackedWeights: float16 (3, 3, 16, 32) on cpu, HWIO, precision ieee, with bias"),
        (UNIT, "PackedBottleneck: w1 float32 (1, 1, 32, 16) on cpu, w2 (3, 3, 16, 16), "
               "w3 (1, 1, 16, 32), precision None"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_of_numpy(value, text):
    assert repr(value) == text
    for other in (copy.copy(value), pickle.loads(pickle.dumps(value))):
        assert repr(other) == text


def test_of_pytorch(torch):
    for value in (TABLE, WEIGHTS, PACKED, UNIT):
        assert repr(value._map_arrays(torch.from_numpy)) == repr(value)
    with torch._subclasses.FakeTensorMode() as mode:  # tensors without numbers
        table = TABLE._map_arrays(lambda array: mode.from_tensor(torch.from_numpy(array)))
        assert repr(table).startswith("BlockTable: grid (1, 32, 32), ")


def test_of_a_table_without_a_count():
    none = sb.BlockTable(np.zeros(0, np.int32), *TABLE._arrays()[1:], 2, 64)
    assert repr(none).startswith("BlockTable: grid (1, 32, 32), ")


def test_while_jax_traces_and_of_what_is_no_array(jax, sbj):
    weights = jax.tree.map(jax.numpy.asarray, WEIGHTS)
    seen = []
    jax.jit(lambda weights: seen.append(repr(weights)))(weights)
    assert seen == [repr(WEIGHTS).replace(" on cpu", "")]
    table = sb.BlockTable(*map(jax.numpy.asarray, TABLE._arrays()), 2, 64)
    assert repr(table).startswith("BlockTable: grid (1, 32, 32), ")  # there is no count yet
    array = jax.numpy.ones(3)
    array.delete()
    assert describe_array(array) == "float32 (3,)" and place_of(None) == ""
    assert describe_array(None) == "NoneType"
