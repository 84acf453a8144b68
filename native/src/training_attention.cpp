#include <algorithm>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

constexpr int64_t kPieceHeads = 16;  // groups of heads that a thread takes at once

// Of HeadScratch in attention_training.inl, whose rows are padded to vectors.
size_t scratch_size(const HeadsCall& call) {
    const size_t t = call.queries, s = round_up(call.keys, 16), width = round_up(call.width, 16), value = round_up(call.value_width, 16);
    return t * (2 * width + 2 * value + 2 * s) + s * (3 * width + 3 * value);
}

template <class Work>
void share_groups(const HeadsCall& call, int n_threads, Work work) {
    const int64_t groups = call.batch * call.kv_heads;
    const size_t size = scratch_size(call);
    Pool::get().run(n_threads, int((groups + kPieceHeads - 1) / kPieceHeads), [&](int piece) {
        static thread_local Buffer<float> scratch;
        scratch.reserve(size);
        for (int64_t i = piece * kPieceHeads; i < std::min(groups, (piece + 1) * kPieceHeads); i++)
            work(i / call.kv_heads, int(i % call.kv_heads), scratch.data());
    });
}

}  // namespace

void attend(const HeadsCall& call, int n_threads) {
    const auto kernel = training_kernels()->attend_group;
    share_groups(call, n_threads, [&](int64_t batch, int group, float* scratch) { kernel(call, batch, group, scratch); });
}

void attend_backward(const HeadsCall& call, int n_threads) {
    const auto kernel = training_kernels()->attend_group_backward;
    share_groups(call, n_threads, [&](int64_t batch, int group, float* scratch) { kernel(call, batch, group, scratch); });
}

}  // namespace transduce
