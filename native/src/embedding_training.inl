// Embeddings with their positions and dropout, and their gradients. Included after dropout.inl.

namespace {

using transduce::EmbeddingCall;

// Rows [first, last).
void embedding_rows(const EmbeddingCall& call, int64_t first, int64_t last) {
    const int n = call.width;
    const Vec scale = splat(call.scale);
    for (int64_t r = first; r < last; r++) {
        const float* vector = call.table + call.ids[r] * n;
        const float* position = call.positions ? call.positions + r % call.length * n : nullptr;
        for (int k = 0; k < n; k += W) {
            Vec x = load_part(vector + k, n - k) * scale;
            if (position) x = x + load_part(position + k, n - k);
            store_part(call.output + r * n + k, n - k, dropped(call.dropout, x, uint64_t(r) * n + k));
        }
    }
}

// to [width] += factor * gradient of row r of the embeddings before dropout.
void add_gradient(const EmbeddingCall& call, int64_t r, Vec factor, float* to) {
    const int n = call.width;
    for (int k = 0; k < n; k += W) {
        const Vec grad = dropped(call.dropout, load_part(call.grad_output + r * n + k, n - k), uint64_t(r) * n + k);
        store_part(to + k, n - k, fma(grad, factor, load_part(to + k, n - k)));
    }
}

// Computes the gradients of all tokens with id % kEmbeddingShares == rest. This spreads frequent tokens, which often have low ids, over the threads.
void embedding_gradient(const EmbeddingCall& call, int rest) {
    for (int64_t v = rest; v < call.vocabulary && !call.adds; v += transduce::kEmbeddingShares)
        std::memset(call.grad_table + v * call.width, 0, call.width * sizeof(float));
    for (int64_t r = 0; r < call.rows; r++)
        if (call.ids[r] % transduce::kEmbeddingShares == rest) add_gradient(call, r, splat(call.scale), call.grad_table + call.ids[r] * call.width);
}

void position_gradient(const EmbeddingCall& call, int64_t position) {
    float* grad = call.grad_positions + position * call.width;
    std::memset(grad, 0, call.width * sizeof(float));
    for (int64_t r = position; r < call.rows; r += call.length) add_gradient(call, r, splat(1), grad);
}

}  // namespace
