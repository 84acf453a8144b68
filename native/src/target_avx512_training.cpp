// Kernels of training for CPUs with AVX-512, in float32.
#include "training.inl"

constexpr transduce::TrainingKernels<float> transduce::kAvx512TrainingKernels = kTraining;
