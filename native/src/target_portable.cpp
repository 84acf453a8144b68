// Kernels for any CPU.
#include "target.inl"

const transduce::Kernels transduce::kPortableKernels = all_kernels(transduce::Isa::portable, kInt8, kUnavailable, release_nothing);
