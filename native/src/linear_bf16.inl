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
            if (is_bf16) store_part(static_cast<Bf16*>(to) + r * to_stride + c, n - c, x);
            else store_part(static_cast<float*>(to) + r * to_stride + c, n - c, x);
        }
}

// What follows the product for `n` columns of a block of rows: bias, activation and dropout.
template <Activation KIND>
void activate_rows(const LinearCall& call, int64_t first, int rows, int column, int n, const float* product) {
    for (int r = 0; r < rows; r++, product += kPanelColumns) {
        const int64_t at = (first + r) * call.outputs + column;
        for (int c = 0; c < n; c += W) {
            Vec x = load(product + c);
            if (call.bias) x = x + load_part(call.bias + column + c, n - c);
            if (call.before) store_part(call.before + at + c, n - c, x);
            store_part(call.output + at + c, n - c, dropped(call.dropout, activated<KIND>(x), uint64_t(at + c)));
        }
    }
}

// The gradient of what has been activated, as bfloat16 numbers `width` apart, from that of the result.
template <Activation KIND>
void activation_gradient(const LinearCall& call, int64_t first, int rows, int width, Bf16* to) {
    const Vec scale = splat(call.dropout.scale);
    for (int r = 0; r < rows; r++, to += width) {
        for (int c = 0; c < width; c += W) {
            const int64_t at = (first + r) * call.outputs + c;
            const int n = call.outputs - c;
            Vec grad = call.grad_is_bf16 ? load_part(static_cast<const Bf16*>(call.grad_output) + at, n) : load_part(static_cast<const float*>(call.grad_output) + at, n);
            if constexpr (KIND == Activation::relu) grad = _mm512_maskz_mul_ps(at_least(zero(), load_part(call.output + at, n)) ^ 0xffff, grad, scale);
            else grad = dropped(call.dropout, grad * slope<KIND>(load_part(call.before + at, n)), uint64_t(at));
            store_bf16(to + c, grad);
        }
    }
}

// Calls `work` with a constant for the call's activation.
template <class Work>
void with_activation(const LinearCall& call, Work work) {
    switch (call.activation) {
    case Activation::relu: return work(std::integral_constant<Activation, Activation::relu>());
    case Activation::gelu: return work(std::integral_constant<Activation, Activation::gelu>());
    case Activation::gelu_tanh: return work(std::integral_constant<Activation, Activation::gelu_tanh>());
    case Activation::silu: return work(std::integral_constant<Activation, Activation::silu>());
    }
}

// Output rows [first, first + rows). scratch: [rows, padded inputs] and [rows, 64] floats.
void linear_rows(const LinearCall& call, int64_t first, int rows, const Bf16* columns, Bf16* rounded, float* product) {
    const Products products;
    const int width = (call.inputs + 31) / 32 * 32;
    const Bf16* x = rounded;
    if (call.x_is_bf16 && width == call.inputs) x = static_cast<const Bf16*>(call.x) + first * call.inputs;
    else round_rows(call.x, call.x_is_bf16, first, rows, call.inputs, width, rounded);
    for (int n = 0; n < call.outputs; n += kPanelColumns) {
        product_bf16(x, width, rows, columns + size_t(n) * width, width / 2, product, kPanelColumns, false);
        const int some = call.outputs - n < kPanelColumns ? call.outputs - n : kPanelColumns;
        if (call.activates) with_activation(call, [&](auto kind) { activate_rows<kind.value>(call, first, rows, n, some, product); });
        else write_rows(product, kPanelColumns, rows, some, call.bias ? call.bias + n : nullptr, call.output + first * call.outputs + n, true, call.outputs);
    }
}

// A panel of the weights' rows [outputs / 2][64][2] for inputs [first, first + 64).
void pack_rows(const LinearCall& call, int first, Bf16* to) {
    const int n = call.inputs - first;
    for (int i = 0; i < call.padded_outputs; i += 2, to += 2 * kPanelColumns) {
        const float* row = call.weight + size_t(i) * call.inputs + first;
        interleave_rows(row, i + 1 < call.outputs ? row + call.inputs : nullptr, i < call.outputs ? n : 0, to);
    }
}

