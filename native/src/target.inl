// All kernels for the instruction set that the including file is compiled for.

#include "kernels.h"
#include "vec.h"

#include "product_float32.inl"
#include "product_int8.inl"

#include "activations.inl"
#include "attention.inl"
#include "layers.inl"
#include "sampling.inl"
#include "vocabulary.inl"

namespace {

constexpr transduce::ProductKernels kFloat32 = {kPanel, nullptr, multiply_float32};
constexpr transduce::ProductKernels kInt8 = {4 * kDotRows, convert_int8_rows, multiply_int8};
constexpr transduce::ProductKernels kUnavailable = {kPanel, nullptr, nullptr};

void release_nothing() {}

constexpr transduce::Kernels all_kernels(transduce::ProductKernels int8 = kInt8, transduce::ProductKernels bf16x3 = kUnavailable,
                                         void (*release)() = release_nothing) {
    return {
        kFloat32, int8, bf16x3, kMaxQueries, kScreenedRows, norm, activate, embed, rotate, recur, kFloat32Attention, kInt8Attention, take_logits,
        start_screen, take_bounds, drop, dot, group_maxima, weigh, release,
    };
}

}  // namespace
