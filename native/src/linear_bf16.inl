// Linear layers and their gradients in bfloat16, in parts that training_linear.cpp divides among threads. Included after loss_bf16.inl.

namespace {

using transduce::LinearCall;

// Rows of numbers of either type as bfloat16, `width` apart, with zeros behind them.
void round_rows(const void* from, bool is_bf16, int64_t first, int rows, int n, int width, Bf16* to) {
    for (int r = 0; r < rows; r++, to += width) {
        if (is_bf16) {
            std::memcpy(to, static_cast<const Bf16*>(from) + (first + r) * n, size_t(n) * sizeof(Bf16));
            std::memset(to + n, 0, size_t(width - n) * sizeof(Bf16));
        } else {
            round_row(static_cast<const float*>(from) + (first + r) * n, n, width, to);
        }
    }
}

// Rows of a product, plus `bias` (null: none), in either type.
void write_rows(const float* from, size_t stride, int rows, int n, const float* bias, void* to, bool is_bf16, size_t to_stride) {
    for (int r = 0; r < rows; r++, from += stride)
        for (int c = 0; c < n; c += W) {
            Vec x = load(from + c);
            if (bias) x = x + load_part(bias + c, n - c);
            if (is_bf16) store_update(static_cast<Bf16*>(to) + r * to_stride + c, n - c, x);
            else store_part(static_cast<float*>(to) + r * to_stride + c, n - c, x);
        }
}

// Output rows [first, first + rows). scratch: [rows, padded inputs] and [rows, 64] floats.
void linear_rows(const LinearCall& call, int64_t first, int rows, const Bf16* columns, Bf16* rounded, float* product) {
    const int width = (call.inputs + 31) / 32 * 32;
    const Bf16* x = rounded;
    if (call.x_is_bf16 && width == call.inputs) x = static_cast<const Bf16*>(call.x) + first * call.inputs;
    else round_rows(call.x, call.x_is_bf16, first, rows, call.inputs, width, rounded);
    for (int n = 0; n < call.outputs; n += kPanelColumns) {
        product_bf16(x, width, rows, columns + size_t(n) * width, width / 2, product, kPanelColumns, false);
        const int some = call.outputs - n < kPanelColumns ? call.outputs - n : kPanelColumns;
        write_rows(product, kPanelColumns, rows, some, call.bias ? call.bias + n : nullptr, call.output + first * call.outputs + n, true, call.outputs);
    }
}

// A panel of the weights' rows [outputs / 2][64][2] for inputs [first, first + 64).
void pack_rows(const LinearCall& call, int first, Bf16* to) {
    const int n = call.inputs - first;
    for (int i = 0; i < call.outputs; i += 2, to += 2 * kPanelColumns) {
        const float* row = call.weight + size_t(i) * call.inputs + first;
        interleave_rows(row, i + 1 < call.outputs ? row + call.inputs : nullptr, n, to);
    }
}

void pack_columns(const LinearCall& call, int panel, Bf16* to) {
    const int first = panel * kPanelColumns, n = call.outputs - first < kPanelColumns ? call.outputs - first : kPanelColumns;
    pack_transposed(call.weight + size_t(first) * call.inputs, call.inputs, n, call.inputs, (call.inputs + 31) / 32 * 32, to);
}

// 32 x 32 bfloat16 numbers of rows `stride` apart, transposed: 16 pairs of rows at a time.
void transpose_block(const Bf16* from, size_t stride, int rows, int columns, Bf16* to, size_t to_stride) {
    for (int k = 0; k < columns; k += W) {
        __m512i low[W], high[W];
        for (int i = 0; i < W; i++) {
            const auto row = [&](int r) { return r < rows ? _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(columns - k), from + r * stride + k)), 16) : _mm512_setzero_si512(); };
            low[i] = row(i), high[i] = row(W + i);
        }
        transpose(low), transpose(high);
        for (int i = 0; i < W && k + i < columns; i++) _mm512_storeu_si512(to + (k + i) * to_stride, (__m512i)pairs_of((Vec)low[i], (Vec)high[i]));
    }
}

