// int8 products with vectors of any width: each row of activations and each column of weights has a scale of its own.
// Included by target_*.cpp after vec.h and product_float32.inl. All targets compute the same integers.

namespace {

typedef int8_t Bytes __attribute__((vector_size(16)));

inline Bytes quantize16(const float* a, Vec inverse) {
#if defined(__AVX512F__)
    return (Bytes)_mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(load(a) * inverse));
#elif defined(__AVX2__)
    const __m256i low = _mm256_cvtps_epi32(load(a) * inverse), high = _mm256_cvtps_epi32(load(a + 8) * inverse);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    return (Bytes)_mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
    Bytes bytes;
    float rounded[16];
    for (int i = 0; i < 16; i += W) store(rounded + i, min(max(nearest(load(a + i) * inverse), splat(-127.f)), splat(127.f)));
    for (int i = 0; i < 16; i++) bytes[i] = int8_t(rounded[i]);
    return bytes;
#endif
}

// Rounds a row of numbers to q * scale with |q| <= 127; calls put(k, q[k:k + 16]). Returns the scale.
template <class Put>
float quantize_row(const float* a, int n, Put put) {
    Vec top = zero();
    for (int k = 0; k < n; k += W) top = max(top, abs(load(a + k)));
    const float largest = max_of(top);
    const Vec inverse = splat(largest > 0 ? 127 / largest : 0);
    for (int k = 0; k < n; k += 16) put(k, quantize16(a + k, inverse));
    return largest / 127;
}

// One sum per column.
typedef int32_t Sums __attribute__((vector_size(4 * W)));

inline Sums load_sums(const void* p) {
    Sums sums;
    std::memcpy(&sums, p, sizeof sums);
    return sums;
}
inline Sums repeat_four(const int8_t* a) {
    int32_t bits;
    std::memcpy(&bits, a, 4);
    return Sums{} + bits;
}

// Each kind of CPU defines:
// `put`, which stores 16 numbers of a row with kRowBytes bytes for each;
// `Dot`, which multiplies 4 * kDotRows inputs of kDotRows rows by the weights of W / kDotRows columns and adds the products;
// `start`, the initial values of the sums.
using transduce::Activations, transduce::PackedMatrix;

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// These instructions multiply unsigned by signed numbers: activations are 128 too large, and the sums start from the correction.
constexpr bool kSplitsSums = true;
constexpr int kRowBytes = 1, kDotRows = 1;
inline void put(const Activations& a, int r, int depth, int k, Bytes q) {
    q ^= char(0x80);
    std::memcpy(a.quantized + size_t(r) * depth + k, &q, 16);
}
inline Sums start(const PackedMatrix& w, const Activations&, int, int column) { return load_sums(w.correction.data() + column); }

struct Dot {
    Sums inputs;
    explicit Dot(const int8_t* a) : inputs(repeat_four(a)) {}
    Sums add(Sums sum, Sums weights) const {
#if defined(__AVX512VNNI__)
        return (Sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)inputs, (__m512i)weights);
#else
        return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)inputs, (__m256i)weights);
#endif
    }
};

#elif defined(__AVX2__)

// |a| times the weights, whose bits are inverted where a < 0. Inversion gives -1 - b; the sums start from the sum of |a| where a < 0,
// which makes up for the -1. Every execution port can invert, and few can negate. Two products fit into 16 bits:
// 2 * 127 * 128 < 2^15. A row has four |a| and their signs in turn.
constexpr bool kSplitsSums = false;
constexpr int kRowBytes = 2, kDotRows = 1;
inline void put(const Activations& a, int r, int depth, int k, Bytes q) {
    __m128i* to = reinterpret_cast<__m128i*>(a.quantized + (size_t(r) * depth + k) * kRowBytes);
    const __m128i sizes = _mm_abs_epi8((__m128i)q), signs = (__m128i)(q < 0);
    _mm_storeu_si128(to, _mm_unpacklo_epi32(sizes, signs));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(sizes, signs));
    const __m128i negative = _mm_sad_epu8(_mm_and_si128(sizes, signs), _mm_setzero_si128());
    a.start[r] += _mm_cvtsi128_si32(negative) + _mm_extract_epi16(negative, 4);
}
inline Sums start(const PackedMatrix&, const Activations& a, int row, int) { return Sums{} + a.start[row]; }

