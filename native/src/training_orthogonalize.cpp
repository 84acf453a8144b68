#include <algorithm>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {

void orthogonalize(const OrthogonalizeCall& call, int n_threads) {
    const auto kernel = training_kernels()->orthogonalize_matrix;
    const size_t rows = call.rows, stride = round_up(call.columns, kPanelColumns), gram = round_up(call.rows, kPanelColumns);
    const size_t widest = std::max(stride, gram);
    // Two matrices and two of their products, and the operands in bfloat16: all rows, and one panel of 64 columns.
    const size_t size = rows * 2 * (stride + gram) + (rows * widest + kPanelColumns * widest + 1) / 2;
    Pool::get().run(n_threads, int(call.n), [&](int matrix) {
        static thread_local Buffer<float> scratch;
        scratch.reserve(size);
        kernel(call, matrix, scratch.data());
    });
}

}  // namespace transduce
