// Kernels for CPUs with AVX2, FMA and AVX-VNNI, the int8 products of CPUs without AVX-512.
#include "target.inl"

constexpr transduce::Kernels transduce::kAvxVnniKernels = all_kernels();
