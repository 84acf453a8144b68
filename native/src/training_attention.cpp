#include <algorithm>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

constexpr int64_t kPieceScores = 1 << 16;  // about as many are computed by a thread at once

// Of HeadScratch in attention_training.inl, whose rows are padded to vectors.
template <class Call>
size_t scratch_size(const Call& call) {
    const size_t t = call.block(), s = round_up(call.keys, 16), width = round_up(call.width, 16), value = round_up(call.value_width, 16);
    return t * (2 * width + 2 * value + 2 * s) + s * (3 * width + 3 * value);
}

template <class Call, class Work>
void share_groups(const Call& call, int n_threads, Work work) {
    const int64_t groups = call.batch * call.kv_heads;
    const int64_t scores = int64_t(call.heads / call.kv_heads) * call.queries * call.keys, some = std::max<int64_t>(kPieceScores / scores, 1);
    const size_t size = scratch_size(call);
    Pool::get().run(n_threads, int((groups + some - 1) / some), [&](int piece) {
        static thread_local Buffer<float> scratch;
        scratch.reserve(size);
        for (int64_t i = piece * some; i < std::min(groups, (piece + 1) * some); i++)
            work(i / call.kv_heads, int(i % call.kv_heads), scratch.data());
    });
}

}  // namespace

template <class Number>
void attend(const HeadsCall<Number>& call, int n_threads) {
    const auto kernel = training_kernels<Number>()->attend_group;
    share_groups(call, n_threads, [&](int64_t batch, int group, float* scratch) { kernel(call, batch, group, scratch); });
}

template <class Number>
void attend_backward(const HeadsCall<Number>& call, int n_threads) {
    const auto kernel = training_kernels<Number>()->attend_group_backward;
    share_groups(call, n_threads, [&](int64_t batch, int group, float* scratch) { kernel(call, batch, group, scratch); });
}

template void attend(const HeadsCall<uint16_t>&, int);
template void attend(const HeadsCall<float>&, int);
template void attend_backward(const HeadsCall<uint16_t>&, int);
template void attend_backward(const HeadsCall<float>&, int);

}  // namespace transduce
