#include <algorithm>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {

namespace {

template <class Number>
void share_matrices(const TrainingKernels<Number>& kernels, const OrthogonalizeCall& call, int n_threads) {
    const size_t rows = call.rows, stride = round_up(call.columns, kPanelColumns), gram = round_up(call.rows, kPanelColumns);
    const size_t widest = std::max(stride, gram);
    // Two matrices and two of their products, and the rounded operands: all rows, and one panel of 64 columns.
    const size_t size = rows * 2 * (stride + gram) + ((rows + kPanelColumns) * widest * sizeof(Number) + 3) / 4;
    Pool::get().run(n_threads, int(call.n), [&](int matrix) {
        static thread_local Buffer<float> scratch;
        scratch.reserve(size);
        kernels.orthogonalize_matrix(call, matrix, scratch.data());
    });
}

}  // namespace

void orthogonalize(const OrthogonalizeCall& call, int n_threads) {
    if (const auto* kernels = training_kernels<uint16_t>()) share_matrices(*kernels, call, n_threads);
    else share_matrices(*training_kernels<float>(), call, n_threads);
}

}  // namespace transduce
