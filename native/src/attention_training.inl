// Attention and its gradients for training: bfloat16 in and out, float32 inside. Included after product_bf16.inl.
//
// The heads of one group, which share keys and values, at a time; sequences are so short that scores of a head stay in the cache.

namespace {

using transduce::HeadsCall;

inline int padded(int n) { return (n + W - 1) / W * W; }

// C [ROWS, VECS vectors] = A B. Element (r, k) of A is at r * a_row + k * a_next, so that A may be transposed.
template <int ROWS, int VECS>
void small_product(const float* a, size_t a_row, size_t a_next, const float* b, size_t b_stride, int depth, float* c, size_t c_stride, bool add) {
    Vec sum[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) sum[r][v] = add ? load(c + r * c_stride + v * W) : zero();
    for (int k = 0; k < depth; k++, a += a_next, b += b_stride) {
        Vec row[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) row[v] = load(b + v * W);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const Vec x = splat(a[r * a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] = fma(x, row[v], sum[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(c + r * c_stride + v * W, sum[r][v]);
}

template <int VECS>
void product_columns(const float* a, size_t a_row, size_t a_next, int rows, const float* b, size_t b_stride, int depth, float* c, size_t c_stride, bool add) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) small_product<6, VECS>(a + r * a_row, a_row, a_next, b, b_stride, depth, c + r * c_stride, c_stride, add);
    for (; r + 2 <= rows; r += 2) small_product<2, VECS>(a + r * a_row, a_row, a_next, b, b_stride, depth, c + r * c_stride, c_stride, add);
    for (; r < rows; r++) small_product<1, VECS>(a + r * a_row, a_row, a_next, b, b_stride, depth, c + r * c_stride, c_stride, add);
}

// C [rows, columns], a multiple of W.
void product_float32(const float* a, size_t a_row, size_t a_next, int rows, const float* b, size_t b_stride, int depth, int columns, float* c, size_t c_stride, bool add = false) {
    int at = 0;
    for (; at + 4 * W <= columns; at += 4 * W) product_columns<4>(a, a_row, a_next, rows, b + at, b_stride, depth, c + at, c_stride, add);
    for (; at + 2 * W <= columns; at += 2 * W) product_columns<2>(a, a_row, a_next, rows, b + at, b_stride, depth, c + at, c_stride, add);
    for (; at < columns; at += W) product_columns<1>(a, a_row, a_next, rows, b + at, b_stride, depth, c + at, c_stride, add);
}

// Rows of bfloat16 numbers as float32, `stride` apart, with zeros behind them up to a multiple of W.
void widen(const Bf16* from, int64_t from_stride, int rows, int n, float* to, size_t stride) {
    for (int r = 0; r < rows; r++, from += from_stride, to += stride) {
        int k = 0;
        for (; k + W <= n; k += W) store(to + k, load_bf16(from + k));
        if (k < n) store(to + k, load_part(from + k, n - k));
    }
}

void narrow(const float* from, size_t stride, int rows, int n, Bf16* to, int64_t to_stride) {
    for (int r = 0; r < rows; r++, from += stride, to += to_stride) {
        int k = 0;
        for (; k + W <= n; k += W) store_bf16(to + k, load(from + k));
        if (k < n) store_part(to + k, n - k, load(from + k));
    }
}

// to [n, stride] = from [rows, from_stride] transposed, with zeros up to a multiple of W in both.
void flip(const float* from, size_t from_stride, int rows, int n, float* to, size_t stride) {
    for (int r = 0; r < rows; r += W)
        for (int k = 0; k < n; k += W) {
            __m512i part[W];
            for (int i = 0; i < W; i++) part[i] = r + i < rows ? (__m512i)load(from + (r + i) * from_stride + k) : _mm512_setzero_si512();
            transpose(part);
            for (int i = 0; i < W; i++) store(to + (k + i) * stride + r, (Vec)part[i]);
        }
}

// Softmax of each row of scale * scores + bias; keys behind the last have weight zero.
void softmax_rows(const HeadsCall& call, int64_t batch, int head, float* scores, size_t stride) {
    const float* bias = call.bias ? call.bias + batch * call.bias_strides[0] + head * call.bias_strides[1] : nullptr;
    const Vec scale = splat(call.scale * kLog2E), log2_e = splat(kLog2E);
    for (int t = 0; t < call.queries; t++, scores += stride) {
        const float* row = bias ? bias + t * call.bias_strides[2] : nullptr;
        Vec most = splat(-HUGE_VALF), sum = zero();
        for (int s = 0; s < call.keys; s += W) {
            const int left = call.keys - s;
            Vec x = load(scores + s) * scale;
            if (row) x = fma(load_part(row + s, left), log2_e, x);
            if (left < W) x = _mm512_mask_mov_ps(splat(-HUGE_VALF), __mmask16((1u << left) - 1), x);
            store(scores + s, x);
            most = max(most, x);
        }
        const Vec largest = splat(max_of(most));
        for (int s = 0; s < call.keys; s += W) {
            const int left = call.keys - s;
            Vec e = exp2(load(scores + s) - largest);
            if (left < W) e = _mm512_maskz_mov_ps(__mmask16((1u << left) - 1), e);
            sum = sum + e;
            store(scores + s, e);
        }
        const Vec inverse = splat(1 / sum_of(sum));
        for (int s = 0; s < call.keys; s += W) store(scores + s, load(scores + s) * inverse);
    }
}

// Queries, keys and values of a head in float32, and transposed keys.
struct HeadScratch {
    int width, value_width, keys;  // padded
    float *query, *key, *value, *key_columns, *weights, *output;
    float *value_columns, *grad_output, *grad_weights, *grad_query, *grad_key, *grad_value;

    HeadScratch(const HeadsCall& call, float* memory) : width(padded(call.width)), value_width(padded(call.value_width)), keys(padded(call.keys)) {
        const auto take = [&](size_t rows, size_t columns) { float* from = memory; memory += rows * columns; return from; };
        const size_t t = call.queries, s = padded(call.keys);
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

void weigh_head(const HeadsCall& call, const HeadScratch& h, int64_t batch, int head) {
    widen(call.query + batch * call.query_strides[0] + head * call.query_strides[1], call.query_strides[2], call.queries, call.width, h.query, h.width);
    product_float32(h.query, h.width, 1, call.queries, h.key_columns, h.keys, call.width, h.keys, h.weights, h.keys);
    softmax_rows(call, batch, head, h.weights, h.keys);
}

void attend_group(const HeadsCall& call, int64_t batch, int group, float* memory) {
    const HeadScratch h(call, memory);
    read_group(call, h, batch, group);
    const int n = call.heads / call.kv_heads;
    for (int head = group * n; head < (group + 1) * n; head++) {
        weigh_head(call, h, batch, head);
        product_float32(h.weights, h.keys, 1, call.queries, h.value, h.value_width, call.keys, h.value_width, h.output, h.value_width);
        const int64_t row = int64_t(call.heads) * call.value_width;
        narrow(h.output, h.value_width, call.queries, call.value_width, call.output + batch * call.queries * row + head * call.value_width, row);
    }
}

// The gradients of queries, keys and values, from that of the output; weights are computed again.
void attend_group_backward(const HeadsCall& call, int64_t batch, int group, float* memory) {
    const HeadScratch h(call, memory);
    read_group(call, h, batch, group);
    flip(h.value, h.value_width, call.keys, h.value_width, h.value_columns, h.keys);
    const int n = call.heads / call.kv_heads;
    for (int head = group * n; head < (group + 1) * n; head++) {
        const bool add = head > group * n;
        weigh_head(call, h, batch, head);
        widen(call.grad_output + batch * call.grad_strides[0] + head * call.grad_strides[1], call.grad_strides[2], call.queries, call.value_width, h.grad_output, h.value_width);
        product_float32(h.weights, 1, h.keys, call.keys, h.grad_output, h.value_width, call.queries, h.value_width, h.grad_value, h.value_width, add);
        product_float32(h.grad_output, h.value_width, 1, call.queries, h.value_columns, h.keys, call.value_width, h.keys, h.grad_weights, h.keys);
        for (int t = 0; t < call.queries; t++) {
            float *p = h.weights + size_t(t) * h.keys, *d = h.grad_weights + size_t(t) * h.keys;
            Vec sum = zero();
            for (int s = 0; s < h.keys; s += W) sum = fma(load(p + s), load(d + s), sum);
            const Vec mean = splat(sum_of(sum)), scale = splat(call.scale);
            for (int s = 0; s < h.keys; s += W) store(d + s, load(p + s) * (load(d + s) - mean) * scale);
        }
        product_float32(h.grad_weights, h.keys, 1, call.queries, h.key, h.width, call.keys, h.width, h.grad_query, h.width);
        product_float32(h.grad_weights, 1, h.keys, call.keys, h.query, h.width, call.queries, h.width, h.grad_key, h.width, add);
        const int64_t* strides = call.grad_query_strides;
        narrow(h.grad_query, h.width, call.queries, call.width, call.grad_query + batch * strides[0] + head * strides[1], strides[2]);
    }
    const int64_t *key = call.grad_key_strides, *value = call.grad_value_strides;
    narrow(h.grad_key, h.width, call.keys, call.width, call.grad_key + batch * key[0] + group * key[1], key[2]);
    narrow(h.grad_value, h.value_width, call.keys, call.value_width, call.grad_value + batch * value[0] + group * value[1], value[2]);
}

}  // namespace
