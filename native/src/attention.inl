// Attention of a few queries over blocks of keys and values. Included by target_*.cpp after vec.h.
//
// Four heads at a time (a "quad"): scores of all keys, softmax, weighted sum of values. A query's result depends only on the
// keys in its own mask: others get a weight of zero, and groups of keys that no query of the call attends to are skipped.

namespace {

using transduce::AttentionCall;
using transduce::kBlockKeys;

#if defined(__AVX512F__)
constexpr int kMaxQueries = 5, kSumsOne = 8, kSumsMany = 4;  // sums in registers: of one query, of each of several
#elif defined(__AVX2__)
constexpr int kMaxQueries = 2, kSumsOne = 8, kSumsMany = 4;
#else
constexpr int kMaxQueries = 1, kSumsOne = 4, kSumsMany = 4;
#endif
template <int N>
struct Constant {
    static constexpr int value = N;
};
constexpr int kKeysOfVec = W / 4;
constexpr unsigned kVecKeys = (1u << kKeysOfVec) - 1;
constexpr float kHidden = -1e30f;

// Scores [keys][4 heads] of `quad`; returns the largest of each head, in all lanes of that head.
template <int Q>
void score_quad(const AttentionCall& call, int quad, const uint16_t* any, float* const* scores, Vec* largest) {
    const int chunks = call.head_width / 4, groups = call.heads / call.kv_heads;
    const size_t group_size = size_t(call.kv_heads) * call.head_width * 4;  // four keys
    size_t head_at[4];
    const float* query[Q][4];
    for (int h = 0; h < 4; h++) {
        const int head = quad * 4 + h < call.heads ? quad * 4 + h : call.heads - 1;  // heads that do not exist: any other
        head_at[h] = size_t(head / groups) * call.head_width * 4;
        for (int i = 0; i < Q; i++) query[i][h] = call.queries[i] + size_t(head) * call.head_width;
    }
    for (int i = 0; i < Q; i++) largest[i] = splat(kHidden);
    for (int block = 0; block < call.n_blocks; block++) {
        for (int key = 0; key < kBlockKeys; key += kKeysOfVec) {
            const size_t at = (size_t(block) * kBlockKeys + key) * 4;
            if (!(any[block] >> key & kVecKeys)) {
                for (int i = 0; i < Q; i++) store(scores[i] + at, splat(kHidden));
                continue;
            }
            const float* keys = call.keys[block] + key / 4 * group_size + key % 4 * 4;
            Vec sum[Q][4];
#pragma GCC unroll 4
            for (int h = 0; h < 4; h++) {
                for (int i = 0; i < Q; i++) sum[i][h] = zero();
                const float* part = keys + head_at[h];
#pragma GCC unroll 4
                for (int c = 0; c < chunks; c++) {
                    const Vec k = load(part + c * 16);
#pragma GCC unroll 5
                    for (int i = 0; i < Q; i++) sum[i][h] = fma(k, repeat4(query[i][h] + c * 4), sum[i][h]);
                }
            }
#pragma GCC unroll 5
            for (int i = 0; i < Q; i++) {
                const Vec score = where_keys(call.masks[i][block] >> key & kVecKeys, sum_quads(sum[i][0], sum[i][1], sum[i][2], sum[i][3]),
                                             splat(kHidden));
                largest[i] = max(largest[i], score);
                store(scores[i] + at, score);
            }
        }
    }
    for (int i = 0; i < Q; i++) largest[i] = max_over_keys(largest[i]);
}

// Turns scores into weights; returns one over their sum for each head.
void softmax_quad(const AttentionCall& call, const uint16_t* mask, float* scores, Vec largest, float* inverse) {
    Vec sum = zero();
    for (int block = 0; block < call.n_blocks; block++) {
        for (int key = 0; key < kBlockKeys; key += kKeysOfVec, scores += W) {
            const Vec weight = where_keys(mask[block] >> key & kVecKeys, exp2(load(scores) - largest), zero());
            sum = sum + weight;
            store(scores, weight);
        }
    }
    float sums[W];
    store(sums, sum_over_keys(sum));
    for (int h = 0; h < 4; h++) inverse[h] = 1 / sums[h];
}

// VECS vectors of the outputs of HEADS heads: sums of values weighted by `weights` [keys][4 heads].
template <int Q, int HEADS, int VECS>
void sum_values(const AttentionCall& call, const uint16_t* any, const float* const* weights, const size_t* value_at, int head,
                size_t output_at, const float (*inverse)[4]) {
    Vec sum[Q][HEADS][VECS];
    for (int i = 0; i < Q; i++)
        for (int h = 0; h < HEADS; h++)
            for (int v = 0; v < VECS; v++) sum[i][h][v] = zero();
    const size_t row = size_t(call.kv_heads) * call.head_width;
    for (int block = 0; block < call.n_blocks; block++) {
        for (unsigned keys = any[block]; keys; keys &= keys - 1) {
            const int key = __builtin_ctz(keys);
            const float* values = call.values[block] + key * row;
            const size_t at = (size_t(block) * kBlockKeys + key) * 4 + head;
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) {
                    const Vec value = load(values + value_at[h] + v * W);
#pragma GCC unroll 5
                    for (int i = 0; i < Q; i++) sum[i][h][v] = fma(value, splat(weights[i][at + h]), sum[i][h][v]);
                }
            }
        }
    }
    for (int i = 0; i < Q; i++)
        for (int h = 0; h < HEADS; h++)
            for (int v = 0; v < VECS; v++)
                store(call.outputs[i] + output_at + size_t(h) * call.head_width + v * W, sum[i][h][v] * splat(inverse[i][head + h]));
}

