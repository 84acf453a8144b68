// A vector register of W floats, as wide as the instruction set for which the including file (target_*.cpp) is compiled. Everything is in an
// unnamed namespace, so that the linker never replaces code for one instruction set by code for another.
//
// Every multiply-add is a call of `fma`, and the compiler must not make others (-ffp-contract=off). So every specialization of a kernel does the
// same arithmetic, and a row's result does not depend on the number of rows.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)

constexpr int W = 16;
using Vec = __m512;
using Ints = __m512i;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, 0); }
inline Vec times_power_of_2(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
inline float sum_of(Vec a) { return _mm512_reduce_add_ps(a); }
inline float max_of(Vec a) { return _mm512_reduce_max_ps(a); }
inline unsigned at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }  // one bit per lane
// The first n lanes: none for n <= 0, all for n >= W.
inline __mmask16 lanes(int n) { return __mmask16(n <= 0 ? 0 : (1u << (n < W ? n : W)) - 1); }
inline Vec first_lanes(Vec a, int n) { return _mm512_maskz_mov_ps(lanes(n), a); }
inline Vec first_lanes(Vec a, int n, Vec others) { return _mm512_mask_mov_ps(others, lanes(n), a); }
// Loads the first n numbers, followed by zeros.
inline Vec load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
inline void store_part(float* p, int n, Vec a) { _mm512_mask_storeu_ps(p, lanes(n), a); }

// Transposes W x W numbers of 32 bits in place.
inline void transpose(Ints* r) {
    Ints t[16];
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

inline Vec load_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Attention works on 4 lanes per key: 4 numbers of a key, or its scores for 4 heads.
inline Vec repeat4(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
inline __mmask16 key_lanes(unsigned keys) { return __mmask16(_pdep_u32(keys, 0x1111u) * 15u); }
inline Vec where_keys(unsigned keys, Vec a, Vec b) { return _mm512_mask_mov_ps(b, key_lanes(keys), a); }
inline Vec sum_quads(Vec a, Vec b, Vec c, Vec d) {
    const Vec x = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b), y = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    const __m512d p = _mm512_castps_pd(x), q = _mm512_castps_pd(y);
    return _mm512_castpd_ps(_mm512_unpacklo_pd(p, q)) + _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
}
inline Vec max_over_keys(Vec v) {
    v = max(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    return max(v, _mm512_shuffle_f32x4(v, v, 0xb1));
}
inline Vec sum_over_keys(Vec v) {
    v = v + _mm512_shuffle_f32x4(v, v, 0x4e);
    return v + _mm512_shuffle_f32x4(v, v, 0xb1);
}

#elif defined(__AVX2__)

constexpr int W = 8;
using Vec = __m256;
using Ints = __m256i;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(splat(-0.f), a); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power_of_2(Vec a, Vec n) {
    const Ints exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return a * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Vec max_over_keys(Vec v) { return max(v, _mm256_permute2f128_ps(v, v, 1)); }
inline Vec sum_over_keys(Vec v) { return v + _mm256_permute2f128_ps(v, v, 1); }
inline float sum_of(Vec a) {
    a = sum_over_keys(a);
    a = a + _mm256_permute_ps(a, 0x4e);
    return _mm256_cvtss_f32(a + _mm256_permute_ps(a, 0xb1));
}
inline float max_of(Vec a) {
    a = max_over_keys(a);
    a = max(a, _mm256_permute_ps(a, 0x4e));
    return _mm256_cvtss_f32(max(a, _mm256_permute_ps(a, 0xb1)));
}
inline unsigned at_least(Vec a, Vec b) { return unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
inline Ints lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
inline Vec first_lanes(Vec a, int n) { return _mm256_and_ps(a, _mm256_castsi256_ps(lanes(n))); }
inline Vec first_lanes(Vec a, int n, Vec others) { return _mm256_blendv_ps(others, a, _mm256_castsi256_ps(lanes(n))); }
inline Vec load_part(const float* p, int n) { return n >= W ? load(p) : _mm256_maskload_ps(p, lanes(n)); }
inline void store_part(float* p, int n, Vec a) {
    if (n >= W) store(p, a);  // masked stores are slow on some CPUs
    else _mm256_maskstore_ps(p, lanes(n), a);
}

inline void transpose(Ints* r) {
    Ints t[8];
    for (int i = 0; i < 4; i++) t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]), r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]), r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20), t[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
    }
    std::memcpy(r, t, sizeof t);
}
inline Vec load_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec repeat4(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
inline Vec where_keys(unsigned keys, Vec a, Vec b) {
    const Ints bit = _mm256_setr_epi32(1, 1, 1, 1, 2, 2, 2, 2);
    const Ints chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(keys)), bit), bit);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(chosen));
}
inline Vec sum_quads(Vec a, Vec b, Vec c, Vec d) {
    const Vec x = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b), y = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
    const __m256d p = _mm256_castps_pd(x), q = _mm256_castps_pd(y);
    return _mm256_castpd_ps(_mm256_unpacklo_pd(p, q)) + _mm256_castpd_ps(_mm256_unpackhi_pd(p, q));
}

