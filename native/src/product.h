// Matrix products of activations with packed weights: C = A W + I.
//
// A has one row per token. I is the bias (one row for all) or the residual stream (a row each): products start from it, so
// neither needs a pass of its own. Row r of C depends only on row r of A and I, and the order of its sums does not depend on the
// number of rows. Therefore a sentence's result does not depend on its batch.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "buffer.h"

namespace transduce {

enum class Precision { float32, bf16x3, int8 };

constexpr int kPad = 64;          // widths of weights and activations are padded to a multiple of this with zeros
constexpr int kSpareRows = 32;    // AMX reads and writes whole tiles: matrices have this many more rows than are used
constexpr int kRowsAtOnce = 192;  // rows that are converted at once; their converted form stays in the L2 cache
// The stride of rows of activations, in floats: an odd number of cache lines. With a multiple of a large power of two, the rows of a
// block would compete for a few sets of the L1 cache.
constexpr size_t row_stride(size_t columns) { return (columns + kPad - 1) / kPad * kPad + 16; }
constexpr float kNever = -1e30f;  // the logit of columns that are only padding

// Weights [inputs, outputs] in the order that one precision's products read them.
//
// float32: [outputs / panel][inputs][panel]; panel: columns that a kernel computes at once, different for each target.
// bf16x3: a number is the sum of two bf16 numbers, high and low: [outputs / 32][inputs / 32][2][16 pairs][16 columns][2].
// int8: scale[column] * q: [outputs / 32][inputs / 64][2][64 / panel][16 columns][panel], panel: 4 or 8; correction: -128 * sum of the column,
// for products with unsigned activations, which have 128 added.
struct PackedMatrix {
    Precision precision = Precision::float32;
    int inputs = 0, outputs = 0;  // without padding
    int columns = 0, depth = 0;   // padded: columns of C, inputs of A
    Buffer<float> values, bias, scale;
    Buffer<uint16_t> high, low;
    Buffer<int8_t> quantized;
    Buffer<int32_t> correction;
    Buffer<float> error, norm;  // int8, of a screen: of each column, the norm of what quantization changed and of the quantized column
};

// Weights before packing, [columns, depth] in row-major order as in PyTorch. Each of `sources` writes its part of rows [first, last), and
// of their biases, over zeros.
struct DenseMatrix {
    DenseMatrix(int outputs, int inputs);

    int outputs, inputs, columns, depth;
    std::vector<std::function<void(int first, int last, float* rows, float* biases)>> sources;
};

// Reads and packs a few rows at a time.
PackedMatrix pack(const DenseMatrix& dense, Precision precision, int panel, bool screen = false);
// A column of int8 weights [depth].
void unpack(const PackedMatrix& packed, int panel, int column, float* to);

// Rows of activations, and pointers to their converted form.
struct Activations {
    int rows = 0;
    const float* values = nullptr;
    size_t stride = 0;
    uint16_t *high = nullptr, *low = nullptr;  // bf16x3: tiles [rows / 16][depth / 32][16][32]
    int8_t* quantized = nullptr;               // int8: tiles [rows / 16][depth / 64][16][64], or rows of one or two times `depth`
    float* scale = nullptr;                    // int8: of each row
    int32_t* start = nullptr;                  // int8, AVX2: initial value of the sums of each row
};

// The products of one precision for one instruction set.
struct ProductKernels {
    int panel;  // columns of a panel of float32 and int8 weights
    // Fills in the converted form of at most kRowsAtOnce rows for products with matrices of this depth.
    void (*convert)(Activations& a, int depth);
    // Columns [first, last), multiples of kPad, of C = A W + I. `init_stride` 0: the same row for all.
    void (*multiply)(const PackedMatrix& w, const Activations& a, int first, int last, float* c, size_t stride, const float* init,
                     size_t init_stride);
};

// The kernels that a thread multiplies with, and its memory for converted activations.
class Multiplier {
public:
    Multiplier(const ProductKernels& kernels, int max_depth);

    // All columns of C = A W + init; without `init`, the bias. C and init have kSpareRows more rows than `rows`.
    void multiply(const PackedMatrix& w, const float* a, size_t a_stride, int rows, float* c, size_t stride, const float* init = nullptr,
                  size_t init_stride = 0);

    // A product in two steps, for at most kRowsAtOnce rows, if its columns are needed a few at a time.
    void convert(const PackedMatrix& w, const float* a, size_t a_stride, int rows);
    void columns(const PackedMatrix& w, int first, int last, float* c, size_t stride) const;
    // int8, after `convert`: the scale of each row.
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