void pack_columns(const LinearCall& call, int panel, Bf16* to) {
    const int first = panel * kPanelColumns, n = call.outputs - first < kPanelColumns ? call.outputs - first : kPanelColumns;
    pack_transposed(call.weight + size_t(first) * call.inputs, call.inputs, n, call.inputs, (call.inputs + 31) / 32 * 32, to);
}

// Rows [first, first + rows), at most `padded`, a multiple of 32: the gradient of x, and the operands of that of the weights: `left`
// (see pack_left) and right, [input panels][padded rows / 2][64][2].
void linear_rows_backward(const LinearCall& call, int64_t first, int rows, int padded, const Bf16* weight_rows, Bf16* left, Bf16* right,
                          float* grad_bias, Bf16* rounded, float* product) {
    const Products products;
    const int width = (call.outputs + 31) / 32 * 32;
    const Bf16* grad = rounded;
    if (call.activates) with_activation(call, [&](auto kind) { activation_gradient<kind.value>(call, first, rows, width, rounded); });
    else if (call.grad_is_bf16 && width == call.outputs) grad = static_cast<const Bf16*>(call.grad_output) + first * call.outputs;
    else round_rows(call.grad_output, call.grad_is_bf16, first, rows, call.outputs, width, rounded);
    pack_left(grad, width, rows, padded, call.outputs, first, call.padded_rows, left);
    for (int n = 0; n < call.outputs; n += W) {
        Vec sum = zero();
        for (int r = 0; r < rows; r++) sum = sum + load_bf16(grad + size_t(r) * width + n);
        store(grad_bias + n, sum);
    }
    for (int part = 0; part < call.inputs; part += kPanelColumns) {
        Bf16* to = right + size_t(part) * call.padded_rows + first * kPanelColumns;
        const auto interleave = [&](const auto* x) {
            x += first * call.inputs + part;
            for (int r = 0; r < padded; r += 2, x += 2 * call.inputs, to += 2 * kPanelColumns)
                interleave_rows(x, r + 1 < rows ? x + call.inputs : nullptr, r < rows ? call.inputs - part : 0, to);
        };
        if (call.x_is_bf16) interleave(static_cast<const Bf16*>(call.x));
        else interleave(static_cast<const float*>(call.x));
    }
    for (int part = 0; call.grad_x && part < call.inputs; part += kPanelColumns) {
        const int n = call.inputs - part < kPanelColumns ? call.inputs - part : kPanelColumns;
        product_bf16(grad, width, rows, weight_rows + size_t(part) * call.padded_outputs, width / 2, product, kPanelColumns, false);
        char* to = static_cast<char*>(call.grad_x) + (first * call.inputs + part) * (call.x_is_bf16 ? 2 : 4);
        write_rows(product, kPanelColumns, rows, n, nullptr, to, call.x_is_bf16, call.inputs);
    }
}

// Rows [first, first + rows) of the gradient of the weights, for a panel of inputs.
void weight_rows_gradient(const LinearCall& call, int first, int rows, int panel, const Bf16* left, const Bf16* right, float* product) {
    constexpr int kPairs = 256;  // that stay in the cache
    const Products products;
    const int64_t pairs = call.padded_rows / 2;
    const int column = panel * kPanelColumns, n = call.inputs - column < kPanelColumns ? call.inputs - column : kPanelColumns;
    for (int64_t p = 0; p < pairs; p += kPairs) {
        const int some = int(pairs - p < kPairs ? pairs - p : kPairs);
        product_over_rows(left, call.padded_rows, first, rows, p, right + (panel * pairs + p) * 2 * kPanelColumns, some, product, p > 0);
    }
    write_rows(product, kPanelColumns, rows, n, nullptr, call.grad_weight + size_t(first) * call.inputs + column, false, call.inputs);
}

}  // namespace
