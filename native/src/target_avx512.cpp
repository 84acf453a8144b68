// Kernels for CPUs with AVX-512 (F, BW, DQ, VL).
#include "target.inl"

const transduce::Kernels transduce::kAvx512Kernels = {
    Isa::avx512, kFloat32, kInt8, kUnavailable, kMaxQueries, norm, activate, embed, rotate, attend, store_key_value, take_logits, start_screen,
    take_bounds, drop, dot, group_maxima, weigh, release_nothing,
};
