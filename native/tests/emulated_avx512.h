/* AVX-512 with bfloat16 and int8 products, and AVX-VNNI, in plain C++, to test the kernels for all CPUs on every one that has AVX2:
 *
 *     TRANSDUCE_EMULATED_AVX512=1 python setup.py build_ext --build-lib OTHER_FOLDER
 *
 * For GCC, whose vector types hold 64 bytes on any CPU. With TRANSDUCE_EMULATED_TILES=1, the kernels for AMX. Speed says nothing. */
#pragma once

#define TRANSDUCE_EMULATED_AVX512

#if defined(__AVX2__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(64)));
using SomeHalves = uint16_t __attribute__((vector_size(32)));
using SomeInts = int32_t __attribute__((vector_size(32)));

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A vector of what `element(i)` returns.
template <class Vector, class Element>
inline Vector each(Element element) {
    Vector v;
    for (unsigned i = 0; i < sizeof v / sizeof v[0]; i++) v[i] = element(i);
    return v;
}

inline float widened(uint16_t half) { return bits<float>(uint32_t(half) << 16); }
// To the nearest, ties to even; denormal numbers become zero.
inline uint16_t rounded(float x) {
    const uint32_t b = bits<uint32_t>(x);
    if ((b & 0x7fffffff) > 0x7f800000) return uint16_t(b >> 16 | 0x40);
    if ((b & 0x7f800000) == 0) return uint16_t(b >> 16 & 0x8000);
    return uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

template <class Vector>
inline Vector load(const void* p) {
    Vector v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class Vector>
inline void store(void* p, Vector v) { std::memcpy(p, &v, sizeof v); }
template <class Vector, class Element>
inline Vector load_part(uint32_t lanes, const void* p) {
    Element known[sizeof(Vector) / sizeof(Element)] = {};
    for (unsigned i = 0; i < sizeof(Vector) / sizeof(Element); i++)
        if (lanes >> i & 1) known[i] = static_cast<const Element*>(p)[i];
    return load<Vector>(known);
}
template <class Element, class Vector>
inline void store_part(void* p, uint32_t lanes, Vector v) {
    for (unsigned i = 0; i < sizeof v / sizeof(Element); i++)
        if (lanes >> i & 1) std::memcpy(static_cast<Element*>(p) + i, reinterpret_cast<const char*>(&v) + i * sizeof(Element), sizeof(Element));
}

inline Floats select(Floats others, uint32_t lanes, Floats a) { return each<Floats>([&](int i) { return lanes >> i & 1 ? a[i] : others[i]; }); }
inline Floats fma(Floats a, Floats b, Floats c) { return each<Floats>([&](int i) { return std::fma(a[i], b[i], c[i]); }); }
inline Floats max(Floats a, Floats b) { return each<Floats>([&](int i) { return a[i] > b[i] ? a[i] : b[i]; }); }
inline Floats min(Floats a, Floats b) { return each<Floats>([&](int i) { return a[i] < b[i] ? a[i] : b[i]; }); }
inline Floats root(Floats a) { return each<Floats>([&](int i) { return std::sqrt(a[i]); }); }
inline Floats nearest(Floats a) { return each<Floats>([&](int i) { return std::nearbyint(a[i]); }); }
inline Floats scale(Floats a, Floats n) { return each<Floats>([&](int i) { return std::ldexp(a[i], int(std::floor(n[i]))); }); }
inline uint32_t at_least(Floats a, Floats b) {
    uint32_t lanes = 0;
    for (int i = 0; i < 16; i++) lanes |= uint32_t(a[i] >= b[i]) << i;
    return lanes;
}
inline float sum(Floats a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}
inline float largest(Floats a) {
    for (int i = 1; i < 16; i++) a[0] = a[0] > a[i] ? a[0] : a[i];
    return a[0];
}
// The lower or the upper elements of a and b in turn, in each quarter.
template <class Element, int UPPER>
inline __m512i unpack(__m512i a, __m512i b) {
    constexpr int n = 16 / sizeof(Element);
    Element from[2][4 * n], to[4 * n];
    store(from[0], a), store(from[1], b);
    for (int i = 0; i < 4 * n; i++) to[i] = from[i % 2][i / n * n + UPPER * n / 2 + i % n / 2];
    return load<__m512i>(to);
}
inline __m512i quarters(__m512i a, __m512i b, int order) {
    return (__m512i)each<Ints>([&](int i) { return ((Ints)(i < 8 ? a : b))[(order >> i / 4 * 2 & 3) * 4 + i % 4]; });
}
inline __m256i half(__m512i a, int upper) { return (__m256i)each<SomeHalves>([&](int i) { return ((Halves)a)[16 * upper + i]; }); }
inline __m512i pick(Halves order, Halves a, Halves b) { return (__m512i)each<Halves>([&](int i) { return (order[i] & 32 ? b : a)[order[i] & 31]; }); }
template <class... Numbers>
inline __m512i from_last(Numbers... numbers) {
    const uint16_t given[] = {uint16_t(numbers)...};
    return (__m512i)each<Halves>([&](int i) { return given[31 - i]; });
}
inline __m512i round_two(Floats upper, Floats lower) { return (__m512i)each<Halves>([&](int i) { return rounded(i < 16 ? lower[i] : upper[i - 16]); }); }
// sum + the products of pairs.
inline Floats add_products(Floats sum, Halves a, Halves b) {
    return each<Floats>([&](int i) {
        const float odd = std::fma(widened(a[2 * i + 1]), widened(b[2 * i + 1]), sum[i]);
        return std::fma(widened(a[2 * i]), widened(b[2 * i]), odd);
    });
}

inline int16_t saturated(int x) { return int16_t(x < -32768 ? -32768 : x > 32767 ? 32767 : x); }
inline __m128i narrowed(Ints a) {
    using Bytes = signed char __attribute__((vector_size(16)));
    return (__m128i)each<Bytes>([&](int i) { return a[i] < -128 ? -128 : a[i] > 127 ? 127 : a[i]; });
}
// Sums of pairs of products of unsigned and signed bytes; of pairs of products of 16-bit numbers; sums + four products of bytes.
inline __m512i add_byte_pairs(__m512i a, __m512i b) {
    const auto *u = reinterpret_cast<const uint8_t*>(&a);
    const auto *s = reinterpret_cast<const int8_t*>(&b);
    return (__m512i)each<Halves>([&](int i) { return uint16_t(saturated(u[2 * i] * s[2 * i] + u[2 * i + 1] * s[2 * i + 1])); });
}
inline __m512i add_pairs(__m512i a, __m512i b) {
    const auto *x = reinterpret_cast<const int16_t*>(&a), *y = reinterpret_cast<const int16_t*>(&b);
    return (__m512i)each<Ints>([&](int i) { return x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]; });
}
template <class Numbers, class Vector>
inline Vector add_quads(Vector sums, Vector a, Vector b) {
    const auto *u = reinterpret_cast<const uint8_t*>(&a);
    const auto *s = reinterpret_cast<const int8_t*>(&b);
    return (Vector)each<Numbers>([&](int i) {
        int sum = bits<Numbers>(sums)[i];
        for (int j = 4 * i; j < 4 * i + 4; j++) sum += u[j] * s[j];
        return sum;
    });
}

}  // namespace emulated