// Rows [first, first + rows), at most a multiple of 32: the gradient of x, and the operands of that of the weights:
// transposed [outputs, padded rows] and interleaved [input panels][padded rows / 2][64][2].
void linear_rows_backward(const LinearCall& call, int64_t first, int rows, int padded, const Bf16* weight_rows, Bf16* transposed, Bf16* interleaved,
                          float* grad_bias, Bf16* rounded, float* product) {
    const int width = (call.outputs + 31) / 32 * 32;
    const Bf16* grad = rounded;
    if (call.grad_is_bf16 && width == call.outputs) grad = static_cast<const Bf16*>(call.grad_output) + first * call.outputs;
    else round_rows(call.grad_output, call.grad_is_bf16, first, rows, call.outputs, width, rounded);
    const int64_t all = call.padded_rows;
    for (int r = 0; r < padded; r += 2 * W) {
        const int left = rows - r > 0 ? rows - r : 0;
        transpose_block(grad + size_t(r) * width, width, left, call.outputs, transposed + first + r, all);
    }
    for (int n = 0; n < call.outputs; n += W) {
        Vec sum = zero();
        for (int r = 0; r < rows; r++) sum = sum + load_update(grad + size_t(r) * width + n, call.outputs - n);
        store(grad_bias + n, sum);
    }
    for (int part = 0; part < call.inputs; part += kPanelColumns) {
        Bf16* to = interleaved + (size_t(part) * all / 2 + size_t(first / 2) * kPanelColumns) * 2;
        const int n = call.inputs - part < kPanelColumns ? call.inputs - part : kPanelColumns;
        for (int r = 0; r < padded; r += 2, to += 2 * kPanelColumns)
            for (int c = 0; c < kPanelColumns; c += W) {
                const auto row = [&](int i) {
                    const int64_t at = (first + i) * call.inputs + part + c;
                    if (i >= rows || c >= n) return zero();
                    return call.x_is_bf16 ? load_update(static_cast<const Bf16*>(call.x) + at, n - c) : load_part(static_cast<const float*>(call.x) + at, n - c);
                };
                _mm512_storeu_si512(to + 2 * c, ::interleaved(row(r), row(r + 1)));
            }
    }
    for (int part = 0; call.grad_x && part < call.inputs; part += kPanelColumns) {
        const int n = call.inputs - part < kPanelColumns ? call.inputs - part : kPanelColumns;
        product_bf16(grad, width, rows, weight_rows + size_t(part) * call.padded_outputs, call.outputs / 2 + call.outputs % 2, product, kPanelColumns, false);
        char* to = static_cast<char*>(call.grad_x) + (first * call.inputs + part) * (call.x_is_bf16 ? 2 : 4);
        write_rows(product, kPanelColumns, rows, n, nullptr, to, call.x_is_bf16, call.inputs);
    }
}

// Rows [first, first + rows) of the gradient of the weights, for a panel of inputs.
void weight_rows_gradient(const LinearCall& call, int first, int rows, int panel, const Bf16* transposed, const Bf16* interleaved, float* product) {
    constexpr int kPairs = 256;  // that stay in the cache
    const int64_t pairs = call.padded_rows / 2;
    const Bf16* b = interleaved + size_t(panel) * pairs * 2 * kPanelColumns;
    for (int64_t p = 0; p < pairs; p += kPairs) {
        const int some = int(pairs - p < kPairs ? pairs - p : kPairs);
        product_bf16(transposed + first * call.padded_rows + 2 * p, call.padded_rows, rows, b + p * 2 * kPanelColumns, some, product, kPanelColumns, p > 0);
    }
    const int column = panel * kPanelColumns, n = call.inputs - column < kPanelColumns ? call.inputs - column : kPanelColumns;
    write_rows(product, kPanelColumns, rows, n, nullptr, call.grad_weight + size_t(first) * call.inputs + column, false, call.inputs);
}

}  // namespace
