// Kernels for CPUs with AVX-512 and its int8 products (VNNI).
#include "target.inl"

const transduce::Kernels transduce::kVnniKernels = {
    Isa::avx512_vnni, kFloat32, kInt8, kUnavailable, kMaxQueries, norm, activate, embed, rotate, attend, store_key_value, take_logits, start_screen,
    take_bounds, drop, dot, group_maxima, weigh, release_nothing,
};
