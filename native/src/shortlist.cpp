#include "shortlist.h"

#include <algorithm>

namespace transduce {
namespace {

constexpr int kAtOnce = 8;  // columns that are copied together; divides the width of every panel

// A packed matrix consists of cells of four bytes: one float32 number, a pair of bf16 or four int8 numbers of a column.
//
// float32: [columns / panel][cells][panel]. Others: [columns / 32][cells / 16][2][16 cells][16 columns].
struct FloatCells {
    int n, panel;
    size_t column(int j) const { return size_t(j / panel) * n * panel + j % panel; }
    size_t cell(int i) const { return size_t(i) * panel; }
};
struct TileCells {
    int n;
    size_t column(int j) const { return size_t(j / 32) * n * 32 + j % 32 / 16 * 256 + j % 16; }
    size_t cell(int i) const { return size_t(i / 16) * 512 + i % 16 * 16; }
};

template <class Cells>
void copy_columns(Cells cells, const void* from, void* to, const std::vector<int32_t>& columns) {
    const char* source = static_cast<const char*>(from);
    char* target = static_cast<char*>(to);
    for (int j = 0; j < int(columns.size()); j += kAtOnce) {
        const char* starts[kAtOnce];
        for (int c = 0; c < kAtOnce; c++) starts[c] = source + 4 * cells.column(columns[j + c]);
        char* start = target + 4 * cells.column(j);
        for (int i = 0; i < cells.n; i++) {
            const size_t at = 4 * cells.cell(i);
            for (int c = 0; c < kAtOnce; c++) std::memcpy(start + at + 4 * c, starts[c] + at, 4);
        }
    }
}

}  // namespace

void Shortlist::start(const Model& model, const std::vector<int32_t>& ids) {
    ids_ = ids;
    if (ids.empty()) return;
    const PackedMatrix& all = model.logits;
    std::vector<int32_t> columns = ids;
    columns.resize(round_up(int64_t(ids.size()), kPad), ids[0]);
    const size_t n = columns.size();
    logits_.precision = all.precision, logits_.inputs = all.inputs, logits_.depth = all.depth;
    logits_.outputs = int(ids.size()), logits_.columns = int(n);
    logits_.bias.reserve(n);
    for (size_t j = 0; j < n; j++) logits_.bias[j] = j < ids.size() ? all.bias[columns[j]] : kNever;
    if (all.precision == Precision::float32) {
        logits_.values.reserve(n * all.inputs);
        copy_columns(FloatCells{all.inputs, model.products.panel}, all.values.data(), logits_.values.data(), columns);
    } else if (all.precision == Precision::bf16x3) {
        logits_.high.reserve(n * all.depth), logits_.low.reserve(n * all.depth);
        copy_columns(TileCells{all.depth / 2}, all.high.data(), logits_.high.data(), columns);
        copy_columns(TileCells{all.depth / 2}, all.low.data(), logits_.low.data(), columns);
    } else {
        logits_.quantized.reserve(n * all.depth), logits_.scale.reserve(n), logits_.correction.reserve(n);
        copy_columns(TileCells{all.depth / 4}, all.quantized.data(), logits_.quantized.data(), columns);
        for (size_t j = 0; j < n; j++) logits_.scale[j] = all.scale[columns[j]], logits_.correction[j] = all.correction[columns[j]];
    }
}

int32_t Shortlist::place(int32_t token) const {
    return token < 0 ? token : int32_t(std::lower_bound(ids_.begin(), ids_.end(), token) - ids_.begin());
}

}  // namespace transduce
