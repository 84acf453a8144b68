// Attention and its gradients for training: float32 inside. Included after dropout.inl.
//
// The heads of one group, which share keys and values, at a time, and of each head a block of queries, whose scores stay in the cache.

namespace {

using HeadsCall = transduce::HeadsCall<Number>;

inline int padded(int n) { return (n + W - 1) / W * W; }

// Rows of numbers as float32, `stride` apart, with zeros behind them up to a multiple of W.
void widen(const Number* from, int64_t from_stride, int rows, int n, float* to, size_t stride) {
    for (int r = 0; r < rows; r++, from += from_stride, to += stride) {
        int k = 0;
        for (; k + W <= n; k += W) store(to + k, load(from + k));
        if (k < n) store(to + k, load_part(from + k, n - k));
    }
}

void narrow(const float* from, size_t stride, int rows, int n, Number* to, int64_t to_stride) {
    for (int r = 0; r < rows; r++, from += stride, to += to_stride) {
        int k = 0;
        for (; k + W <= n; k += W) store(to + k, load(from + k));
        if (k < n) store_part(to + k, n - k, load(from + k));
    }
}

// to [n, stride] = from [rows, from_stride] transposed, with zeros up to a multiple of W in both.
void flip(const float* from, size_t from_stride, int rows, int n, float* to, size_t stride) {
    for (int r = 0; r < rows; r += W)
        for (int k = 0; k < n; k += W) {
            Ints part[W];
            for (int i = 0; i < W; i++) part[i] = r + i < rows ? (Ints)load(from + (r + i) * from_stride + k) : Ints{};
            transpose(part);
            for (int i = 0; i < W; i++) store(to + (k + i) * stride + r, (Vec)part[i]);
        }
}

// Queries [first, first + rows) of a head. `keys`: those before the last that one of them sees.
struct QueryBlock {
    int64_t batch;
    int head, first, rows, keys;

    QueryBlock(const HeadsCall& call, int64_t batch, int head, int first)
        : batch(batch), head(head), first(first), rows(call.queries - first < call.block() ? call.queries - first : call.block()),
          keys(call.causal ? first + rows : call.keys) {}

    // Rows of the block in numbers with these strides.
    template <class T>
    T* of(T* numbers, const int64_t* strides) const { return numbers + batch * strides[0] + head * strides[1] + first * strides[2]; }
    // The number of the weight of row t and key 0, from which its dropout follows.
    uint64_t weight(const HeadsCall& call, int t) const { return ((batch * call.heads + head) * uint64_t(call.queries) + first + t) * call.keys; }
};

// Softmax of each row of scale * scores + bias, with dropout if `drops`; keys that a query does not see have weight zero.
void softmax_rows(const HeadsCall& call, const QueryBlock& block, bool drops, float* scores, size_t stride) {
    const float* bias = call.bias ? block.of(call.bias, call.bias_strides) : nullptr;
    const Vec scale = splat(call.scale * kLog2E), log2_e = splat(kLog2E);
    const int end = padded(block.keys);
    for (int t = 0; t < block.rows; t++, scores += stride) {
        const float* row = bias ? bias + t * call.bias_strides[2] : nullptr;
        const int seen = call.causal ? block.first + t + 1 : block.keys;
        Vec most = splat(-HUGE_VALF), sum = zero();
        for (int s = 0; s < seen; s += W) {
            const int left = seen - s;
            Vec x = load(scores + s) * scale;
            if (row) x = fma(load_part(row + s, left), log2_e, x);
            if (left < W) x = first_lanes(x, left, splat(-HUGE_VALF));
            store(scores + s, x);
            most = max(most, x);
        }
        const Vec largest = splat(max_of(most));
        for (int s = 0; s < seen; s += W) {
            const int left = seen - s;
            Vec e = exp2(load(scores + s) - largest);
            if (left < W) e = first_lanes(e, left);
            sum = sum + e;
            store(scores + s, e);
        }
        const Vec inverse = splat(1 / sum_of(sum));
        const uint64_t at = block.weight(call, t);
        for (int s = 0; s < seen; s += W) {
            const Vec weight = load(scores + s) * inverse;
            store(scores + s, drops ? dropped(call.dropout, weight, at + s) : weight);
        }
        for (int s = padded(seen); s < end; s += W) store(scores + s, zero());
    }
}

// Keys and values of a head and a block of its queries in float32, with padded rows, and transposed keys.
struct HeadScratch {
    int width, value_width, keys;  // padded
    float *query, *key, *value, *key_columns, *weights, *output;
    float *value_columns, *grad_output, *grad_weights, *grad_query, *grad_key, *grad_value;

