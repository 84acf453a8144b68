// Kernels for any CPU.
#include "target.inl"

constexpr transduce::Kernels transduce::kPortableKernels = all_kernels();
