// Kernels of training for CPUs with AMX: bfloat16 products on tiles.
#include "training.inl"

constexpr transduce::TrainingKernels<uint16_t> transduce::kAmxBf16Kernels = kTraining;
