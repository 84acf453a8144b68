// Embedding, norm, activation and rotation of rows. Included by target_*.cpp after vec.h.

namespace {

using transduce::Activation;
using transduce::NormKind;
using transduce::NormWeights;

void norm_row(const NormWeights& w, float* x, const float* pending, bool keep, float* out) {
    const int whole = w.width / W * W, rest = w.width - whole;
    const int end = rest ? whole + W : whole;
    auto read = [&](int i) { return pending ? load(x + i) + load(pending + i) : load(x + i); };
    auto sum = [&](auto term) {  // over the width; four sums, so that additions overlap
        Vec part[4] = {zero(), zero(), zero(), zero()};
        for (int i = 0, j = 0; i < whole; i += W, j = (j + 1) & 3) part[j] = part[j] + term(i);
        if (rest) part[0] = part[0] + first_lanes(term(whole), rest);
        return sum_of((part[0] + part[1]) + (part[2] + part[3]));
    };
    const float n = float(w.width);
    const Vec mean = w.kind == NormKind::layer ? splat(sum(read) / n) : zero();
    const float square = sum([&](int i) {
        const Vec d = read(i) - mean;
        return d * d;
    });
    const Vec scale = splat(1 / std::sqrt(square / n + w.epsilon));
    for (int i = 0; i < end; i += W) {
        const Vec value = read(i);
        if (keep) store(x + i, value);
        store(out + i, fma((value - mean) * scale, load(w.gain.data() + i), load(w.bias.data() + i)));
    }
}

void norm(const NormWeights& w, float* x, size_t stride, int rows, const float* pending, bool keep, float* out) {
    for (int r = 0; r < rows; r++) norm_row(w, x + r * stride, pending, keep, out + r * stride);
}

inline Vec sigmoid(Vec x) { return splat(1.f) / (splat(1.f) + exp(zero() - x)); }

// The normal distribution function, by erf(z) = 1 - t P(t) exp(-z^2), t = 1 / (1 + p z) (Abramowitz and Stegun 7.1.26); its
// error of 1.5e-7 is that of float32 numbers near 1.
inline Vec normal_distribution(Vec x) {
    const Vec z = abs(x) * splat(0.70710678f), t = splat(1.f) / fma(z, splat(0.3275911f), splat(1.f));
    Vec p = fma(splat(1.061405429f), t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const Vec half_tail = p * t * exp(zero() - z * z) * splat(0.5f);  // of -|x|
    // x >= 0: 1 - tail; else tail. max(sign, 0) selects without a branch: sign is 1 or -1.
    const Vec positive = min(max(x * splat(1e38f), zero()), splat(1.f));
    return fma(splat(1.f) - (half_tail + half_tail), positive, half_tail);
}

template <Activation KIND>
inline Vec activated(Vec x) {
    switch (KIND) {
    case Activation::relu: return max(x, zero());
    case Activation::silu: return x * sigmoid(x);
    case Activation::gelu: return x * normal_distribution(x);
    case Activation::gelu_tanh: {
        const Vec inner = x * fma(x * x, splat(0.044715f * 0.79788456f), splat(0.79788456f));
        return x * sigmoid(inner + inner);  // (1 + tanh(z)) / 2 = sigmoid(2 z)
    }
    }
    return x;
}

template <Activation KIND>
void activate_rows(bool gated, float* x, size_t stride, int rows, int width) {
    for (int r = 0; r < rows; r++, x += stride) {
        for (int i = 0; i < width; i += W) {
            const Vec y = activated<KIND>(load(x + i));
            store(x + i, gated ? y * load(x + width + i) : y);
        }
    }
}

void activate(Activation kind, bool gated, float* x, size_t stride, int rows, int width) {
    switch (kind) {
    case Activation::relu: return activate_rows<Activation::relu>(gated, x, stride, rows, width);
    case Activation::gelu: return activate_rows<Activation::gelu>(gated, x, stride, rows, width);
    case Activation::gelu_tanh: return activate_rows<Activation::gelu_tanh>(gated, x, stride, rows, width);
    case Activation::silu: return activate_rows<Activation::silu>(gated, x, stride, rows, width);
    }
}

void embed(const float* embedding, float scale, const float* position, int width, float* out) {
    for (int i = 0; i < width; i += W) {
        const Vec scaled = load(embedding + i) * splat(scale);
        store(out + i, position ? scaled + load(position + i) : scaled);
    }
}

void rotate(float* x, int heads, int head_width, int half, const float* cos, const float* sin) {
    for (int h = 0; h < heads; h++, x += head_width) {
        for (int i = 0; i < half; i++) {
            const float first = x[i], second = x[i + half];
            x[i] = first * cos[i] - second * sin[i];
            x[i + half] = second * cos[i] + first * sin[i];
        }
    }
}

}  // namespace
