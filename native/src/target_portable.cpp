// Kernels for any CPU.
#include "target.inl"

const transduce::Kernels transduce::kPortableKernels = {
    Isa::portable, kFloat32, kInt8, kUnavailable, kMaxQueries, norm, activate, embed, rotate, attend, store_key_value, take_logits, start_screen,
    take_bounds, drop, dot, group_maxima, weigh, release_nothing,
};
