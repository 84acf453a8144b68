// Dropout of training, whose random numbers come from a counter. Included after vec.h.

namespace {

using transduce::Dropout;
typedef uint32_t Bits __attribute__((vector_size(4 * W)));

// 32 random bits for each of the elements first, ..., first + W - 1: a hash of the seed and of the element's index (mixing of MurmurHash3).
inline Bits random_bits(uint64_t seed, uint64_t first) {
    Bits lanes;
    for (int i = 0; i < W; i++) lanes[i] = uint32_t(i);
    Bits x = ((lanes + uint32_t(first)) * 0x9e3779b1u) ^ (uint32_t(seed) ^ uint32_t(first >> 32));
    x ^= x >> 16;
    x = x * 0x85ebca6bu + uint32_t(seed >> 32);
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}

// Applies dropout to x, the elements at, ..., at + W - 1.
inline Vec dropped(const Dropout& dropout, Vec x, uint64_t at) {
    if (!dropout.below) return x;
    return random_bits(dropout.seed, at) >= dropout.below ? x * splat(dropout.scale) : zero();
}

}  // namespace