    HeadScratch(const HeadsCall& call, float* memory) : width(padded(call.width)), value_width(padded(call.value_width)), keys(padded(call.keys)) {
        const auto take = [&](size_t rows, size_t columns) { float* from = memory; memory += rows * columns; return from; };
        const size_t t = call.block(), s = keys;
        query = take(t, width), key = take(s, width), value = take(s, value_width), key_columns = take(width, s), weights = take(t, s);
        output = take(t, value_width);
        value_columns = take(value_width, s), grad_output = take(t, value_width), grad_weights = take(t, s), grad_query = take(t, width);
        grad_key = take(s, width), grad_value = take(s, value_width);
    }
};

void read_group(const HeadsCall& call, const HeadScratch& h, int64_t batch, int group) {
    widen(call.key + batch * call.key_strides[0] + group * call.key_strides[1], call.key_strides[2], call.keys, call.width, h.key, h.width);
    widen(call.value + batch * call.value_strides[0] + group * call.value_strides[1], call.value_strides[2], call.keys, call.value_width, h.value, h.value_width);
    flip(h.key, h.width, call.keys, h.width, h.key_columns, h.keys);
}

void weigh_block(const HeadsCall& call, const HeadScratch& h, const QueryBlock& block, bool drops) {
    widen(block.of(call.query, call.query_strides), call.query_strides[2], block.rows, call.width, h.query, h.width);
    product_float32(h.query, h.width, 1, block.rows, h.key_columns, h.keys, call.width, padded(block.keys), h.weights, h.keys);
    softmax_rows(call, block, drops, h.weights, h.keys);
}

void attend_group(const HeadsCall& call, int64_t batch, int group, float* memory) {
    const HeadScratch h(call, memory);
    read_group(call, h, batch, group);
    const int n = call.heads / call.kv_heads;
    const int64_t row = int64_t(call.heads) * call.value_width, strides[3] = {call.queries * row, call.value_width, row};
    for (int head = group * n; head < (group + 1) * n; head++)
        for (int first = 0; first < call.queries; first += call.block()) {
            const QueryBlock block(call, batch, head, first);
            weigh_block(call, h, block, true);
            product_float32(h.weights, h.keys, 1, block.rows, h.value, h.value_width, block.keys, h.value_width, h.output, h.value_width);
            narrow(h.output, h.value_width, block.rows, call.value_width, block.of(call.output, strides), row);
        }
}

// From weights before dropout and the gradients of those after it: the weights after it, and the gradients of the scores.
void weights_gradient(const HeadsCall& call, const HeadScratch& h, const QueryBlock& block) {
    const int end = padded(block.keys);
    for (int t = 0; t < block.rows; t++) {
        float *p = h.weights + size_t(t) * h.keys, *d = h.grad_weights + size_t(t) * h.keys;
        const uint64_t at = block.weight(call, t);
        Vec sum = zero();
        for (int s = 0; s < end; s += W) {
            const Vec grad = dropped(call.dropout, load(d + s), at + s);
            sum = fma(load(p + s), grad, sum);
            store(d + s, grad);
        }
        const Vec mean = splat(sum_of(sum)), scale = splat(call.scale);
        for (int s = 0; s < end; s += W) {
            const Vec weight = load(p + s);
            store(d + s, weight * (load(d + s) - mean) * scale);
            store(p + s, dropped(call.dropout, weight, at + s));
        }
    }
}

// The gradients of queries, keys and values, from that of the output; weights are computed again.
void attend_group_backward(const HeadsCall& call, int64_t batch, int group, float* memory) {
    const HeadScratch h(call, memory);
    read_group(call, h, batch, group);
    flip(h.value, h.value_width, call.keys, h.value_width, h.value_columns, h.keys);
    const int n = call.heads / call.kv_heads;
    std::memset(h.grad_key, 0, size_t(h.keys) * h.width * sizeof(float));
    std::memset(h.grad_value, 0, size_t(h.keys) * h.value_width * sizeof(float));
    for (int head = group * n; head < (group + 1) * n; head++)
        for (int first = 0; first < call.queries; first += call.block()) {
            const QueryBlock block(call, batch, head, first);
            weigh_block(call, h, block, false);
            widen(block.of(call.grad_output, call.grad_strides), call.grad_strides[2], block.rows, call.value_width, h.grad_output, h.value_width);
            product_float32(h.grad_output, h.value_width, 1, block.rows, h.value_columns, h.keys, call.value_width, padded(block.keys), h.grad_weights, h.keys);
            weights_gradient(call, h, block);
            product_float32(h.weights, 1, h.keys, block.keys, h.grad_output, h.value_width, block.rows, h.value_width, h.grad_value, h.value_width, true);
            product_float32(h.grad_weights, h.keys, 1, block.rows, h.key, h.width, block.keys, h.width, h.grad_query, h.width);
            product_float32(h.grad_weights, 1, h.keys, block.keys, h.query, h.width, block.rows, h.width, h.grad_key, h.width, true);
            narrow(h.grad_query, h.width, block.rows, call.width, block.of(call.grad_query, call.grad_query_strides), call.grad_query_strides[2]);
        }
    const int64_t *key = call.grad_key_strides, *value = call.grad_value_strides;
    narrow(h.grad_key, h.width, call.keys, call.width, call.grad_key + batch * key[0] + group * key[1], key[2]);
    narrow(h.grad_value, h.value_width, call.keys, call.value_width, call.grad_value + batch * value[0] + group * value[1], value[2]);
}

}  // namespace
