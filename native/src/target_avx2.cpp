// Kernels for CPUs with AVX2 and FMA.
#include "target.inl"

const transduce::Kernels transduce::kAvx2Kernels = all_kernels(transduce::Isa::avx2, kInt8, kUnavailable, release_nothing);