struct Dot {
    Sums sizes, signs;
    explicit Dot(const int8_t* a) : sizes(repeat_four(a)), signs(repeat_four(a + 4)) {}
    Sums add(Sums sum, Sums weights) const {
#if defined(__AVX512F__)
        return sum + (Sums)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)sizes, (__m512i)(weights ^ signs)), _mm512_set1_epi16(1));
#else
        return sum + (Sums)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)sizes, (__m256i)(weights ^ signs)), _mm256_set1_epi16(1));
#endif
    }
};

#elif defined(__ARM_FEATURE_MATMUL_INT8)

// Products of 2 x 8 by 8 x 2 numbers. Activations: [rows / 2][depth / 8][2][8].
constexpr bool kSplitsSums = true;
constexpr int kRowBytes = 1, kDotRows = 2;
inline void put(const Activations& a, int r, int depth, int k, Bytes q) {
    int8_t* to = a.quantized + size_t(r / 2) * 2 * depth + 2 * k + r % 2 * 8;
    std::memcpy(to, &q, 8);
    std::memcpy(to + 16, reinterpret_cast<char*>(&q) + 8, 8);
}
inline Sums start(const PackedMatrix&, const Activations&, int, int) { return Sums{}; }

struct Dot {
    int8x16_t inputs;
    explicit Dot(const int8_t* a) : inputs(vld1q_s8(a)) {}
    Sums add(Sums sum, Sums weights) const { return (Sums)vmmlaq_s32((int32x4_t)sum, inputs, (int8x16_t)weights); }
};

#else

constexpr bool kSplitsSums = true;
constexpr int kRowBytes = 1, kDotRows = 1;
inline void put(const Activations& a, int r, int depth, int k, Bytes q) { std::memcpy(a.quantized + size_t(r) * depth + k, &q, 16); }
inline Sums start(const PackedMatrix&, const Activations&, int, int) { return Sums{}; }

#if defined(__ARM_FEATURE_DOTPROD)
struct Dot {
    float32x2_t inputs;  // the bits of four inputs; as a float, one instruction loads them where they are used
    explicit Dot(const int8_t* a) {
        float bits;
        std::memcpy(&bits, a, 4);
        inputs = float32x2_t{bits, 0};
    }
    Sums add(Sums sum, Sums weights) const { return (Sums)vdotq_lane_s32((int32x4_t)sum, (int8x16_t)weights, (int8x8_t)inputs, 0); }
};
#else
struct Dot {
    const int8_t* a;
    explicit Dot(const int8_t* a) : a(a) {}
    Sums add(Sums sum, Sums weights) const {
        int8_t bytes[16];
        std::memcpy(bytes, &weights, 16);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sum[i] += a[j] * bytes[4 * i + j];
        return sum;
    }
};
#endif

#endif

void convert_int8_rows(Activations& a, int depth) {
    for (int r = 0; r < a.rows; r++) {
        a.start[r] = 0;
        a.scale[r] = quantize_row(a.values + r * a.stride, depth, [&](int k, Bytes q) { put(a, r, depth, k, q); });
    }
}

// The sums of W columns of row `row`, from kDotRows vectors that each contain [kDotRows rows][W / kDotRows columns].
inline Sums sums_of_row(const Sums* sums, [[maybe_unused]] int row) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return row ? Sums{sums[0][2], sums[0][3], sums[1][2], sums[1][3]} : Sums{sums[0][0], sums[0][1], sums[1][0], sums[1][1]};
#else
    return sums[0];
#endif
}

