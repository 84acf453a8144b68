// Dropout of training, whose random numbers come from a counter. Included after product_bf16.inl.

namespace {

using transduce::Dropout;

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

// What is left of the 16 numbers from number `at` on.
inline Vec dropped(const Dropout& dropout, Vec x, uint64_t at) {
    if (!dropout.below) return x;
    const __mmask16 kept = _mm512_cmpge_epu32_mask(random_bits(dropout.seed, at), _mm512_set1_epi32(int(dropout.below)));
    return _mm512_maskz_mul_ps(kept, x, splat(dropout.scale));
}

}  // namespace
