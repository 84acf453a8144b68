#include "product.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace transduce {
namespace {

uint16_t to_bf16(float x) {  // rounded to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t high) {
    const uint32_t bits = uint32_t(high) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

void pack_float32(const DenseMatrix& dense, int panel, PackedMatrix& packed) {
    packed.values.reset(size_t(dense.columns) * dense.inputs);
    for (int j = 0; j < dense.columns; j++) {
        const float* column = &dense.weight[size_t(j) * dense.depth];
        float* to = packed.values.data() + size_t(j / panel) * dense.inputs * panel + j % panel;
        for (int i = 0; i < dense.inputs; i++) to[size_t(i) * panel] = column[i];
    }
}

void pack_bf16x3(const DenseMatrix& dense, PackedMatrix& packed) {
    const size_t size = size_t(dense.columns) * dense.depth;
    packed.high.reset(size), packed.low.reset(size);
    for (int j = 0; j < dense.columns; j++) {
        const float* column = &dense.weight[size_t(j) * dense.depth];
        for (int i = 0; i < dense.inputs; i++) {
            const size_t tile = (size_t(j / 32) * (dense.depth / 32) + i / 32) * 2 + j % 32 / 16;
            const size_t at = ((tile * 16 + i % 32 / 2) * 16 + j % 16) * 2 + i % 2;
            packed.high[at] = to_bf16(column[i]);
            packed.low[at] = to_bf16(column[i] - from_bf16(packed.high[at]));
        }
    }
}

void pack_int8(const DenseMatrix& dense, int panel, PackedMatrix& packed) {
    packed.quantized.reset(size_t(dense.columns) * dense.depth);
    packed.scale.reset(dense.columns), packed.correction.reset(dense.columns);
    packed.error.reset(dense.columns), packed.norm.reset(dense.columns);
    for (int j = 0; j < dense.columns; j++) {
        const float* column = &dense.weight[size_t(j) * dense.depth];
        float largest = 0;
        for (int i = 0; i < dense.inputs; i++) largest = std::max(largest, std::fabs(column[i]));
        const bool usable = largest > 0 && std::isfinite(largest);
        packed.scale[j] = largest / 127;
        const float inverse = usable ? 127 / largest : 0;
        int sum = 0;
        double square = 0, square_error = 0;
        for (int i = 0; i < dense.inputs; i++) {
            const size_t tile = (size_t(j / 32) * (dense.depth / 64) + i / 64) * 2 + j % 32 / 16;
            const float scaled = std::isfinite(column[i]) ? column[i] * inverse : 0;
            const int q = std::min(127, std::max(-127, int(std::lrint(scaled))));
            packed.quantized[tile * 1024 + (i % 64 / panel * 16 + j % 16) * panel + i % panel] = int8_t(q);
            sum += q;
            const double quantized = double(q) * packed.scale[j];
            square += quantized * quantized, square_error += (column[i] - quantized) * (column[i] - quantized);
        }
        packed.norm[j] = float(std::sqrt(square) * 1.0001), packed.error[j] = float(std::sqrt(square_error) * 1.0001);
        packed.correction[j] = -128 * sum;
    }
}

}  // namespace

DenseMatrix::DenseMatrix(int outputs, int inputs)
    : outputs(outputs), inputs(inputs), columns(int(round_up(outputs, kPad))), depth(int(round_up(inputs, kPad))),
      weight(size_t(columns) * depth), bias(columns) {}

PackedMatrix pack(const DenseMatrix& dense, Precision precision, int panel) {
    PackedMatrix packed;
    packed.precision = precision;
    packed.inputs = dense.inputs, packed.outputs = dense.outputs;
    packed.columns = dense.columns, packed.depth = dense.depth;
    packed.bias.reset(dense.columns);
    std::copy(dense.bias.begin(), dense.bias.end(), packed.bias.data());
    if (precision == Precision::float32) pack_float32(dense, panel, packed);
    if (precision == Precision::bf16x3) pack_bf16x3(dense, packed);
    if (precision == Precision::int8) pack_int8(dense, panel, packed);
    return packed;
}

Multiplier::Multiplier(const ProductKernels& kernels, int max_depth) : kernels_(kernels) {
    if (!kernels.convert) return;
    const size_t size = size_t(kRowsAtOnce + kSpareRows) * round_up(max_depth, kPad);
    high_.reset(size), low_.reset(size), quantized_.reset(2 * size), scale_.reset(kRowsAtOnce + kSpareRows), start_.reset(kRowsAtOnce);
    activations_.high = high_.data(), activations_.low = low_.data();
    activations_.quantized = quantized_.data(), activations_.scale = scale_.data(), activations_.start = start_.data();
}

void Multiplier::convert(const PackedMatrix& w, const float* a, size_t a_stride, int rows) {
    activations_.rows = rows, activations_.values = a, activations_.stride = a_stride;
    if (kernels_.convert) kernels_.convert(activations_, w.depth);
}

void Multiplier::columns(const PackedMatrix& w, int first, int last, float* c, size_t stride) const {
    kernels_.multiply(w, activations_, first, last, c, stride, w.bias.data() + first, 0);
}

void Multiplier::multiply(const PackedMatrix& w, const float* a, size_t a_stride, int rows, float* c, size_t stride, const float* init,
                          size_t init_stride) {
    if (!init) init = w.bias.data();
    for (int first = 0; first < rows; first += kRowsAtOnce) {
        convert(w, a + first * a_stride, a_stride, std::min(kRowsAtOnce, rows - first));
        kernels_.multiply(w, activations_, 0, w.columns, c + first * stride, stride, init + first * init_stride, init_stride);
    }
}

}  // namespace transduce
