#include <algorithm>

#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

constexpr int64_t kPieceRows = 128;

}  // namespace

void embedding(const EmbeddingCall& call, int n_threads) {
    const auto& kernels = *training_kernels<float>();
    Pool::get().run(n_threads, int((call.rows + kPieceRows - 1) / kPieceRows), [&](int piece) {
        kernels.embedding_rows(call, piece * kPieceRows, std::min(call.rows, (piece + 1) * kPieceRows));
    });
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
