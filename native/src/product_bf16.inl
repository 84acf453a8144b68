// Products of bfloat16 numbers with sums in float32, for training. Included by target_bf16.cpp after vec.h.
//
// C [rows, 64] = A B. A: rows of numbers. B, packed: panels of 64 columns [pairs of rows][64][2], so that one instruction multiplies a
// pair of A with 16 pairs of B.

namespace {

using transduce::kPanelColumns;
using Bf16 = uint16_t;
constexpr int kVecs = kPanelColumns / W, kMostRows = 6;  // 24 sums in registers

inline __m512bh pairs_of(Vec low, Vec high) { return _mm512_cvtne2ps_pbh(high, low); }
// Numbers of two rows side by side: a0 b0 a1 b1 ...
inline __m512i interleaved(Vec a, Vec b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                           18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)pairs_of(a, b));
}
inline void store_bf16(Bf16* to, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(a)); }
inline Vec load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << (n < W ? n : W)) - 1), p); }

template <int ROWS>
void product_rows(const Bf16* a, size_t stride, const Bf16* b, int pairs, float* c, size_t c_stride, bool add) {
    Vec sum[ROWS][kVecs];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < kVecs; v++) sum[r][v] = add ? load(c + r * c_stride + v * W) : zero();
    for (int p = 0; p < pairs; p++, a += 2, b += 2 * kPanelColumns) {
        __m512bh column[kVecs];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; v++) column[v] = (__m512bh)_mm512_loadu_si512(b + v * 2 * W);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            int pair;
            std::memcpy(&pair, a + r * stride, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, column[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < kVecs; v++) store(c + r * c_stride + v * W, sum[r][v]);
}

// C [rows, 64] = A [rows, 2 pairs] times a panel, added to C if `add`.
void product_bf16(const Bf16* a, size_t stride, int rows, const Bf16* b, int pairs, float* c, size_t c_stride, bool add) {
    for (; rows >= kMostRows; rows -= kMostRows, a += kMostRows * stride, c += kMostRows * c_stride)
        product_rows<kMostRows>(a, stride, b, pairs, c, c_stride, add);
    switch (rows) {
    case 5: return product_rows<5>(a, stride, b, pairs, c, c_stride, add);
    case 4: return product_rows<4>(a, stride, b, pairs, c, c_stride, add);
    case 3: return product_rows<3>(a, stride, b, pairs, c, c_stride, add);
    case 2: return product_rows<2>(a, stride, b, pairs, c, c_stride, add);
    case 1: return product_rows<1>(a, stride, b, pairs, c, c_stride, add);
    }
}

// A row of n numbers, with zeros up to `width`, which is even.
void round_row(const float* from, int n, int width, Bf16* to) {
    int k = 0;
    for (; k + W <= n; k += W) store_bf16(to + k, load(from + k));
    if (k < n) {
        Bf16 rest[W];
        store_bf16(rest, load_part(from + k, n - k));
        std::memcpy(to + k, rest, size_t(n - k) * sizeof(Bf16));
    }
    std::memset(to + n, 0, size_t(width - n) * sizeof(Bf16));
}

// Two rows of at most 64 numbers as one row of pairs of a panel.
void interleave_rows(const float* a, const float* b, int n, Bf16* to) {
    for (int c = 0; c < kPanelColumns; c += W)
        _mm512_storeu_si512(to + 2 * c, interleaved(load_part(a + c, n - c > 0 ? n - c : 0), b ? load_part(b + c, n - c > 0 ? n - c : 0) : zero()));
}

// 16 x 16 numbers of 32 bits, transposed in place.
void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]), r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]), r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88), r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88), r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

// Rows of `n` numbers become columns of a panel: `rows` of at most 64, the others zero. to: [width / 2][64][2].
void pack_transposed(const float* from, size_t stride, int rows, int n, int width, Bf16* to) {
    alignas(64) Bf16 row[W][2 * W];
    for (int k = 0; k < width; k += 2 * W) {
        const int n_pairs = (width - k < 2 * W ? width - k : 2 * W) / 2;
        for (int c = 0; c < kPanelColumns; c += W) {
            __m512i part[W];
            for (int i = 0; i < W; i++) {
                const int known = c + i < rows ? (n - k < 2 * W ? n - k : 2 * W) : 0;
                round_row(from + size_t(c + i < rows ? c + i : 0) * stride + k, known > 0 ? known : 0, 2 * W, row[i]);
                part[i] = _mm512_load_si512(row[i]);
            }
            transpose(part);
            for (int p = 0; p < n_pairs; p++) _mm512_storeu_si512(to + (size_t(k / 2 + p) * kPanelColumns + c) * 2, part[p]);
        }
    }
}

}  // namespace