// Computes GROUPS * kDotRows rows from `row` on and kPanel columns from `column` on, over all inputs. `ahead`: later weights, of which
// `ahead_step` bytes are prefetched for each product.
template <int GROUPS>
void int8_rows(const PackedMatrix& w, const Activations& a, int row, int column, float* c, size_t stride,
               const float* init, size_t init_stride, const int8_t* ahead, int ahead_step) {
    constexpr int kVecs = kPanelVecs * kDotRows, kColumns = W / kDotRows;
    constexpr int kParts = !kSplitsSums ? 1 : GROUPS * kVecs <= 2 ? 4 : GROUPS * kVecs <= 4 ? 2 : 1;  // so that no product waits for its sum
    Sums sums[kParts][GROUPS][kVecs] = {};
    const int8_t *b[kVecs], *from = a.quantized + size_t(row) * w.depth * kRowBytes;
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; j++) {
        const int at = column + j * kColumns;
        b[j] = w.quantized.data() + size_t(at / 32) * w.depth * 32 + at % 32 / 16 * 1024 + at % 16 * 4 * kDotRows;
#pragma GCC unroll 6
        for (int g = 0; g < GROUPS; g++) sums[0][g][j] = start(w, a, row + g, at);
    }
    for (int k = 0; k < w.depth; k += 64) {
#pragma GCC unroll 1
        for (int i = 0; i < 16 / kDotRows; i += kParts) {
#pragma GCC unroll 4
            for (int part = 0; part < kParts; part++, ahead += ahead_step) {
                prefetch(ahead, ahead_step);
                Sums weights[kVecs];
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; j++) weights[j] = load_sums(b[j] + (i + part) * 64 * kDotRows);
#pragma GCC unroll 6
                for (int g = 0; g < GROUPS; g++) {
                    const Dot dot(from + (size_t(g) * w.depth + k + 4 * kDotRows * (i + part)) * kRowBytes * kDotRows);
#pragma GCC unroll 8
                    for (int j = 0; j < kVecs; j++) sums[part][g][j] = dot.add(sums[part][g][j], weights[j]);
                }
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; j++) b[j] += 2048;
    }
#pragma GCC unroll 4
    for (int part = 1; part < kParts; part++)
#pragma GCC unroll 6
        for (int g = 0; g < GROUPS; g++)
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; j++) sums[0][g][j] += sums[part][g][j];
#pragma GCC unroll 6
    for (int r = 0; r < GROUPS * kDotRows; r++) {
        if (kDotRows > 1 && row + r >= a.rows) break;
        const Vec scale = splat(a.scale[row + r]);
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVecs; j++) {
            const Vec scaled = __builtin_convertvector(sums_of_row(&sums[0][r / kDotRows][j * kDotRows], r % kDotRows), Vec) * scale;
            store(c + r * stride + W * j, fma(scaled, load(w.scale.data() + column + W * j), load(init + r * init_stride + W * j)));
        }
    }
}

using Int8Rows = void (*)(const PackedMatrix&, const Activations&, int, int, float*, size_t, const float*, size_t, const int8_t*, int);
#if defined(__AVX512F__) && !defined(__AVX512VNNI__)
constexpr int kScreenedRows = 6;  // without VNNI, int8 products save time only in reading the weights
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
constexpr int kScreenedRows = transduce::kRowsAtOnce;
#else
constexpr int kScreenedRows = 0;
#endif
constexpr int kMaxGroups = W == 8 && kRowBytes == 2 ? 5 : kMaxRows / kDotRows;  // AVX2: 10 of 16 registers for sums
template <int GROUPS>
constexpr Int8Rows kGroups = int8_rows<(GROUPS < kMaxGroups ? GROUPS : kMaxGroups)>;
constexpr Int8Rows kInt8Rows[] = {nullptr, kGroups<1>, kGroups<2>, kGroups<3>, kGroups<4>, kGroups<5>, kGroups<6>};

constexpr int kColumnsAhead = 64;  // between the weights that are read and those that are prefetched

void multiply_int8(const PackedMatrix& w, const Activations& a, int first, int last, float* c, size_t stride,
                   const float* init, size_t init_stride) {
    const int n_groups = (a.rows + kDotRows - 1) / kDotRows, n_calls = (n_groups + kMaxGroups - 1) / kMaxGroups;
    const int ahead_step = bytes_ahead(a.rows, 4 * kDotRows * kPanel, n_calls);
    const int8_t* ahead = w.quantized.data() + size_t(w.depth) * (first + kColumnsAhead);
    for (int column = first; column < last; column += kPanel) {
        for (int call = 0, group = 0; call < n_calls; call++) {
            const int groups = (n_groups - group + n_calls - call - 1) / (n_calls - call), row = group * kDotRows;
            kInt8Rows[groups](w, a, row, column, c + row * stride + (column - first), stride, init + row * init_stride + (column - first), init_stride,
                              ahead, ahead_step);
            group += groups, ahead += size_t(w.depth / (4 * kDotRows)) * ahead_step;
        }
    }
}

}  // namespace
