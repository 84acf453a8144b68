// Kernels for CPUs with AVX-512 (F, BW, DQ, VL).
#include "target.inl"

const transduce::Kernels transduce::kAvx512Kernels = all_kernels(transduce::Isa::avx512, kInt8, kUnavailable, release_nothing);
