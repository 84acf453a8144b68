// Kernels of training for CPUs with AVX-512 and its bfloat16 products.
#include "training.inl"

constexpr transduce::TrainingKernels<uint16_t> transduce::kBf16Kernels = kTraining;
