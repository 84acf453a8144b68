// A residual connection with dropout and a norm, and their gradients, in one pass each. Included after attention_training.inl.

namespace {

using transduce::ResidualCall;

// Numbers of a row from `at` on; a part at the end.
inline __mmask16 lanes(int n) { return __mmask16((1u << (n < W ? n : W)) - 1); }
inline Vec load_update(const Bf16* p, int n) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(n), p)), 16); }
inline void store_part(float* p, int n, Vec a) { _mm512_mask_storeu_ps(p, lanes(n), a); }
inline void store_update(Bf16* p, int n, Vec a) { _mm256_mask_storeu_epi16(p, lanes(n), (__m256i)_mm512_cvtneps_pbh(a)); }

// One number of 32 random bits for each of 16 elements from number `first` on: a hash of the seed and the number (MurmurHash3's mixing).
inline __m512i random_bits(uint64_t seed, uint64_t first) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i x = _mm512_add_epi32(_mm512_set1_epi32(int(uint32_t(first))), lane);
    x = _mm512_xor_si512(_mm512_mullo_epi32(x, _mm512_set1_epi32(int(0x9e3779b1u))), _mm512_set1_epi32(int(uint32_t(seed) ^ uint32_t(first >> 32))));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_add_epi32(_mm512_mullo_epi32(x, _mm512_set1_epi32(int(0x85ebca6bu))), _mm512_set1_epi32(int(uint32_t(seed >> 32))));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 13));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(int(0xc2b2ae35u)));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

// What is left of an update: a number is dropped where its random bits are below the threshold.
inline Vec dropped(const ResidualCall& call, Vec update, uint64_t at) {
    if (!call.drop_below) return update;
    const __mmask16 kept = _mm512_cmpge_epu32_mask(random_bits(call.seed, at), _mm512_set1_epi32(int(call.drop_below)));
    return _mm512_maskz_mul_ps(kept, update, splat(call.keep_scale));
}

void residual_rows(const ResidualCall& call, int64_t first, int64_t last) {
    const int n = call.width;
    for (int64_t r = first; r < last; r++) {
        const uint64_t at = uint64_t(r) * n;
        const float* x = call.x + at;
        float* sum = call.sum ? call.sum + at : nullptr;
        Vec total = zero();
        for (int k = 0; k < n; k += W) {
            Vec z = load_part(x + k, n - k);
            if (call.update) z = z + dropped(call, load_update(call.update + at + k, n - k), at + k);
            if (sum) store_part(sum + k, n - k, z);
            total = total + z;
        }
        if (!call.output) continue;
        const float* z = sum ? sum : x;
        const float mean = call.rms ? 0 : sum_of(total) / float(n);
        Vec squares = zero();
        for (int k = 0; k < n; k += W) {
            const Vec d = _mm512_maskz_sub_ps(lanes(n - k), load_part(z + k, n - k), splat(mean));
            squares = fma(d, d, squares);
        }
        const float inverse = 1 / std::sqrt(sum_of(squares) / float(n) + call.epsilon);
        for (int k = 0; k < n; k += W) {
            const Vec h = (load_part(z + k, n - k) - splat(mean)) * splat(inverse) * load_part(call.gain + k, n - k);
            store_part(call.output + at + k, n - k, call.shift ? h + load_part(call.shift + k, n - k) : h);
        }
        call.statistics[2 * r] = mean, call.statistics[2 * r + 1] = inverse;
    }
}

// grad_gain, grad_shift [width, padded]: of these rows.
void residual_rows_backward(const ResidualCall& call, int64_t first, int64_t last, float* grad_gain, float* grad_shift) {
    const int n = call.width;
    for (int64_t r = first; r < last; r++) {
        const uint64_t at = uint64_t(r) * n;
        const float *grad = call.grad_output + at, *z = call.normed + at, mean = call.statistics[2 * r], inverse = call.statistics[2 * r + 1];
        Vec sum = zero(), product = zero();
        for (int k = 0; k < n; k += W) {
            const Vec h = _mm512_maskz_mul_ps(lanes(n - k), load_part(z + k, n - k) - splat(mean), splat(inverse)), g = load_part(grad + k, n - k);
            const Vec d = g * load_part(call.gain + k, n - k);
            sum = sum + d, product = fma(d, h, product);
            store(grad_gain + k, fma(g, h, load(grad_gain + k)));
            store(grad_shift + k, load(grad_shift + k) + g);
        }
        const Vec a = splat(call.rms ? 0 : sum_of(sum) / float(n)), b = splat(sum_of(product) / float(n));
        for (int k = 0; k < n; k += W) {
            const Vec h = (load_part(z + k, n - k) - splat(mean)) * splat(inverse);
            const Vec e = (load_part(grad + k, n - k) * load_part(call.gain + k, n - k) - a - h * b) * splat(inverse);
            store_part(call.grad_x + at + k, n - k, e);
            if (call.grad_update) store_update(call.grad_update + at + k, n - k, dropped(call, e, at + k));
        }
    }
}

// Without a norm: the gradient of the update alone.
void dropout_rows_backward(const ResidualCall& call, int64_t first, int64_t last) {
    for (uint64_t at = uint64_t(first) * call.width, end = uint64_t(last) * call.width; at < end; at += W)
        store_update(call.grad_update + at, int(end - at < uint64_t(W) ? end - at : W), dropped(call, load_part(call.grad_output + at, int(end - at < uint64_t(W) ? end - at : W)), at));
}

}  // namespace
