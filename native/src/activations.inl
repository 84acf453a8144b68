// Activations of feed-forward networks, for decoding and training. Included after vec.h.

namespace {

using transduce::Activation;

inline Vec sigmoid(Vec x) { return splat(1.f) / (splat(1.f) + exp(zero() - x)); }

// The value of an activation and its derivative. The compiler removes the derivative where it is not used.
struct Activated {
    Vec value, slope;
};

// x times the normal distribution function, by erf(z) = 1 - t P(t) exp(-z^2), t = 1 / (1 + p z) (Abramowitz and Stegun 7.1.26); its
// error of 1.5e-7 is that of float32 numbers near 1.
inline Activated gelu(Vec x) {
    const Vec z = abs(x) * splat(0.70710678f), t = splat(1.f) / fma(z, splat(0.3275911f), splat(1.f));
    Vec p = fma(splat(1.061405429f), t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const Vec density = exp(zero() - z * z), half_tail = p * t * density * splat(0.5f);  // half_tail: the distribution function at -|x|
    // x >= 0: 1 - tail; else tail. max(sign, 0) selects without a branch: sign is 1 or -1.
    const Vec positive = min(max(x * splat(1e38f), zero()), splat(1.f));
    const Vec below = fma(splat(1.f) - (half_tail + half_tail), positive, half_tail);
    return {x * below, fma(x * splat(0.39894228f), density, below)};
}

template <Activation KIND>
inline Activated activated(Vec x) {
    switch (KIND) {
    case Activation::relu: return {max(zero(), x), zero()};  // NaN if x is; its derivative follows from the result
    case Activation::silu: {
        const Vec s = sigmoid(x);
        return {x * s, fma(x * s, splat(1.f) - s, s)};
    }
    case Activation::gelu: return gelu(x);
    case Activation::gelu_tanh: {
        const Vec square = x * x, inner = x * fma(square, splat(0.044715f * 0.79788456f), splat(0.79788456f));
        const Vec s = sigmoid(inner + inner);  // (1 + tanh(z)) / 2 = sigmoid(2 z)
        const Vec slope = fma(square, splat(6 * 0.044715f * 0.79788456f), splat(2 * 0.79788456f));
        return {x * s, fma(x * s * (splat(1.f) - s), slope, s)};
    }
    }
    return {x, zero()};
}

// Calls `work` with the activation as a compile-time constant.
template <class Work>
void with_activation(Activation kind, Work work) {
    switch (kind) {
    case Activation::relu: return work(std::integral_constant<Activation, Activation::relu>());
    case Activation::gelu: return work(std::integral_constant<Activation, Activation::gelu>());
    case Activation::gelu_tanh: return work(std::integral_constant<Activation, Activation::gelu_tanh>());
    case Activation::silu: return work(std::integral_constant<Activation, Activation::silu>());
    }
}

}  // namespace
