// Kernels for CPUs with AVX-512, VNNI and AMX: int8 and bf16x3 products on tiles.
#include "target.inl"

#include "tiles.inl"
#include "product_amx.inl"

namespace {

constexpr transduce::ProductKernels kInt8Tiles = {4, convert_int8_tiles, multiply_int8_tiles};
constexpr transduce::ProductKernels kBf16x3 = {kPanel, convert_bf16x3, multiply_bf16x3};

}  // namespace

constexpr transduce::Kernels transduce::kAmxKernels = all_kernels(kInt8Tiles, kBf16x3, release_tiles);
