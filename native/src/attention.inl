// Attention of a few queries over blocks of keys and values. Included by target_*.cpp after vec.h.
//
// Four heads at a time (a "quad"): scores of all keys, softmax, weighted sum of values. A query's result depends only on the
// keys in its own mask: others get a weight of zero, and groups of keys that no query of the call attends to are skipped.

namespace {

using transduce::AttentionCall;
using transduce::HeadShape;
using transduce::kBlockKeys;

#if defined(__AVX512F__)
constexpr int kMaxQueries = 5, kSumsOne = 8, kSumsMany = 4;  // sums in registers: of one query, of each of several
#elif defined(__AVX2__) || defined(__aarch64__)
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

// Types of stored keys and values.
struct Float32Cache {
    using Number = float;
    static constexpr bool kScaled = false;
    static Vec read(const float* p) { return load(p); }
};
struct Int8Cache {
    using Number = int8_t;
    static constexpr bool kScaled = true;
    static Vec read(const int8_t* p) { return load_int8(p); }
};

template <class Cache>
const typename Cache::Number* numbers_of(const char* block) {
    return reinterpret_cast<const typename Cache::Number*>(block);
}

// int8: the scales [kBlockKeys][4 heads] of a quad, which follow the numbers of a block of keys or values.
inline size_t scales_at(const HeadShape& heads, int quad) { return size_t(kBlockKeys) * (heads.key_width() + quad * 4 * sizeof(float)); }
inline const float* scales_of(const HeadShape& heads, const char* block, int quad) {
    return reinterpret_cast<const float*>(block + scales_at(heads, quad));
}

// Scores [keys][4 heads] of `quad`; returns the largest of each head, in all lanes of that head.
template <class Cache, int Q>
void score_quad(const AttentionCall& call, int quad, const uint16_t* any, float* const* scores, Vec* largest) {
    const HeadShape& heads = call.heads;
    const int chunks = heads.head_width / 4, groups = heads.heads / heads.kv_heads;
    const size_t group_size = size_t(heads.key_width()) * 4;  // four keys
    size_t head_at[4];
    const float *query[Q][4], *bias[Q];
    for (int h = 0; h < 4; h++) {
        const int head = quad * 4 + h < heads.heads ? quad * 4 + h : heads.heads - 1;  // heads that do not exist: any other
        head_at[h] = size_t(head / groups) * heads.head_width * 4;
        for (int i = 0; i < Q; i++) query[i][h] = call.queries[i] + size_t(head) * heads.head_width;
    }
    for (int i = 0; i < Q; i++) {
        largest[i] = splat(kHidden);
        bias[i] = call.biases[i] ? call.biases[i] + quad * call.bias_stride : nullptr;
    }
    for (int block = 0; block < call.n_blocks; block++) {
        for (int key = 0; key < kBlockKeys; key += kKeysOfVec) {
            const size_t at = (size_t(block) * kBlockKeys + key) * 4;
            if (!(any[block] >> key & kVecKeys)) {
                for (int i = 0; i < Q; i++) store(scores[i] + at, splat(kHidden));
                continue;
            }
            const auto* keys = numbers_of<Cache>(call.keys[block]) + key / 4 * group_size + key % 4 * 4;
            const Vec scale = Cache::kScaled ? load(scales_of(heads, call.keys[block], quad) + key * 4) : splat(1.f);
            Vec sum[Q][4];
#pragma GCC unroll 4
            for (int h = 0; h < 4; h++) {
                for (int i = 0; i < Q; i++) sum[i][h] = zero();
                const auto* part = keys + head_at[h];
#pragma GCC unroll 4
                for (int c = 0; c < chunks; c++) {
                    const Vec k = Cache::read(part + c * 16);
#pragma GCC unroll 5
                    for (int i = 0; i < Q; i++) sum[i][h] = fma(k, repeat4(query[i][h] + c * 4), sum[i][h]);
                }
            }
#pragma GCC unroll 5
            for (int i = 0; i < Q; i++) {
                Vec score = sum_quads(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
                if (Cache::kScaled) score = score * scale;
                if (bias[i]) score = score + load(bias[i] + at);
                score = where_keys(call.masks[i][block] >> key & kVecKeys, score, splat(kHidden));
                largest[i] = max(largest[i], score);
                store(scores[i] + at, score);
            }
        }
    }
    for (int i = 0; i < Q; i++) largest[i] = max_over_keys(largest[i]);
}

// Replaces scores by unnormalized weights, times the scales of int8 values. `inverse`: 1 / the sum of the weights of each head.
template <class Cache>
void softmax_quad(const AttentionCall& call, int quad, const uint16_t* mask, float* scores, Vec largest, float* inverse) {
    Vec sum = zero();
    for (int block = 0; block < call.n_blocks; block++) {
        for (int key = 0; key < kBlockKeys; key += kKeysOfVec, scores += W) {
            const Vec weight = where_keys(mask[block] >> key & kVecKeys, exp2(load(scores) - largest), zero());
            sum = sum + weight;
            store(scores, Cache::kScaled ? weight * load(scales_of(call.heads, call.values[block], quad) + key * 4) : weight);
        }
    }
    float sums[W];
    store(sums, sum_over_keys(sum));
    for (int h = 0; h < 4; h++) inverse[h] = 1 / sums[h];
}

// VECS vectors of the outputs of HEADS heads: sums of values weighted by `weights` [keys][4 heads].
template <class Cache, int Q, int HEADS, int VECS>
void sum_values(const AttentionCall& call, const uint16_t* any, const float* const* weights, const size_t* value_at, int head,
                size_t output_at, const float (*inverse)[4]) {
    Vec sum[Q][HEADS][VECS];
    for (int i = 0; i < Q; i++)
        for (int h = 0; h < HEADS; h++)
            for (int v = 0; v < VECS; v++) sum[i][h][v] = zero();
    const size_t row = size_t(call.heads.key_width());
    for (int block = 0; block < call.n_blocks; block++) {
        for (unsigned keys = any[block]; keys; keys &= keys - 1) {
            const int key = __builtin_ctz(keys);
            const auto* values = numbers_of<Cache>(call.values[block]) + key * row;
            const size_t at = (size_t(block) * kBlockKeys + key) * 4 + head;
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) {
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) {
                    const Vec value = Cache::read(values + value_at[h] + v * W);
#pragma GCC unroll 5
                    for (int i = 0; i < Q; i++) sum[i][h][v] = fma(value, splat(weights[i][at + h]), sum[i][h][v]);
                }
            }
        }
    }
    for (int i = 0; i < Q; i++)
        for (int h = 0; h < HEADS; h++)
            for (int v = 0; v < VECS; v++)
                store(call.outputs[i] + output_at + size_t(h) * call.heads.head_width + v * W, sum[i][h][v] * splat(inverse[i][head + h]));
}

