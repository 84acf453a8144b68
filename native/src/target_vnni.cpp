// Kernels for CPUs with AVX-512 and its int8 products (VNNI).
#include "target.inl"

constexpr transduce::Kernels transduce::kVnniKernels = all_kernels();
