// A residual connection with dropout and a norm, and their gradients, in one pass each. Included after dropout.inl.

namespace {

using ResidualCall = transduce::ResidualCall<Number>;

void residual_rows(const ResidualCall& call, int64_t first, int64_t last) {
    const int n = call.width;
    for (int64_t r = first; r < last; r++) {
        const uint64_t at = uint64_t(r) * n;
        const float* x = call.x ? call.x + at : nullptr;
        float* sum = call.sum ? call.sum + at : nullptr;
        Vec total = zero();
        for (int k = 0; k < n; k += W) {
            Vec z = x ? load_part(x + k, n - k) : zero();
            if (call.update) z = z + dropped(call.dropout, load_part(call.update + at + k, n - k), at + k);
            if (sum) store_part(sum + k, n - k, z);
            total = total + z;
        }
        if (!call.statistics) continue;
        const float* z = sum ? sum : x;
        const float mean = call.rms ? 0 : sum_of(total) / float(n);
        Vec squares = zero();
        for (int k = 0; k < n; k += W) {
            const Vec d = first_lanes(load_part(z + k, n - k) - splat(mean), n - k);
            squares = fma(d, d, squares);
        }
        const float inverse = 1 / std::sqrt(sum_of(squares) / float(n) + call.epsilon);
        for (int k = 0; k < n; k += W) {
            const Vec h = (load_part(z + k, n - k) - splat(mean)) * splat(inverse) * load_part(call.gain + k, n - k);
            const Vec shifted = call.shift ? h + load_part(call.shift + k, n - k) : h;
            if (call.output) store_part(call.output + at + k, n - k, shifted);
            if (call.rounded) store_part(call.rounded + at + k, n - k, shifted);
        }
        call.statistics[2 * r] = mean, call.statistics[2 * r + 1] = inverse;
    }
}

// The sum of the gradients of the norm's output and of its rounded copy, for up to `n` elements from `at` on.
Vec norm_gradient(const ResidualCall& call, uint64_t at, int n) {
    const Vec grad = call.grad_output ? load_part(call.grad_output + at, n) : zero();
    return call.grad_rounded ? grad + load_part(call.grad_rounded + at, n) : grad;
}

// Adds the contributions of these rows to grad_gain and grad_shift [padded width].
void residual_rows_backward(const ResidualCall& call, int64_t first, int64_t last, float* grad_gain, float* grad_shift) {
    const int n = call.width;
    for (int64_t r = first; r < last; r++) {
        const uint64_t at = uint64_t(r) * n;
        const float *z = call.normed + at, mean = call.statistics[2 * r], inverse = call.statistics[2 * r + 1];
        Vec sum = zero(), product = zero();
        for (int k = 0; k < n; k += W) {
            const Vec h = first_lanes((load_part(z + k, n - k) - splat(mean)) * splat(inverse), n - k), g = norm_gradient(call, at + k, n - k);
            const Vec d = g * load_part(call.gain + k, n - k);
            sum = sum + d, product = fma(d, h, product);
            store(grad_gain + k, fma(g, h, load(grad_gain + k)));
            store(grad_shift + k, load(grad_shift + k) + g);
        }
        const Vec a = splat(call.rms ? 0 : sum_of(sum) / float(n)), b = splat(sum_of(product) / float(n));
        for (int k = 0; k < n; k += W) {
            const Vec h = (load_part(z + k, n - k) - splat(mean)) * splat(inverse);
            const Vec e = (norm_gradient(call, at + k, n - k) * load_part(call.gain + k, n - k) - a - h * b) * splat(inverse);
            store_part(call.grad_x + at + k, n - k, call.grad_kept ? e + load_part(call.grad_kept + at + k, n - k) : e);
            if (call.grad_update) store_part(call.grad_update + at + k, n - k, dropped(call.dropout, e, at + k));
        }
    }
}

// Computes the gradient of the update, for a residual connection without a norm.
void dropout_rows_backward(const ResidualCall& call, int64_t first, int64_t last) {
    for (uint64_t at = uint64_t(first) * call.width, end = uint64_t(last) * call.width; at < end; at += W)
        store_part(call.grad_update + at, int(end - at < uint64_t(W) ? end - at : W), dropped(call.dropout, load_part(call.grad_output + at, int(end - at < uint64_t(W) ? end - at : W)), at));
}

}  // namespace
