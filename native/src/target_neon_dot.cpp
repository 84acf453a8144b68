// Kernels for AArch64 CPUs with the int8 products of four numbers (FEAT_DotProd).
#include "target.inl"

constexpr transduce::Kernels transduce::kNeonDotKernels = all_kernels();
