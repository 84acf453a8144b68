// Linear layers and their gradients, in parts that training_linear.cpp divides among threads. Included after dropout.inl.

namespace {

// Copies `rows` rows of n numbers of either type to rows of `width` numbers: rounded to `Number`, and padded with zeros.
void round_rows(const void* from, bool is_number, int64_t first, int rows, int n, int width, Number* to) {
    for (int r = 0; r < rows; r++, to += width) {
        if (is_number) {
            std::memcpy(to, static_cast<const Number*>(from) + (first + r) * n, size_t(n) * sizeof(Number));
            std::memset(to + n, 0, size_t(width - n) * sizeof(Number));
        } else {
            round_row(static_cast<const float*>(from) + (first + r) * n, n, width, to);
        }
    }
}

// Writes the rows of a product plus `bias` (null: none), or adds them to `to` if `adds`.
template <class To>
void write_rows(const float* from, size_t stride, int rows, int n, const float* bias, To* to, size_t to_stride, bool adds = false) {
    for (int r = 0; r < rows; r++, from += stride, to += to_stride)
        for (int c = 0; c < n; c += W) {
            Vec x = load(from + c);
            if (bias) x = x + load_part(bias + c, n - c);
            if (adds) x = x + load_part(to + c, n - c);
            store_part(to + c, n - c, x);
        }
}

// Applies bias, activation and dropout to `n` columns of a block of rows of the product.
template <Activation KIND>
void activate_rows(const LinearCall& call, int64_t first, int rows, int column, int n, const float* product) {
    const Dropout dropout = call.dropout;  // a copy, because the compiler must assume that a store changes the call's
    const float* const bias = call.bias ? call.bias + column : nullptr;
    Number *const output = call.output, *const slope = call.slope;
    for (int r = 0; r < rows; r++, product += kPanelColumns) {
        const int64_t at = (first + r) * call.outputs + column;
        for (int c = 0; c < n; c += W) {
            Vec x = load(product + c);
            if (bias) x = x + load_part(bias + c, n - c);
            const Activated y = activated<KIND>(x);
            const Vec value = dropped(dropout, y.value, uint64_t(at + c)), change = dropped(dropout, y.slope, uint64_t(at + c));
            store_part(output + at + c, n - c, value);
            if (slope) store_part(slope + at + c, n - c, change);
        }
    }
}

// Computes the gradient before the activation, in rows of `width` numbers, from the gradient of the layer's output.
template <Activation KIND>
void activation_gradient(const LinearCall& call, int64_t first, int rows, int width, Number* to) {
    const Vec scale = splat(call.dropout.scale);
    for (int r = 0; r < rows; r++, to += width) {
        for (int c = 0; c < width; c += W) {
            const int64_t at = (first + r) * call.outputs + c;
            const int n = call.outputs - c;
            Vec grad = call.grad_is_number ? load_part(static_cast<const Number*>(call.grad_output) + at, n) : load_part(static_cast<const float*>(call.grad_output) + at, n);
            if constexpr (KIND == Activation::relu) grad = load_part(call.output + at, n) > zero() ? grad * scale : zero();
            else grad = grad * load_part(call.slope + at, n);
            store(to + c, grad);
        }
    }
}

// The sum over rows of `width` numbers; `width` is a multiple of 32.
void add_rows(const Number* from, int width, int rows, float* sum) {
    for (int n = 0; n < width; n += 2 * W) {
        Vec even[2] = {zero(), zero()}, odd[2] = {zero(), zero()};
        const Number* row = from + n;
        int r = 0;
        for (; r + 2 <= rows; r += 2, row += 2 * width)
            for (int i = 0; i < 2; i++) even[i] = even[i] + load(row + i * W), odd[i] = odd[i] + load(row + width + i * W);
        for (int i = 0; i < 2; i++) store(sum + n + i * W, (r < rows ? even[i] + load(row + i * W) : even[i]) + odd[i]);
    }
}

// Computes output rows [first, first + rows). Scratch memory: `rounded` [rows, padded inputs] and `product` [rows, 64].
void linear_rows(const LinearCall& call, int64_t first, int rows, const Number* columns, Number* rounded, float* product) {
    const Products products;
    const int width = (call.inputs + 31) / 32 * 32;
    const Number* x = rounded;
    if (call.x_is_number && width == call.inputs) x = static_cast<const Number*>(call.x) + first * call.inputs;
    else round_rows(call.x, call.x_is_number, first, rows, call.inputs, width, rounded);
    for (int n = 0; n < call.outputs; n += kPanelColumns) {
        multiply_panel(x, width, rows, columns + size_t(n) * width, width, product, kPanelColumns, false);
        const int some = call.outputs - n < kPanelColumns ? call.outputs - n : kPanelColumns;
        if (call.activates) with_activation(call.activation, [&](auto kind) { activate_rows<kind.value>(call, first, rows, n, some, product); });
        else write_rows(product, kPanelColumns, rows, some, call.bias ? call.bias + n : nullptr, call.output + first * call.outputs + n, call.outputs);
    }
}

// Packs the rows of the weights for inputs [first, first + 64) as a panel.
void pack_weight_rows(const LinearCall& call, int first, Number* to) {
    pack_rows(call.weight + first, call.inputs, call.outputs, call.padded_outputs, call.inputs - first, to);
}

void pack_weight_columns(const LinearCall& call, int panel, Number* to) {
    const int first = panel * kPanelColumns, n = call.outputs - first < kPanelColumns ? call.outputs - first : kPanelColumns;
    pack_transposed(call.weight + size_t(first) * call.inputs, call.inputs, n, call.inputs, (call.inputs + 31) / 32 * 32, to);
}

// For rows [first, first + rows), computes the gradient of x, and packs the operands of the gradient of the weights. `padded`: at least
// `rows`, a multiple of 32. In float32 `left` is not packed: it contains the gradient before the activation, if there is an activation.
void linear_rows_backward(const LinearCall& call, int64_t first, int rows, int padded, const Number* weight_rows, Number* left, Number* right,
                          float* grad_bias, Number* rounded, float* product) {
    const Products products;
    const int width = (call.outputs + 31) / 32 * 32;
    Number* before = kPacksLeft ? rounded : left + first * width;
    const Number* grad = call.activates ? before : rounded;
    if (call.activates) with_activation(call.activation, [&](auto kind) { activation_gradient<kind.value>(call, first, rows, width, before); });
    else if (call.grad_is_number && width == call.outputs) grad = static_cast<const Number*>(call.grad_output) + first * call.outputs;
    else round_rows(call.grad_output, call.grad_is_number, first, rows, call.outputs, width, rounded);
    pack_operands(call, grad, width, first, rows, padded, left, right);
    add_rows(grad, width, rows, grad_bias);
    for (int part = 0; call.grad_x && part < call.inputs; part += kPanelColumns) {
        const int n = call.inputs - part < kPanelColumns ? call.inputs - part : kPanelColumns;
        multiply_panel(grad, width, rows, weight_rows + size_t(part) * call.padded_outputs, width, product, kPanelColumns, false);
        const int64_t at = first * call.inputs + part;
        if (call.x_is_number) write_rows(product, kPanelColumns, rows, n, nullptr, static_cast<Number*>(call.grad_x) + at, call.inputs, call.adds);
        else write_rows(product, kPanelColumns, rows, n, nullptr, static_cast<float*>(call.grad_x) + at, call.inputs, call.adds);
    }
}

// Computes the contribution of some rows to the gradient of the weights, for `rows` outputs from `first` on and `columns` inputs from `column` on.
void weight_rows_gradient(const LinearCall& call, const OperandRows& operands, int first, int rows, int column, int columns, float* product,
                          float* grad_weight) {
    const Products products;
    multiply_operands(call, operands, first, rows, column, columns, product);
    write_rows(product, kGradientColumns, rows, columns, nullptr, grad_weight + size_t(first) * call.inputs + column, call.inputs, call.adds_weights);
}

}  // namespace
