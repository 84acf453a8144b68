#include "product.h"

#include <algorithm>
#include <cmath>

namespace transduce {
namespace {

int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

uint16_t to_bf16(float x) {  // rounded to the nearest, ties to even; NaN stays NaN
    const uint32_t bits = uint32_t(bits_of(x));
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void pack_bf16x3(const float* column, int j, PackedMatrix& packed) {
    for (int i = 0; i < packed.inputs; i++) {
        const size_t tile = (size_t(j / 32) * (packed.depth / 32) + i / 32) * 2 + j % 32 / 16;
        const size_t at = ((tile * 16 + i % 32 / 2) * 16 + j % 16) * 2 + i % 2;
        packed.high[at] = to_bf16(column[i]);
        packed.low[at] = to_bf16(column[i] - float_of(int32_t(uint32_t(packed.high[at]) << 16)));
    }
}

// Where `panel` numbers of column j are in int8, from number i on, a multiple of `panel`.
size_t int8_place(const PackedMatrix& packed, int panel, int j, int i) {
    const size_t tile = (size_t(j / 32) * (packed.depth / 64) + i / 64) * 2 + j % 32 / 16;
    return tile * 1024 + size_t(i % 64 * 16 + j % 16 * panel);
}

// Written so that compilers vectorise it. A column that is not finite gets such a scale.
void pack_int8(const float* column, int j, int panel, int8_t* q, PackedMatrix& packed) {
    constexpr float kRound = 3 << 22;  // a sum with it ends in the rounded number
    int32_t top = 0, sum = 0;
    for (int i = 0; i < packed.depth; i++) top = std::max(top, bits_of(column[i]) & 0x7fffffff);
    const float largest = float_of(top);
    const float inverse = largest > 0 && std::isfinite(largest) ? 127 / largest : 0;
    for (int i = 0; i < packed.depth; i++) sum += q[i] = int8_t(bits_of(column[i] * inverse + kRound));
    for (int i = 0; i < packed.depth; i += panel) std::memcpy(&packed.quantized[int8_place(packed, panel, j, i)], q + i, panel);
    packed.scale[j] = largest / 127, packed.correction[j] = -128 * sum;
    double square = 0, square_error = 0;
    for (int i = 0; packed.norm.size() && i < packed.inputs; i++) {
        const double quantized = double(q[i]) * packed.scale[j];
        square += quantized * quantized, square_error += (column[i] - quantized) * (column[i] - quantized);
    }
    if (packed.norm.size()) packed.norm[j] = float(std::sqrt(square) * 1.0001), packed.error[j] = float(std::sqrt(square_error) * 1.0001);
}

}  // namespace

DenseMatrix::DenseMatrix(int outputs, int inputs)
    : outputs(outputs), inputs(inputs), columns(int(round_up(outputs, kPad))), depth(int(round_up(inputs, kPad))) {}

PackedMatrix pack(const DenseMatrix& dense, Precision precision, int panel, bool screen) {
    PackedMatrix packed;
    packed.precision = precision;
    packed.inputs = dense.inputs, packed.outputs = dense.outputs;
    packed.columns = dense.columns, packed.depth = dense.depth;
    packed.bias.reset(dense.columns);
    const size_t size = size_t(dense.columns) * dense.depth;
    if (precision == Precision::float32) packed.values.reset(size_t(dense.columns) * dense.inputs);
    if (precision == Precision::bf16x3) packed.high.reset(size), packed.low.reset(size);
    if (precision == Precision::int8) packed.quantized.reset(size), packed.scale.reset(dense.columns), packed.correction.reset(dense.columns);
    if (screen) packed.error.reset(dense.columns), packed.norm.reset(dense.columns);
    std::vector<float> rows(size_t(kPad) * dense.depth);
    std::vector<int8_t> quantized(dense.depth);
    for (int first = 0; first < dense.columns; first += kPad) {
        std::fill(rows.begin(), rows.end(), 0.f);
        for (const auto& source : dense.sources) source(first, first + kPad, rows.data(), packed.bias.data() + first);
        for (int j = first; j < first + kPad; j++) {
            const float* column = &rows[size_t(j - first) * dense.depth];
            for (int i = 0; precision == Precision::float32 && i < dense.inputs; i++)
                packed.values[(size_t(j / panel) * dense.inputs + i) * panel + j % panel] = column[i];
            if (precision == Precision::bf16x3) pack_bf16x3(column, j, packed);
            if (precision == Precision::int8) pack_int8(column, j, panel, quantized.data(), packed);
        }
    }
    return packed;
}

void unpack(const PackedMatrix& packed, int panel, int column, float* to) {
    const float scale = packed.scale[column];
    for (int i = 0; i < packed.depth; i += panel) {
        const int8_t* q = &packed.quantized[int8_place(packed, panel, column, i)];
        for (int j = 0; j < panel; j++) to[i + j] = scale * q[j];
    }
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
