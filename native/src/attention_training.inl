// Attention and its gradients for training. Included after dropout.inl.
//
// A group is the heads of one sequence that share keys and values. Groups are processed one at a time, and each head in blocks of queries, so
// that the scores of a block stay in the cache. Scores have the layout [queries / W, keys, W]: a vector contains the scores of one key for W
// queries, so that nothing is summed over the lanes of a vector.

namespace {

using HeadsCall = transduce::HeadsCall<Number>;

inline int padded(int n) { return (n + W - 1) / W * W; }

void narrow(const float* from, size_t stride, int rows, int n, Number* to, int64_t to_stride) {
    for (int r = 0; r < rows; r++, from += stride, to += to_stride) {
        int k = 0;
        for (; k + W <= n; k += W) store(to + k, load(from + k));
        if (k < n) store_part(to + k, n - k, load(from + k));
    }
}

// Transposes `from` [rows, from_stride] into `to` [n, stride]; both axes are padded with zeros to a multiple of W.
void flip(const float* from, size_t from_stride, int rows, int n, float* to, size_t stride) {
    for (int r = 0; r < rows; r += W)
        for (int k = 0; k < n; k += W) {
            Ints part[W];
            const int known = std::min(rows - r, W);
            for (int i = 0; i < known; i++) part[i] = (Ints)load_part(from + (r + i) * from_stride + k, n - k);
            for (int i = known; i < W; i++) part[i] = Ints{};
            transpose(part);
            for (int i = 0; i < W; i++) store(to + (k + i) * stride + r, (Vec)part[i]);
        }
}

struct Memory {
    float* at;

    template <class T>
    T* take(size_t n) {
        T* from = reinterpret_cast<T*>(at);
        at += (transduce::round_up(int64_t(n * sizeof(T)), 64) + 192) / int64_t(sizeof(float));
        return from;
    }
};

}  // namespace

#if defined(__AVX512BF16__)
#include "attention_bf16.inl"
#else
#include "attention_float32.inl"
#endif

namespace {

// Queries [first, first + rows) of a head. `keys`: the number of keys that the block reads; later keys are hidden from all its queries.
struct QueryBlock {
    int64_t batch;
    int head, first, rows, keys;

    QueryBlock(const HeadsCall& call, int64_t batch, int head, int first)
        : batch(batch), head(head), first(first), rows(call.queries - first < call.block() ? call.queries - first : call.block()),
          keys(call.causal ? first + rows : call.keys) {}

    // The address of the block's first row in a tensor with these strides.
    template <class T>
    T* of(T* numbers, const int64_t* strides) const { return numbers + batch * strides[0] + head * strides[1] + first * strides[2]; }
    // The index, for dropout, of the weight of key 0 and query `at`. The index of the next key is larger by `queries`.
    uint64_t weight(const HeadsCall& call, int at) const {
        return (batch * call.heads + head) * uint64_t(call.keys) * call.queries + first + at;
    }
};

struct HeadScratch {
    HeadRows key, value, query, grad_output;
    int keys, queries;  // padded
    Weights weights, grad_scores;
    float *scores, *bias, *grad_weights, *output, *grad_query, *grad_key, *grad_value;

