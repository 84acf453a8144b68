// int8 products with vectors of any width: each row of activations and each column of weights has a scale of its own.
// Included by target_*.cpp after vec.h and product_float32.inl. All targets compute the same integers.

namespace {

#if defined(__AVX512VNNI__)
constexpr int kFlip = 0x80;  // VNNI multiplies unsigned by signed numbers: activations are 128 too large
#else
constexpr int kFlip = 0;
#endif

typedef int8_t Bytes __attribute__((vector_size(16)));

inline Bytes quantize16(const float* a, Vec inverse, int flip) {
    Bytes bytes;
#if defined(__AVX512F__)
    const __m128i q = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(load(a) * inverse));
    bytes = reinterpret_cast<Bytes>(_mm_xor_si128(q, _mm_set1_epi8(char(flip))));
#else
    float rounded[16];
    for (int i = 0; i < 16; i += W) store(rounded + i, min(max(nearest(load(a + i) * inverse), splat(-127.f)), splat(127.f)));
    for (int i = 0; i < 16; i++) bytes[i] = int8_t(int(rounded[i]) ^ flip);
#endif
    return bytes;
}

// Rounds a row of numbers to q * scale with |q| <= 127: put(k, 16 of q). Returns the scale.
template <class Put>
float quantize_row(const float* a, int n, int flip, Put put) {
    Vec top = zero();
    for (int k = 0; k < n; k += W) top = max(top, abs(load(a + k)));
    const float largest = max_of(top);
    const Vec inverse = splat(largest > 0 ? 127 / largest : 0);
    for (int k = 0; k < n; k += 16) put(k, quantize16(a + k, inverse, flip));
    return largest / 127;
}

void convert_int8_rows(transduce::Activations& a, int depth) {
    for (int r = 0; r < a.rows; r++) {
        int8_t* row = a.quantized + size_t(r) * depth;
        a.scale[r] = quantize_row(a.values + r * a.stride, depth, kFlip, [row](int k, Bytes q) { std::memcpy(row + k, &q, 16); });
    }
}

#if defined(__AVX512VNNI__)

struct Dot4 {
    Ints four;
    explicit Dot4(const int8_t* a) {
        int32_t bits;
        std::memcpy(&bits, a, 4);
        four = _mm512_set1_epi32(bits);
    }
    // Adds the product of four inputs to each column. Assembly: GCC copies the sums around the intrinsic, twice.
    void add(Ints& sum, Ints b) const { __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(four), "v"(b)); }
};
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Vec to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }

#elif defined(__AVX2__)

// Without VNNI: even and odd bytes as 16-bit numbers, whose products are added in pairs without overflow.
#if defined(__AVX512F__)
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline Vec to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Ints odd_bytes(Ints a) { return _mm512_srai_epi16(a, 8); }
inline Ints even_bytes(Ints a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
inline Ints add_products(Ints sum, Ints a, Ints b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
inline Ints splat_ints(int32_t x) { return _mm512_set1_epi32(x); }
#else
inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Vec to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Ints odd_bytes(Ints a) { return _mm256_srai_epi16(a, 8); }
inline Ints even_bytes(Ints a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
inline Ints add_products(Ints sum, Ints a, Ints b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
inline Ints splat_ints(int32_t x) { return _mm256_set1_epi32(x); }
#endif

struct Dot4 {
    Ints even, odd;
    explicit Dot4(const int8_t* a) {
        int32_t bits;
        std::memcpy(&bits, a, 4);
        even = even_bytes(splat_ints(bits)), odd = odd_bytes(splat_ints(bits));
    }
    void add(Ints& sum, Ints b) const { sum = add_products(add_products(sum, even, even_bytes(b)), odd, odd_bytes(b)); }
};

#else

struct Dot4 {
    int32_t a[4];
    explicit Dot4(const int8_t* p) : a{p[0], p[1], p[2], p[3]} {}
    void add(Ints& sum, Ints b) const {
        int8_t bytes[16];
        std::memcpy(bytes, &b, 16);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sum[i] += a[j] * bytes[4 * i + j];
    }
};
inline Ints load_ints(const void* p) {
    Ints a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
inline Vec to_floats(Ints a) { return __builtin_convertvector(a, Vec); }

#endif

// ROWS rows times kPanel columns from `column` on, all inputs.
template <int ROWS>
void int8_rows(const transduce::PackedMatrix& w, const int8_t* a, const float* row_scale, int column, float* c, size_t stride,
               const float* init, size_t init_stride) {
    Ints sum[ROWS][kPanelVecs];
    const int8_t* b[kPanelVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVecs; j++) {
        const int at = column + j * W;
        b[j] = w.quantized.data() + size_t(at / 32) * w.depth * 32 + at % 32 / 16 * 1024 + at % 16 * 4;
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
#if defined(__AVX512VNNI__)
            sum[r][j] = load_ints(w.correction.data() + at);
#else
            sum[r][j] = Ints{};
#endif
        }
    }
    for (int k = 0; k < w.depth; k += 64) {
#pragma GCC unroll 1
        for (int quad = 0; quad < 16; quad++) {
            Ints weights[kPanelVecs];
#pragma GCC unroll 4
            for (int j = 0; j < kPanelVecs; j++) weights[j] = load_ints(b[j] + quad * 64);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const Dot4 dot(a + size_t(r) * w.depth + k + 4 * quad);
#pragma GCC unroll 4
                for (int j = 0; j < kPanelVecs; j++) dot.add(sum[r][j], weights[j]);
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVecs; j++) b[j] += 2048;
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
        const Vec scale = splat(row_scale[r]);
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVecs; j++) {
            const Vec scaled = to_floats(sum[r][j]) * scale;
            store(c + r * stride + W * j, fma(scaled, load(w.scale.data() + column + W * j), load(init + r * init_stride + W * j)));
        }
    }
}

using Int8Rows = void (*)(const transduce::PackedMatrix&, const int8_t*, const float*, int, float*, size_t, const float*, size_t);
constexpr Int8Rows kInt8Rows[] = {
    nullptr, int8_rows<1>, int8_rows<2>, int8_rows<3>, int8_rows<4>,
#if defined(__AVX2__)
    int8_rows<5>, int8_rows<6>,
#endif
};

void multiply_int8(const transduce::PackedMatrix& w, const transduce::Activations& a, int first, int last, float* c, size_t stride,
                   const float* init, size_t init_stride) {
    const int n_groups = (a.rows + kMaxRows - 1) / kMaxRows;
    for (int column = first; column < last; column += kPanel) {
        for (int group = 0, row = 0; group < n_groups; group++) {
            const int rows = (a.rows - row + n_groups - group - 1) / (n_groups - group);
            kInt8Rows[rows](w, a.quantized + size_t(row) * w.depth, a.scale + row, column, c + row * stride + (column - first), stride,
                            init + row * init_stride + (column - first), init_stride);
            row += rows;
        }
    }
}

}  // namespace