#undef _mm512_roundscale_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_shuffle_i32x4
#undef _mm512_shuffle_f32x4
#undef _mm512_extracti64x4_epi64
#define __m512bh __m512i
#define _mm512_loadu_ps emulated::load<__m512>
#define _mm512_loadu_si512 emulated::load<__m512i>
#define _mm512_load_si512 emulated::load<__m512i>
#define _mm512_storeu_ps emulated::store
#define _mm512_storeu_si512 emulated::store
#define _mm512_store_si512 emulated::store
#define _mm512_maskz_loadu_ps emulated::load_part<__m512, float>
#define _mm512_maskz_loadu_epi16 emulated::load_part<__m512i, uint16_t>
#define _mm256_maskz_loadu_epi16 emulated::load_part<__m256i, uint16_t>
#define _mm512_mask_storeu_ps emulated::store_part<float>
#define _mm256_mask_storeu_epi16 emulated::store_part<uint16_t>
#define _mm512_set1_ps(x) (emulated::Floats{} + float(x))
#define _mm512_set1_epi32(x) (__m512i)(emulated::Ints{} + int32_t(x))
#define _mm512_set1_epi16(x) (__m512i)(emulated::Halves{} + uint16_t(x))
#define _mm512_set_epi16 emulated::from_last
#define _mm512_setzero_si512() (__m512i)(emulated::Ints{})
#define _mm512_mask_mov_ps emulated::select
#define _mm512_maskz_mov_ps(lanes, a) emulated::select(emulated::Floats{}, lanes, a)
#define _mm512_fmadd_ps emulated::fma
#define _mm512_max_ps emulated::max
#define _mm512_min_ps emulated::min
#define _mm512_sqrt_ps emulated::root
#define _mm512_abs_ps(a) (__m512)((emulated::Ints)(a) & 0x7fffffff)
#define _mm512_roundscale_ps(a, how) emulated::nearest(a)
#define _mm512_scalef_ps emulated::scale
#define _mm512_reduce_add_ps emulated::sum
#define _mm512_reduce_max_ps emulated::largest
#define _mm512_cmp_ps_mask(a, b, how) emulated::at_least(a, b)
#define _mm512_unpacklo_epi32 emulated::unpack<int32_t, 0>
#define _mm512_unpackhi_epi32 emulated::unpack<int32_t, 1>
#define _mm512_unpacklo_epi64 emulated::unpack<int64_t, 0>
#define _mm512_unpackhi_epi64 emulated::unpack<int64_t, 1>
#define _mm512_unpacklo_ps(a, b) (__m512)emulated::unpack<int32_t, 0>((__m512i)(a), (__m512i)(b))
#define _mm512_unpackhi_ps(a, b) (__m512)emulated::unpack<int32_t, 1>((__m512i)(a), (__m512i)(b))
#define _mm512_unpacklo_pd(a, b) (__m512d)emulated::unpack<int64_t, 0>((__m512i)(a), (__m512i)(b))
#define _mm512_unpackhi_pd(a, b) (__m512d)emulated::unpack<int64_t, 1>((__m512i)(a), (__m512i)(b))
#define _mm512_shuffle_i32x4 emulated::quarters
#define _mm512_shuffle_f32x4(a, b, order) (__m512)emulated::quarters((__m512i)(a), (__m512i)(b), order)
#define _mm512_castps_pd (__m512d)
#define _mm512_castpd_ps (__m512)
#define _mm512_castsi512_ps (__m512)
#define _mm512_castsi512_si256(a) emulated::half(a, 0)
#define _mm512_extracti64x4_epi64 emulated::half
#define _mm512_slli_epi32(a, n) (__m512i)((emulated::Words)(a) << (n))
#define _mm512_add_epi16(a, b) (__m512i)((emulated::Halves)(a) + (emulated::Halves)(b))
#define _mm512_cvtepu16_epi32(a) (__m512i)emulated::each<emulated::Words>([&](int i) { return ((emulated::SomeHalves)(a))[i]; })
#define _mm512_permutexvar_epi16(order, a) emulated::pick((emulated::Halves)(order), (emulated::Halves)(a), (emulated::Halves)(a))
#define _mm512_permutex2var_epi16(a, order, b) emulated::pick((emulated::Halves)(order), (emulated::Halves)(a), (emulated::Halves)(b))
#define _mm512_cvtne2ps_pbh emulated::round_two
#define _mm512_cvtneps_pbh(a) (__m256i)emulated::each<emulated::SomeHalves>([&](int i) { return emulated::rounded((a)[i]); })
#define _mm512_dpbf16_ps(sum, a, b) emulated::add_products(sum, (emulated::Halves)(a), (emulated::Halves)(b))
#define _mm512_cvtepi8_epi32(a) emulated::each<emulated::Ints>([&](int i) { return ((signed char __attribute__((vector_size(16))))(a))[i]; })
#define _mm512_cvtepi32_ps(a) emulated::each<emulated::Floats>([&](int i) { return float(((emulated::Ints)(a))[i]); })
#define _mm512_broadcast_f32x4(a) emulated::each<emulated::Floats>([&](int i) { return (a)[i % 4]; })
#define _mm512_cvtps_epi32(a) (__m512i)emulated::each<emulated::Ints>([&](int i) { return _mm_cvtss_si32(_mm_set_ss((a)[i])); })
#define _mm512_cvtsepi32_epi8(a) emulated::narrowed((emulated::Ints)(a))
#define _mm512_maddubs_epi16 emulated::add_byte_pairs
#define _mm512_madd_epi16 emulated::add_pairs
#define _mm512_dpbusd_epi32 emulated::add_quads<emulated::Ints>
#define _mm256_dpbusd_avx_epi32 emulated::add_quads<emulated::SomeInts>
#if defined(EMULATED_AVX512F)
#define __AVX512F__ 1
#define __AVX512BW__ 1
#endif
#if defined(EMULATED_AVX512BF16)
#define __AVX512BF16__ 1
#endif
#if defined(EMULATED_AVX512VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATED_AVXVNNI)
#define __AVXVNNI__ 1
#endif

#endif