    HeadScratch(const HeadsCall& call, Memory memory)
        : key(memory, call.keys, call.width, !call.output, false), value(memory, call.keys, call.value_width, call.output, false),
          query(memory, call.block(), call.width, !call.output, true),
          grad_output(memory, call.block(), call.value_width, true, true), keys(key.height), queries(query.height), weights(memory, keys, queries),
          grad_scores(memory, keys, queries) {
        const auto take = [&](int rows, int columns) { return memory.take<float>(size_t(rows) * columns); };
        scores = take(keys, queries), bias = take(keys, queries), grad_weights = take(keys, queries), output = take(queries, value.width);
        grad_query = take(queries, key.width), grad_key = take(keys, key.width), grad_value = take(keys, value.width);
    }
};

// Prefetches the inputs of a group of short sequences. The rows of a head are far apart in memory, so each would be a cache miss.
void fetch_group(const HeadsCall& call, int64_t i) {
    const int64_t batch = i / call.kv_heads, group = i % call.kv_heads;
    const auto fetch = [](const Number* from, const int64_t* strides, int64_t batch, int64_t head, int rows, int n) {
        from += batch * strides[0] + head * strides[1];
        for (int r = 0; r < rows && r < 64; r++, from += strides[2])
            for (int k = 0; k < n; k += 64 / int(sizeof(Number))) __builtin_prefetch(from + k);
    };
    fetch(call.key, call.key_strides, batch, group, call.keys, call.width);
    fetch(call.value, call.value_strides, batch, group, call.keys, call.value_width);
    const int n = call.heads / call.kv_heads;
    for (int64_t head = group * n; head < (group + 1) * n; head++) {
        fetch(call.query, call.query_strides, batch, head, call.queries, call.width);
        if (!call.output) fetch(call.grad_output, call.grad_strides, batch, head, call.queries, call.value_width);
    }
}

void read_group(const HeadsCall& call, const HeadScratch& h, int64_t batch, int group) {
    const int64_t *key = call.key_strides, *value = call.value_strides;
    h.key.read(call.key + batch * key[0] + group * key[1], key[2], call.keys, call.width);
    h.value.read(call.value + batch * value[0] + group * value[1], value[2], call.keys, call.value_width);
}

// Whether all queries have the same bias.
bool is_shared(const HeadsCall& call) { return !call.bias_strides[2]; }

// Compute the scores of a block, and bring the bias into the layout of the scores.
void score_block(const HeadsCall& call, const HeadScratch& h, const QueryBlock& block) {
    h.query.read(block.of(call.query, call.query_strides), call.query_strides[2], block.rows, call.width);
    multiply(h.key.left(), block.keys, h.query.over_numbers(), call.width, padded(block.rows), h.scores, W, false, h.keys * W);
    if (!call.bias || is_shared(call)) return;
    const float* bias = block.of(call.bias, call.bias_strides);
    for (int at = 0; at < block.rows; at += W)
        flip(bias + at * call.bias_strides[2], call.bias_strides[2], std::min(block.rows - at, W), block.keys, h.bias + size_t(at) * h.keys, W);
}

// W queries of a block. Functions take it by value: otherwise the compiler would reload its members after each store, which may alias them.
struct QueryVector {
    int keys, clear;  // `clear`: number of keys that all W queries may attend to
    float* scores;
    const float* bias;  // null: none. One for each key if `shares_bias`
    bool shares_bias;
    uint64_t weight;  // the index of the weight of key 0, which determines its dropout
    int queries;

    QueryVector(const HeadsCall& call, const HeadScratch& h, const QueryBlock& block, int at)
        : keys(block.keys), clear(call.causal ? std::min(block.first + at + 1, keys) : keys), scores(h.scores + size_t(at) * h.keys),
          bias(!call.bias ? nullptr : is_shared(call) ? block.of(call.bias, call.bias_strides) : h.bias + size_t(at) * h.keys),
          shares_bias(is_shared(call)), weight(block.weight(call, at)), queries(call.queries) {}

