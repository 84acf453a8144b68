// Kernels for CPUs with AVX-512 (F, BW, DQ, VL).
#include "target.inl"

constexpr transduce::Kernels transduce::kAvx512Kernels = all_kernels();
