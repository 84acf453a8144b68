// Products of one instruction set against plain sums: compiled with its flags, and run by tests/unit/decoding/test_native_products.py.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "product.h"
#include "vec.h"

#include "product_float32.inl"
#include "product_int8.inl"

namespace {

std::mt19937 generator(1);

// Whole numbers up to 127 in absolute value, which quantization keeps: the first is 127, so that the scale is 1. `extreme`: only +-127.
void fill(float* to, int n, bool extreme) {
    for (int i = 0; i < n; i++) to[i] = extreme ? (generator() % 4 ? -127.f : 127.f) : float(int(generator() % 255) - 127);
    to[0] = 127;
}

int n_wrong = 0;
void expect(float found, float wanted, const char* what, int rows, int depth) {
    if (found == wanted || n_wrong++) return;
    std::printf("%s, %d rows, depth %d: %.9g instead of %.9g\n", what, rows, depth, double(found), double(wanted));
}

void check(int rows, int depth, int columns, bool extreme) {
    transduce::DenseMatrix dense(columns, depth);
    std::vector<float> weights(size_t(columns) * depth);
    for (int j = 0; j < columns; j++) fill(&weights[size_t(j) * depth], depth, extreme);
    dense.sources.push_back([&](int first, int last, float* rows, float* biases) {
        for (int j = first; j < last && j < columns; j++)
            std::copy_n(&weights[size_t(j) * depth], depth, rows + size_t(j - first) * dense.depth), biases[j - first] = float(j);
    });
    const size_t stride = transduce::row_stride(depth), to_stride = transduce::row_stride(columns);
    std::vector<float> a((rows + transduce::kSpareRows) * stride), eights((rows + transduce::kSpareRows) * to_stride), floats(eights);
    for (int r = 0; r < rows; r++) fill(&a[r * stride], depth, extreme);
    constexpr transduce::ProductKernels kInt8 = {4 * kDotRows, convert_int8_rows, multiply_int8}, kFloat32 = {kPanel, nullptr, multiply_float32};
    transduce::Multiplier(kInt8, dense.depth).multiply(pack(dense, transduce::Precision::int8, kInt8.panel), a.data(), stride, rows, eights.data(), to_stride);
    const std::vector<float> whole_numbers = a;
    for (float& x : a) x *= 1.1f;  // float32 products round
    transduce::Multiplier(kFloat32, dense.depth)
        .multiply(pack(dense, transduce::Precision::float32, kPanel), a.data(), stride, rows, floats.data(), to_stride);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++) {
            int64_t whole = 0;
            float sum = float(j);
            for (int k = 0; k < depth; k++) {
                whole += int64_t(whole_numbers[r * stride + k]) * int64_t(weights[size_t(j) * depth + k]);
                sum = fma(a[r * stride + k], weights[size_t(j) * depth + k], sum);
            }
            expect(eights[r * to_stride + j], fma(float(whole), 1.f, float(j)), "int8", rows, depth);
            expect(floats[r * to_stride + j], sum, "float32", rows, depth);
        }
}

}  // namespace

int main() {
    for (int rows : {1, 2, 3, 4, 5, 6, 7, 9, 13, 40, 193})
        for (int depth : {1, 64, 100, 640}) check(rows, depth, 130, rows % 2);
    for (int rows : {1, 6}) check(rows, 2048, 64, true);
    std::printf("%s: %d wrong numbers\n", W == 4 ? "vectors of 4" : W == 8 ? "vectors of 8" : "vectors of 16", n_wrong);
    return n_wrong != 0;
}
