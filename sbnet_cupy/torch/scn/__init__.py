"""SparseConvNet's layers by its names: ``import sbnet_cupy.torch.scn as scn``.

Arguments and their order, the shapes of parameters and the names in state dicts are those of
SparseConvNet (https://github.com/facebookresearch/SparseConvNet, B. Graham and others), so that its
scripts run and its checkpoints load. The layers compute with :mod:`sbnet_cupy.torch`.

These differ: sizes that do not fit raise :class:`sbnet_cupy.ShapeError`, where SparseConvNet
asserts; the sites of strided layers are in leaf order; gradients are the same bits on each run.
:func:`set_capacities` fixes shapes, for CUDA graphs.
"""

from .batches import InputBatch
from .capacities import set_capacities
from .containers import (
    AddTable,
    CheckpointedSequential,
    ConcatTable,
    Identity,
    JoinTable,
    Sequential,
    add_feature_planes,
    concatenate_feature_planes,
)
from .convolutions import (
    Convolution,
    Deconvolution,
    FullConvolution,
    NetworkInNetwork,
    SubmanifoldConvolution,
    TransposeConvolution,
    ValidConvolution,
)
from .functions import (
    AddCoords,
    append_tensors,
    batch_location_tensors,
    compare_sparse,
    pad_with_batch_idx,
    prepare_BLInput,
    voxelize_pointcloud,
)
from .graphs import graphed
from .inputs import (
    BLInputLayer,
    BLOutputLayer,
    DenseToSparse,
    InputLayer,
    InputLayerInput,
    OutputLayer,
    SparseToDense,
)
from .lattices import (
    MultiscaleShapeContext,
    PermutohedralSubmanifoldConvolution,
    RandomizedStrideConvolution,
    RandomizedStrideMaxPooling,
    ShapeContext,
    permutohedral_basis,
)
from .networks import (
    BatchNormELU,
    FullConvolutionalNetIntegratedLinear,
    FullyConvolutionalNet,
    SparseResNet,
    SparseVggNet,
    UNet,
)
from .norms import (
    ELU,
    SELU,
    BatchNormalization,
    BatchNormLeakyReLU,
    BatchNormReLU,
    BatchwiseDropout,
    Dropout,
    LeakyReLU,
    MeanOnlyBNLeakyReLU,
    ReLU,
    Sigmoid,
    SparseGroupNorm,
    Tanh,
)
from .pooling import AveragePooling, MaxPooling, UnPooling
from .sparsify import Sparsify, SparsifyFCS
from .tensors import Metadata, SparseConvNetTensor, toLongTensor

__all__ = [
    "ELU",
    "SELU",
    "AddCoords",
    "AddTable",
    "AveragePooling",
    "BLInputLayer",
    "BLOutputLayer",
    "BatchNormELU",
    "BatchNormLeakyReLU",
    "BatchNormReLU",
    "BatchNormalization",
    "BatchwiseDropout",
    "CheckpointedSequential",
    "ConcatTable",
    "Convolution",
    "Deconvolution",
    "DenseToSparse",
    "Dropout",
    "FullConvolution",
    "FullConvolutionalNetIntegratedLinear",
    "FullyConvolutionalNet",
    "Identity",
    "InputBatch",
    "InputLayer",
    "InputLayerInput",
    "JoinTable",
    "LeakyReLU",
    "MaxPooling",
    "MeanOnlyBNLeakyReLU",
    "Metadata",
    "MultiscaleShapeContext",
    "NetworkInNetwork",
    "OutputLayer",
    "PermutohedralSubmanifoldConvolution",
    "RandomizedStrideConvolution",
    "RandomizedStrideMaxPooling",
    "ReLU",
    "Sequential",
    "ShapeContext",
    "Sigmoid",
    "SparseConvNetTensor",
    "SparseGroupNorm",
    "SparseResNet",
    "SparseToDense",
    "SparseVggNet",
    "Sparsify",
    "SparsifyFCS",
    "SubmanifoldConvolution",
    "Tanh",
    "TransposeConvolution",
    "UNet",
    "UnPooling",
    "ValidConvolution",
    "add_feature_planes",
    "append_tensors",
    "batch_location_tensors",
    "compare_sparse",
    "concatenate_feature_planes",
    "graphed",
    "pad_with_batch_idx",
    "permutohedral_basis",
    "prepare_BLInput",
    "set_capacities",
    "toLongTensor",
    "voxelize_pointcloud",
]  # fmt: skip