    // x, with `hidden` in the lanes of queries that may not attend to key s.
    Vec seen(int s, Vec x, Vec hidden) const { return s < clear ? x : first_lanes(hidden, s - clear + 1, x); }
    uint64_t number(int s) const { return weight + uint64_t(s) * queries; }
};

// Replaces the scores by their exponentials, zero for hidden keys; returns 1 / the sum of the exponentials of each query.
Vec exponentials(const QueryVector query, float score_scale) {
    const Vec scale = splat(score_scale * kLog2E), log2_e = splat(kLog2E), hidden = splat(-HUGE_VALF);
    Vec largest = hidden, sum = zero();
    for (int s = 0; s < query.keys; s++) {
        float* score = query.scores + s * W;
        Vec x = load(score) * scale;
        if (query.bias) x = fma(query.shares_bias ? splat(query.bias[s]) : load(query.bias + s * W), log2_e, x);
        x = query.seen(s, x, hidden);
        largest = max(largest, x);
        store(score, x);
    }
    for (int s = 0; s < query.keys; s++) {
        float* score = query.scores + s * W;
        const Vec e = query.seen(s, exp2(load(score) - largest), zero());
        sum = sum + e;
        store(score, e);
    }
    return splat(1.f) / sum;
}

// Stores work(s) in `to` for each key s, two keys at a time.
template <class Work>
void put_keys(const Weights to, int keys, int at, Work work) {
    int s = 0;
    for (; s + 2 <= keys; s += 2) {
        const Vec one = work(s), next = work(s + 1);
        to.put(s, at, one, next);
    }
    if (s < keys) to.put(s, at, work(s), zero());
}

void weigh_block(const HeadsCall& call, const HeadScratch& h, const QueryBlock& block) {
    for (int at = 0; at < block.rows; at += W) {
        const QueryVector query(call, h, block, at);
        const Vec inverse = exponentials(query, call.scale);
        const Dropout dropout = call.dropout;
        put_keys(h.weights, query.keys, at, [=](int s) { return dropped(dropout, load(query.scores + s * W) * inverse, query.number(s)); });
    }
    h.weights.finish(block.keys, block.rows, true);
}

void attend_group(const HeadsCall& call, const HeadScratch& h, int64_t batch, int group) {
    read_group(call, h, batch, group);
    const int n = call.heads / call.kv_heads;
    const int64_t row = int64_t(call.heads) * call.value_width, strides[3] = {call.queries * row, call.value_width, row};
    for (int head = group * n; head < (group + 1) * n; head++)
        for (int first = 0; first < call.queries; first += call.block()) {
            const QueryBlock block(call, batch, head, first);
            score_block(call, h, block);
            weigh_block(call, h, block);
            multiply(h.weights.by_queries(), block.rows, h.value.over_rows(), block.keys, padded(call.value_width), h.output, h.value.width);
            narrow(h.output, h.value.width, block.rows, call.value_width, block.of(call.output, strides), row);
        }
}

// Computes the weights after dropout, and the gradients of the scores from the gradients of these weights.
void weigh_block_backward(const HeadsCall& call, const HeadScratch& h, const QueryBlock& block) {
    for (int at = 0; at < block.rows; at += W) {
        const QueryVector query(call, h, block, at);
        const Vec inverse = exponentials(query, call.scale), scale = splat(call.scale);
        const Dropout dropout = call.dropout;
        float* const grads = h.grad_weights + size_t(at) * h.keys;
        Vec mean = zero();
        put_keys(h.weights, query.keys, at, [=, &mean](int s) {
            float *p = query.scores + s * W, *d = grads + s * W;
            const Vec weight = load(p) * inverse, grad = dropped(dropout, load(d), query.number(s));
            mean = fma(weight, grad, mean);
            store(p, weight);
            store(d, grad);
            return dropped(dropout, weight, query.number(s));
        });
        put_keys(h.grad_scores, query.keys, at, [=](int s) {
            return load(query.scores + s * W) * (load(grads + s * W) - mean) * scale;
        });
    }
    h.weights.finish(block.keys, block.rows, false);
    h.grad_scores.finish(block.keys, block.rows, true);
}

// Computes the gradients of queries, keys and values from the gradient of the output. The weights are recomputed.
void attend_group_backward(const HeadsCall& call, const HeadScratch& h, int64_t batch, int group) {
    read_group(call, h, batch, group);
    const int n = call.heads / call.kv_heads, width = padded(call.width), value_width = padded(call.value_width);
    const size_t some = call.causal ? std::min(call.block(), call.keys) : call.keys, rest = call.keys - some;  // keys after the first block
    std::memset(h.grad_key + some * h.key.width, 0, rest * h.key.width * sizeof(float));
    std::memset(h.grad_value + some * h.value.width, 0, rest * h.value.width * sizeof(float));
    for (int head = group * n; head < (group + 1) * n; head++)
        for (int first = 0; first < call.queries; first += call.block()) {
            const QueryBlock block(call, batch, head, first);
            const bool add = first > 0 || head > group * n;
            score_block(call, h, block);
            h.grad_output.read(block.of(call.grad_output, call.grad_strides), call.grad_strides[2], block.rows, call.value_width);
            multiply(h.value.left(), block.keys, h.grad_output.over_numbers(), call.value_width, padded(block.rows), h.grad_weights, W, false, h.keys * W);
            weigh_block_backward(call, h, block);
            multiply(h.weights.by_keys(), block.keys, h.grad_output.over_rows(), block.rows, value_width, h.grad_value, h.value.width, add);
            multiply(h.grad_scores.by_queries(), block.rows, h.key.over_rows(), block.keys, width, h.grad_query, h.key.width);
            multiply(h.grad_scores.by_keys(), block.keys, h.query.over_rows(), block.rows, width, h.grad_key, h.key.width, add);
            narrow(h.grad_query, h.key.width, block.rows, call.width, block.of(call.grad_query, call.grad_query_strides), call.grad_query_strides[2]);
        }
    const int64_t *key = call.grad_key_strides, *value = call.grad_value_strides;
    narrow(h.grad_key, h.key.width, call.keys, call.width, call.grad_key + batch * key[0] + group * key[1], key[2]);
    narrow(h.grad_value, h.value.width, call.keys, call.value_width, call.grad_value + batch * value[0] + group * value[1], value[2]);
}

// Process groups [first, last). Groups are numbered across sequences: group g of sequence b has the number b * kv_heads + g.
void attend_groups(const HeadsCall& call, int64_t first, int64_t last, float* memory) {
    const Products products;
    const HeadScratch h(call, Memory{memory});
    for (int64_t i = first; i < last; i++) {
        if (i + 1 < last) fetch_group(call, i + 1);
        const auto kernel = call.output ? attend_group : attend_group_backward;
        kernel(call, h, i / call.kv_heads, int(i % call.kv_heads));
    }
}

}  // namespace
