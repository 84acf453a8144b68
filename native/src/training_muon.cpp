#include <algorithm>
#include <vector>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {

namespace {

// Four matrices, two of them of `rows` padded to vectors, and the rounded operands: all rows, and one panel of 64 columns.
size_t memory_of(const MuonMatrix& matrix, size_t number_size) {
    const size_t rows = std::min(matrix.rows, matrix.columns), padded_rows = round_up(rows, 16);
    const size_t stride = round_up(std::max(matrix.rows, matrix.columns), kPanelColumns), gram = round_up(rows, kPanelColumns);
    return 2 * padded_rows * stride + 2 * rows * gram + ((rows + kPanelColumns) * std::max(stride, gram) * number_size + 3) / 4;
}

template <class Number>
void share_matrices(const TrainingKernels<Number>& kernels, const MuonMatrix* matrices, int64_t n, const MuonCall& call, int n_threads) {
    std::vector<const MuonMatrix*> largest_first;
    for (int64_t i = 0; i < n; i++) largest_first.push_back(matrices + i);
    std::stable_sort(largest_first.begin(), largest_first.end(), [](const MuonMatrix* a, const MuonMatrix* b) {
        return int64_t(a->rows) * a->columns > int64_t(b->rows) * b->columns;
    });
    Pool::get().run(n_threads, int(n), [&](int i) {
        static thread_local Buffer<float> scratch;
        scratch.reserve(memory_of(*largest_first[i], sizeof(Number)));
        kernels.muon_step(call, *largest_first[i], scratch.data());
    });
}

}  // namespace

void muon(const MuonMatrix* matrices, int64_t n, const MuonCall& call, int n_threads) {
    if (const auto* kernels = training_kernels<uint16_t>()) share_matrices(*kernels, matrices, n, call, n_threads);
    else share_matrices(*training_kernels<float>(), matrices, n, call, n_threads);
}

}  // namespace transduce
