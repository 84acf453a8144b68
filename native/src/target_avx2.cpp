// Kernels for CPUs with AVX2 and FMA.
#include "target.inl"

constexpr transduce::Kernels transduce::kAvx2Kernels = all_kernels();
