// Attention, embeddings and residual connections with their norms: their rows, divided among threads.
#include <algorithm>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

constexpr int64_t kPieceScores = 1 << 16;  // about as many are computed by a thread at once

// An upper bound of the memory, in floats, that HeadScratch in attention_training.inl takes.
template <class Call>
size_t scratch_size(const Call& call) {
    const size_t t = round_up(call.block(), 32), s = round_up(call.keys, 32), width = round_up(call.width, 32), value = round_up(call.value_width, 32);
    return t * (4 * width + 4 * value + 6 * s) + s * (3 * width + 3 * value);
}

}  // namespace

template <class Number>
void attend(const HeadsCall<Number>& call, int n_threads) {
    const auto kernel = training_kernels<Number>()->attend_groups;
    const int64_t groups = call.batch * call.kv_heads;
    const int64_t scores = int64_t(call.heads / call.kv_heads) * call.queries * call.keys, some = std::max<int64_t>(kPieceScores / scores, 1);
    const size_t size = scratch_size(call);
    Pool::get().run(n_threads, int((groups + some - 1) / some), [&](int piece) {
        static thread_local Buffer<float> scratch;
        scratch.reserve(size);
        kernel(call, piece * some, std::min(groups, (piece + 1) * some), scratch.data());
    });
}

template void attend(const HeadsCall<uint16_t>&, int);
template void attend(const HeadsCall<float>&, int);

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

template <class Number>
void residual(const ResidualCall<Number>& call, int n_threads) {
    const auto kernel = training_kernels<Number>()->residual_rows;
    Pool::get().run_rows(n_threads, call.rows, kPieceRows, [&](int, int64_t first, int64_t n) { kernel(call, first, first + n); });
}

template <class Number>
void residual_backward(const ResidualCall<Number>& call, int n_threads) {
    const auto& kernels = *training_kernels<Number>();
    if (!call.grad_x)
        return Pool::get().run_rows(n_threads, call.rows, kPieceRows,
                                    [&](int, int64_t first, int64_t n) { kernels.dropout_rows_backward(call, first, first + n); });
    // The sums of each piece. They are added in the order of the pieces, whichever threads have computed them.
    const size_t width = round_up(call.width, 16), pieces = (call.rows + kPieceRows - 1) / kPieceRows;
    Buffer<float> sums(pieces * 2 * width);
    Pool::get().run_rows(n_threads, call.rows, kPieceRows, [&](int piece, int64_t first, int64_t n) {
        float* own = sums.data() + size_t(piece) * 2 * width;
        kernels.residual_rows_backward(call, first, first + n, own, own + width);
    });
    for (int k = 0; k < call.width; k++) {
        double gain = 0, shift = 0;
        for (size_t p = 0; p < pieces; p++) gain += sums[p * 2 * width + k], shift += sums[(p * 2 + 1) * width + k];
        call.grad_gain[k] = float(gain) + (call.adds ? call.grad_gain[k] : 0);
        if (call.grad_shift) call.grad_shift[k] = float(shift) + (call.adds ? call.grad_shift[k] : 0);
    }
}

template void residual(const ResidualCall<uint16_t>&, int);
template void residual(const ResidualCall<float>&, int);
template void residual_backward(const ResidualCall<uint16_t>&, int);
template void residual_backward(const ResidualCall<float>&, int);

}  // namespace transduce
