// Kernels of training for CPUs with AMX: bfloat16 products on tiles.
#include "training.inl"

constexpr transduce::TrainingKernels transduce::kAmxBf16Kernels = kTraining;
