// Kernels of training for CPUs with AVX2 and FMA, in float32.
#include "training.inl"

constexpr transduce::TrainingKernels<float> transduce::kAvx2TrainingKernels = kTraining;