// The outputs of one quad, as many heads and vectors at once as fit into registers.
template <int Q, int HEADS, int VECS>
void sum_quad(const AttentionCall& call, int quad, const uint16_t* any, const float* const* weights, const float (*inverse)[4]) {
    const int groups = call.heads / call.kv_heads, n_heads = call.heads - quad * 4 < 4 ? call.heads - quad * 4 : 4;
    auto columns = [&](auto heads, auto vecs, int h, int column) {
        size_t value_at[4];
        for (int i = 0; i < heads.value; i++) value_at[i] = size_t((quad * 4 + h + i) / groups) * call.head_width + column;
        sum_values<Q, decltype(heads)::value, decltype(vecs)::value>(call, any, weights, value_at, h,
                                                                     size_t(quad * 4 + h) * call.head_width + column, inverse);
    };
    int h = 0;
    for (; h + HEADS <= n_heads; h += HEADS)
        for (int column = 0; column < call.head_width; column += VECS * W)
            columns(Constant<HEADS>(), Constant<VECS>(), h, column);
    for (; h < n_heads; h++)
        for (int column = 0; column < call.head_width; column += VECS * W) columns(Constant<1>(), Constant<VECS>(), h, column);
}

template <int Q>
void attend_queries(const AttentionCall& call) {
    const size_t n_keys = size_t(call.n_blocks) * kBlockKeys;
    float* scores[Q];
    for (int i = 0; i < Q; i++) scores[i] = call.scratch + i * n_keys * 4;
    uint16_t* any = reinterpret_cast<uint16_t*>(call.scratch + Q * n_keys * 4);
    for (int b = 0; b < call.n_blocks; b++) {
        any[b] = 0;
        for (int i = 0; i < Q; i++) any[b] |= call.masks[i][b];
    }
    constexpr int kSums = Q == 1 ? kSumsOne : kSumsMany;
    const int vecs = call.head_width / W;
    for (int quad = 0; quad * 4 < call.heads; quad++) {
        Vec largest[Q];
        float inverse[Q][4];
        score_quad<Q>(call, quad, any, scores, largest);
        for (int i = 0; i < Q; i++) softmax_quad(call, call.masks[i], scores[i], largest[i], inverse[i]);
        if (vecs % 4 == 0) sum_quad<Q, kSums / 4, 4>(call, quad, any, scores, inverse);
        else if (vecs % 2 == 0) sum_quad<Q, kSums / 2, 2>(call, quad, any, scores, inverse);
        else sum_quad<Q, 4, 1>(call, quad, any, scores, inverse);
    }
}

void attend(const AttentionCall& call) {
    switch (call.n_queries) {
    case 1: return attend_queries<1>(call);
#if defined(__AVX2__)
    case 2: return attend_queries<2>(call);
#endif
#if defined(__AVX512F__)
    case 3: return attend_queries<3>(call);
    case 4: return attend_queries<4>(call);
    case 5: return attend_queries<5>(call);
#endif
    }
}

void store_key_value(float* keys, float* values, int at, const float* key, const float* value, int width) {
    float* to = keys + size_t(at / 4) * 4 * width + at % 4 * 4;
    for (int c = 0; c < width; c += 4) std::memcpy(to + c * 4, key + c, 16);
    std::memcpy(values + size_t(at) * width, value, size_t(width) * 4);
}

}  // namespace
