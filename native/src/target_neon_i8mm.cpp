// Kernels for AArch64 CPUs with int8 products of matrices (FEAT_I8MM).
#include "target.inl"

constexpr transduce::Kernels transduce::kNeonI8mmKernels = all_kernels();