#else  // any CPU, with the compiler's vector extension (SSE2 or plain code) and, on AArch64, NEON

constexpr int W = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

inline Vec load(const float* p) {
    Vec a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
inline void store(float* p, Vec a) { std::memcpy(p, &a, sizeof a); }
inline Vec splat(float x) { return Vec{x, x, x, x}; }
#if defined(__aarch64__)
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline Vec min(Vec a, Vec b) { return vminq_f32(a, b); }
inline Vec abs(Vec a) { return vabsq_f32(a); }
inline Vec nearest(Vec a) { return vrndnq_f32(a); }
inline unsigned at_least(Vec a, Vec b) {
    const uint32x4_t bits = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgeq_f32(a, b), bits));
}
#else
inline float fma(float a, float b, float c) { return a * b + c; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec abs(Vec a) { return a < 0 ? -a : a; }
inline Vec nearest(Vec a) {  // for |a| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction
    const Vec big = splat(12582912.f);
    return (a + big) - big;
}
inline unsigned at_least(Vec a, Vec b) {
    unsigned bits = 0;
    for (int i = 0; i < W; i++) bits |= unsigned(a[i] >= b[i]) << i;
    return bits;
}
#endif
inline Vec times_power_of_2(Vec a, Vec n) {
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    Vec power;
    std::memcpy(&power, &exponent, sizeof power);
    return a * power;
}
inline float sum_of(Vec a) { return (a[0] + a[1]) + (a[2] + a[3]); }
inline float max_of(Vec a) {
    const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}
inline Vec first_lanes(Vec a, int n) {
    for (int i = n; i < W; i++) a[i] = 0;
    return a;
}
inline Vec load_int8(const int8_t* p) { return Vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
inline Vec repeat4(const float* p) { return load(p); }
inline Vec where_keys(unsigned keys, Vec a, Vec b) { return keys & 1 ? a : b; }
inline Vec sum_quads(Vec a, Vec b, Vec c, Vec d) { return Vec{sum_of(a), sum_of(b), sum_of(c), sum_of(d)}; }
inline Vec max_over_keys(Vec v) { return v; }
inline Vec sum_over_keys(Vec v) { return v; }

#endif

inline Vec zero() { return splat(0.f); }

// Computes 2^x with a relative error of about 1e-7; x is clamped to the exponents of normal numbers.
inline Vec exp2(Vec x) {
    x = max(splat(-126.f), min(splat(126.f), x));  // in this order, NaN remains
    const Vec n = nearest(x), f = x - n;  // |f| <= 1/2; the polynomial is the minimax one on that interval
    Vec p = fma(splat(0.00132647f), f, splat(0.00967151f));
    p = fma(p, f, splat(0.05550734f));
    p = fma(p, f, splat(0.24022242f));
    p = fma(p, f, splat(0.69314698f));
    return times_power_of_2(fma(p, f, splat(1.f)), n);
}
constexpr float kLog2E = 1.44269504089f;
inline Vec exp(Vec x) { return exp2(x * splat(kLog2E)); }

}  // namespace
