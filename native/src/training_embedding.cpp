#include "pool.h"
#include "training.h"

namespace transduce {

void embedding(const EmbeddingCall& call, int n_threads) {
    const auto kernel = training_kernels<float>()->embedding_rows;
    Pool::get().run_rows(n_threads, call.rows, kPieceRows, [&](int, int64_t first, int64_t n) { kernel(call, first, first + n); });
}

void embedding_backward(const EmbeddingCall& call, int n_threads) {
    const auto& kernels = *training_kernels<float>();
    const int shares = call.grad_table ? kEmbeddingShares : 0;
    Pool::get().run(n_threads, shares + (call.grad_positions ? int(call.length) : 0), [&](int piece) {
        if (piece < shares) kernels.embedding_gradient(call, piece);
        else kernels.position_gradient(call, piece - shares);
    });
}

}  // namespace transduce
