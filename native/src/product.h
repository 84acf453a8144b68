// Matrix products of activations with packed weights: C = A W + I.
//
// A has one row per token. I is the bias (one row for all tokens) or the residual stream (one row per token). Sums start from I, so that
// adding it needs no separate pass. Row r of C depends only on row r of A and I, and the order of its sums does not depend on the number of
// rows. Therefore a sentence's result does not depend on its batch.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "buffer.h"

namespace transduce {

enum class Precision { float32, bf16x3, int8 };

constexpr int kPad = 64;          // widths of weights and activations are padded to a multiple of this with zeros
constexpr int kSpareRows = 32;    // AMX reads and writes whole tiles: matrices have this many more rows than are used
constexpr int kRowsAtOnce = 192;  // number of rows that are converted at once, so that their converted form stays in the L2 cache
// The stride of rows of activations, in floats: an odd number of cache lines. With a multiple of a large power of two, the rows of a
// block would compete for a few sets of the L1 cache.
constexpr size_t row_stride(size_t columns) { return (columns + kPad - 1) / kPad * kPad + 16; }
constexpr float kNever = -1e30f;  // the logit of columns that are only padding

// Weights [inputs, outputs] in the order in which the products of one precision read them.
//
// float32: [outputs / panel][inputs][panel]; panel: number of columns that a kernel computes at once, which depends on the instruction set.
// bf16x3: a number is the sum of two bf16 numbers, high and low: [outputs / 32][inputs / 32][2][16 pairs][16 columns][2].
// int8: a number is scale[column] * q; q: [outputs / 32][inputs / 64][2][64 / panel][16 columns][panel] with a panel of 4 or 8. correction:
// -128 * sum of the column, for instructions with unsigned activations, to which 128 is added.
struct PackedMatrix {
    Precision precision = Precision::float32;
    int inputs = 0, outputs = 0;  // without padding
    int columns = 0, depth = 0;   // with padding: columns = outputs, depth = inputs
    Buffer<float> values, bias, scale;
    Buffer<uint16_t> high, low;
    Buffer<int8_t> quantized;
    Buffer<int32_t> correction;
    Buffer<float> error, norm;  // int8 matrices for screening: the norm of each column's quantization error, and of each quantized column
};

// Weights before packing, [columns, depth] in row-major order as in PyTorch. Each function in `sources` writes its part of rows
// [first, last) and of their biases into memory that is zero before.
struct DenseMatrix {
    DenseMatrix(int outputs, int inputs);

    int outputs, inputs, columns, depth;
    std::vector<std::function<void(int first, int last, float* rows, float* biases)>> sources;
};

// Reads and packs a few rows at a time. `screen`: whether to compute `error` and `norm` too.
PackedMatrix pack(const DenseMatrix& dense, Precision precision, int panel, bool screen = false);
// Writes a column [depth] of int8 weights, converted to float32, to `to`.
void unpack(const PackedMatrix& packed, int panel, int column, float* to);

// Rows of activations, and pointers to their converted form.
struct Activations {
    int rows = 0;
    const float* values = nullptr;
    size_t stride = 0;
    uint16_t *high = nullptr, *low = nullptr;  // bf16x3: tiles [rows / 16][depth / 32][16][32]
    int8_t* quantized = nullptr;               // int8: tiles [rows / 16][depth / 64][16][64], or rows of one or two times `depth`
    float* scale = nullptr;                    // int8: the scale of each row
    int32_t* start = nullptr;                  // int8, AVX2: initial value of the sums of each row
};

// The products of one precision for one instruction set.
struct ProductKernels {
    int panel;  // columns of a panel of float32 and int8 weights
    // Fills in the converted form of at most kRowsAtOnce rows for products with matrices of this depth.
    void (*convert)(Activations& a, int depth);
    // Computes columns [first, last), multiples of kPad, of C = A W + I. `init`: I; `init_stride` 0: all rows of I are the same.
    void (*multiply)(const PackedMatrix& w, const Activations& a, int first, int last, float* c, size_t stride, const float* init,
                     size_t init_stride);
};

// The kernels that a thread multiplies with, and its memory for converted activations.
class Multiplier {
public:
    Multiplier(const ProductKernels& kernels, int max_depth);

    // Computes all columns of C = A W + init (default: W's bias). C and init must have kSpareRows more rows than `rows`.
    void multiply(const PackedMatrix& w, const float* a, size_t a_stride, int rows, float* c, size_t stride, const float* init = nullptr,
                  size_t init_stride = 0);

    // A product in two steps, for at most kRowsAtOnce rows: convert A once, then compute a few columns at a time.
    void convert(const PackedMatrix& w, const float* a, size_t a_stride, int rows);
    void columns(const PackedMatrix& w, int first, int last, float* c, size_t stride) const;
    // For int8, after `convert`: the scale of each row.
    const float* scales() const { return activations_.scale; }

private:
    const ProductKernels& kernels_;
    Activations activations_;
    Buffer<uint16_t> high_, low_;
    Buffer<int8_t> quantized_;
    Buffer<float> scale_;
    Buffer<int32_t> start_;
};

}  // namespace transduce
