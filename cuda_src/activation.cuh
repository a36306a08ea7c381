// activation.cuh: what may follow a read or a convolution, in float or double.
// ACTIVATION is an index into ACTIVATIONS of sbnet_cupy/ops/activation.py: none, relu, silu, gelu.
#pragma once

#include "common.cuh"

// Rounded by itself, never fused with an addition, as NumPy does.
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE double multiply(double a, double b) { return __dmul_rn(a, b); }

template <int ACTIVATION, typename C>
DEVICE C activate(C t) {
    if constexpr (ACTIVATION == 1) return t < 0 ? C(0) : t;  // relu; NaN stays NaN
    if constexpr (ACTIVATION == 2) return t / (C(1) + exp(-t));  // silu
    if constexpr (ACTIVATION == 3) return t * C(0.5) * (C(1) + erf(t * C(0.70710678118654752440)));
    return t;
}
