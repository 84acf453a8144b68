// Embedding, norm, activation, rotation and recurrent unit of rows. Included after activations.inl.

namespace {

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

void activate(Activation activation, bool gated, float* x, size_t stride, int rows, int width) {
    with_activation(activation, [=](auto kind) {
        for (int r = 0; r < rows; r++)
            for (float *at = x + r * stride, *end = at + width; at < end; at += W) {
                const Vec y = activated<kind.value>(load(at)).value;
                store(at, gated ? y * load(at + width) : y);
            }
    });
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

// The recurrent unit of a decoder (SSRU, Kim et al. 2019).
void recur(const float* gate_value, float* state, int width, float* x) {
    const float* value = gate_value + width;
    for (int i = 0; i < width; i += W) {
        const Vec v = load(value + i), c = fma(sigmoid(load(gate_value + i)), load(state + i) - v, v);
        store(state + i, c);
        store(x + i, load(x + i) + max(c, zero()));
    }
}

}  // namespace
