// activation.cuh: what may follow a read or a convolution, in float or double.
// ACTIVATION is an index into ACTIVATIONS of sbnet_cupy/dense/activation.py: none, relu, silu, gelu; or one of those that
// networks on a stack have besides (_CODES of sbnet_cupy/torch/network/cuda.py): hardswish, relu6, hardsigmoid,
// sigmoid. From LEAST_SLOPE on it is leaky relu: the bits of its slope, a float less than 2. Two bits say what else there is:
// with the sign bit the activation comes before the sum with a residual, elsewhere behind it; with SCALED_LAST channels are
// scaled and shifted behind both.
#pragma once

#include "core/common.cuh"

// Rounded by itself, never fused with an addition, as NumPy does.
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE double multiply(double a, double b) { return __dmul_rn(a, b); }

template <typename C>
DEVICE C zero_to_six(C t) {  // NaN stays NaN
    t = t < 0 ? C(0) : t;
    return t > 6 ? C(6) : t;
}

constexpr int LEAST_SLOPE = 0x00800000;  // the bits of the least ordinary float

constexpr int SCALED_LAST = 0x40000000;  // the bits of 2.0f
DEVICE constexpr int before_sum(int activation) { return activation < 0 ? activation & (SCALED_LAST - 1) : 0; }
DEVICE constexpr int after_sum(int activation) { return activation < 0 ? 0 : activation & (SCALED_LAST - 1); }
DEVICE constexpr bool scales_last(int activation) { return (activation & SCALED_LAST) != 0; }

template <int ACTIVATION, typename C>
DEVICE C activate(C t) {
    if constexpr (ACTIVATION >= LEAST_SLOPE) return t < 0 ? t * C(__uint_as_float(ACTIVATION)) : t;  // NaN stays NaN
    if constexpr (ACTIVATION == 1) return t < 0 ? C(0) : t;  // relu; NaN stays NaN
    if constexpr (ACTIVATION == 2) return t / (C(1) + exp(-t));  // silu
    if constexpr (ACTIVATION == 3) return t * C(0.5) * (C(1) + erf(t * C(0.70710678118654752440)));
    if constexpr (ACTIVATION == 4) return t * zero_to_six(t + C(3)) * C(1.0 / 6);  // hardswish
    if constexpr (ACTIVATION == 5) return zero_to_six(t);                         // relu6
    if constexpr (ACTIVATION == 6) return zero_to_six(t + C(3)) * C(1.0 / 6);      // hardsigmoid
    if constexpr (ACTIVATION == 7) return C(1) / (C(1) + exp(-t));                 // sigmoid
    return t;
}

// grad * activation'(t); relu: 0 at 0, and what grad is at NaN.
template <int ACTIVATION, typename Compute>
DEVICE Compute through_activation(Compute grad, Compute t) {
    if constexpr (ACTIVATION == 1) return t <= 0 ? Compute(0) : grad;
    if constexpr (ACTIVATION == 2) {
        const Compute decay = exp(t < 0 ? t : -t), larger = Compute(1) / (Compute(1) + decay),
                      smaller = decay / (Compute(1) + decay);  // sigmoid(|t|) and sigmoid(-|t|)
        const bool positive = !(t < 0);
        return grad * ((positive ? larger : smaller) * (Compute(1) + t * (positive ? smaller : larger)));
    }
    if constexpr (ACTIVATION == 3) {
        const Compute half = t * Compute(0.70710678118654752440);
        return grad * (Compute(0.5) * (Compute(1) + erf(half)) +
                       t * exp(-half * half) * Compute(0.39894228040143267794));
    }
    return grad;
}

// relu in one instruction; NaN stays NaN.
DEVICE float relu(float t) {
#if !defined(SBNET_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(t));
    return result;
#else
    return activate<1>(t);
#endif
}

// Two numbers, activated and rounded to T of 16 bits, the first in the low half; relu is part of the rounding.
template <typename T, int ACTIVATION>
DEVICE u32 pack(float low, float high) {
#if !defined(SBNET_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 result;
    if constexpr (ACTIVATION == 1) {
        if constexpr (Same<T, Half>::value)
            asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
        else
            asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    } else {
        low = activate<ACTIVATION>(low), high = activate<ACTIVATION>(high);
        if constexpr (Same<T, Half>::value)
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
        else
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    }
    return result;
#else
    low = activate<ACTIVATION>(low), high = activate<ACTIVATION>(high);
    return from_compute<T>(low).bits | static_cast<u32>(from_compute<T>(high).bits) << 16;
#endif
}

// 16 bytes of results, activated and rounded.
template <typename T, int ACTIVATION, int COUNT>
DEVICE uint4 rounded(const float (&values)[COUNT]) {
    if constexpr (sizeof(T) == 2) {
        Elements<u32, uint4> packed(zero<uint4>());
#pragma unroll
        for (int e = 0; e < COUNT; e += 2) packed.element[e / 2] = pack<T, ACTIVATION>(values[e], values[e + 1]);
        return packed.vector;
    }
    Elements<T, uint4> result(zero<uint4>());
#pragma unroll
    for (int e = 0; e < COUNT; ++e) result.element[e] = from_compute<T>(activate<ACTIVATION>(values[e]));
    return result.vector;
}

// relu(t * scale + shift) of two numbers of T, rounded once.
template <typename T>
DEVICE u32 fma_relu(u32 t, u32 scale, u32 shift) {
#if !defined(SBNET_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 result;
    if constexpr (Same<T, Half>::value)
        asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(t), "r"(scale), "r"(shift));
    else
        asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(t), "r"(scale), "r"(shift));
    return result;
#else
    const Elements<T, u32> x(t), a(scale), b(shift);
    float sums[2];
    for (int i = 0; i < 2; ++i)
        sums[i] = __fmaf_rn(to_compute<float>(x.element[i]), to_compute<float>(a.element[i]), to_compute<float>(b.element[i]));
    return pack<T, 1>(sums[0], sums[1]);
#endif
}