// The outputs of one quad, as many heads and vectors at once as fit into registers.
template <class Cache, int Q, int HEADS, int VECS>
void sum_quad(const AttentionCall& call, int quad, const uint16_t* any, const float* const* weights, const float (*inverse)[4]) {
    const int width = call.heads.head_width, groups = call.heads.heads / call.heads.kv_heads;
    const int n_heads = call.heads.heads - quad * 4 < 4 ? call.heads.heads - quad * 4 : 4;
    auto columns = [&](auto heads, auto vecs, int h, int column) {
        size_t value_at[4];
        for (int i = 0; i < heads.value; i++) value_at[i] = size_t((quad * 4 + h + i) / groups) * width + column;
        sum_values<Cache, Q, decltype(heads)::value, decltype(vecs)::value>(call, any, weights, value_at, h,
                                                                            size_t(quad * 4 + h) * width + column, inverse);
    };
    int h = 0;
    for (; h + HEADS <= n_heads; h += HEADS)
        for (int column = 0; column < width; column += VECS * W)
            columns(Constant<HEADS>(), Constant<VECS>(), h, column);
    for (; h < n_heads; h++)
        for (int column = 0; column < width; column += VECS * W) columns(Constant<1>(), Constant<VECS>(), h, column);
}

template <int Q>
void copy_scores(const AttentionCall& call, const AttentionCall::WantedHead& wanted, const float* const* scores) {
    for (int i = 0; i < Q; i++)
        for (int key = 0; key < call.n_scores; key++) call.scores[i][wanted.place + key] = scores[i][key * 4 + wanted.head % 4];
}

