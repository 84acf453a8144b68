#include <algorithm>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

constexpr int64_t kPieceScores = 1 << 16;  // about as many are computed by a thread at once

// The floats that HeadScratch in attention_training.inl takes, at most.
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

}  // namespace transduce