template <class Cache, int Q>
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
    const int vecs = call.heads.head_width / W;
    for (int quad = 0; quad * 4 < call.heads.heads; quad++) {
        Vec largest[Q];
        float inverse[Q][4];
        score_quad<Cache, Q>(call, quad, any, scores, largest);
        for (int w = 0; w < call.n_wanted; w++)
            if (call.wanted[w].head / 4 == quad) copy_scores<Q>(call, call.wanted[w], scores);
        for (int i = 0; i < Q; i++) softmax_quad<Cache>(call, quad, call.masks[i], scores[i], largest[i], inverse[i]);
        if (vecs % 4 == 0) sum_quad<Cache, Q, kSums / 4, 4>(call, quad, any, scores, inverse);
        else if (vecs % 2 == 0) sum_quad<Cache, Q, kSums / 2, 2>(call, quad, any, scores, inverse);
        else sum_quad<Cache, Q, 4, 1>(call, quad, any, scores, inverse);
    }
}

using Attend = void (*)(const AttentionCall&);
template <class Cache, int Q>
constexpr Attend kQueries = attend_queries<Cache, (Q < kMaxQueries ? Q : kMaxQueries)>;

template <class Cache>
void attend(const AttentionCall& call) {
    constexpr Attend kAttend[] = {nullptr, kQueries<Cache, 1>, kQueries<Cache, 2>, kQueries<Cache, 3>, kQueries<Cache, 4>, kQueries<Cache, 5>};
    kAttend[call.n_queries](call);
}

void store_float32(const HeadShape& heads, char* keys, char* values, int at, const float* key, const float* value) {
    const int width = heads.key_width();
    float* to = reinterpret_cast<float*>(keys) + size_t(at / 4) * 4 * width + at % 4 * 4;
    for (int c = 0; c < width; c += 4) std::memcpy(to + c * 4, key + c, 16);
    std::memcpy(reinterpret_cast<float*>(values) + size_t(at) * width, value, size_t(width) * 4);
}

// Each key and value of each head has a scale, which is stored for all query heads that share it.
void store_int8(const HeadShape& heads, char* keys, char* values, int at, const float* key, const float* value) {
    const int width = heads.head_width, groups = heads.heads / heads.kv_heads;
    char *to_key = keys + size_t(at / 4) * 4 * heads.key_width() + at % 4 * 4, *to_value = values + size_t(at) * heads.key_width();
    for (int h = 0; h < heads.kv_heads; h++, key += width, value += width, to_key += 4 * width, to_value += width) {
        const float key_scale = quantize_row(key, width, [=](int k, Bytes q) {
            for (int i = 0; i < 16; i += 4) std::memcpy(to_key + (k + i) * 4, reinterpret_cast<const char*>(&q) + i, 4);
        });
        const float value_scale = quantize_row(value, width, [=](int k, Bytes q) { std::memcpy(to_value + k, &q, 16); });
        for (int head = h * groups; head < (h + 1) * groups; head++) {
            const size_t place = scales_at(heads, head / 4) + (at * 4 + head % 4) * sizeof(float);
            std::memcpy(keys + place, &key_scale, 4);
            std::memcpy(values + place, &value_scale, 4);
        }
    }
}

size_t float32_bytes(const HeadShape& heads) { return size_t(kBlockKeys) * heads.key_width() * sizeof(float); }
size_t int8_bytes(const HeadShape& heads) { return scales_at(heads, (heads.heads + 3) / 4); }

constexpr transduce::AttentionKernels kFloat32Attention = {float32_bytes, attend<Float32Cache>, store_float32};
constexpr transduce::AttentionKernels kInt8Attention = {int8_bytes, attend<Int8Cache>, store_int8};

}  // namespace
