// Gates, rotations and recurrent units of a stack. Included after linear_training.inl.

namespace {

using GateCall = transduce::GateCall<Number>;
using RotateCall = transduce::RotateCall<Number>;
using RecurrentCall = transduce::RecurrentCall<Number>;

template <Activation KIND>
void gate_row(const GateCall& call, int64_t r) {
    const int n = call.width;
    const Number *gate = call.hidden + r * 2 * n, *value = gate + n;
    for (int c = 0; c < n; c += W) {
        const Vec product = activated<KIND>(load_part(gate + c, n - c)).value * load_part(value + c, n - c);
        store_part(call.output + r * n + c, n - c, dropped(call.dropout, product, uint64_t(r * n + c)));
    }
}

template <Activation KIND>
void gate_row_backward(const GateCall& call, int64_t r) {
    const int n = call.width;
    const Number *gate = call.hidden + r * 2 * n, *value = gate + n;
    Number *grad_gate = call.grad_hidden + r * 2 * n, *grad_value = grad_gate + n;
    for (int c = 0; c < n; c += W) {
        const Vec x = load_part(gate + c, n - c), grad = dropped(call.dropout, load_part(call.grad_output + r * n + c, n - c), uint64_t(r * n + c));
        const Activated y = activated<KIND>(x);
        Vec slope = y.slope;
        if constexpr (KIND == Activation::relu) slope = x > zero() ? splat(1) : zero();
        store_part(grad_value + c, n - c, grad * y.value);
        store_part(grad_gate + c, n - c, grad * load_part(value + c, n - c) * slope);
    }
}

void gate_rows(const GateCall& call, int64_t first, int64_t last) {
    with_activation(call.activation, [&](auto kind) {
        for (int64_t r = first; r < last; r++) call.output ? gate_row<kind.value>(call, r) : gate_row_backward<kind.value>(call, r);
    });
}

void rotate_rows(const RotateCall& call, int64_t first, int64_t last) {
    const int half = call.width / 2;
    for (int64_t r = first; r < last; r++) {
        const float *cos = call.cos + r % call.positions * half, *sin = call.sin + r % call.positions * half;
        for (int h = 0; h < call.heads; h++) {
            Number *x = call.numbers + r * call.row + int64_t(h) * call.width, *y = x + half;
            for (int k = 0; k < half; k += W) {
                const int n = half - k;
                const Vec a = load_part(x + k, n), b = load_part(y + k, n), c = load_part(cos + k, n), s = load_part(sin + k, n) * splat(call.direction);
                store_part(x + k, n, a * c - b * s), store_part(y + k, n, b * c + a * s);
            }
        }
    }
}

// One step of the unit for a vector of columns. `hidden` points to the gates of the columns; their values are `width` numbers further.
struct Recurrence {
    Vec value, factor;
    Recurrence(const Number* hidden, int width, int n) : value(load_part(hidden + width, n)), factor(sigmoid(load_part(hidden, n))) {}
    Vec after(Vec state) const { return fma(factor, state - value, value); }
};

// Processes columns [first, first + kRecurrentColumns) of one sequence. `states` [positions, kRecurrentColumns] is memory for the backward pass.
void recur_columns(const RecurrentCall& call, int64_t sequence, int first, float* states) {
    constexpr int n = transduce::kRecurrentColumns;
    const int width = call.width, columns = width - first < n ? width - first : n;
    const int64_t row = sequence * call.positions;
    for (int c = 0; c < columns; c += W) {
        const int left = columns - c;
        Vec state = zero();
        for (int t = 0; t < call.positions; t++) {
            state = Recurrence(call.hidden + (row + t) * 2 * width + first + c, width, left).after(state);
            if (call.output) store_part(call.output + (row + t) * width + first + c, left, max(zero(), state));
            else store(states + t * n + c, state);
        }
        if (call.output) continue;
        Vec grad = zero();
        for (int t = call.positions - 1; t >= 0; t--) {
            const Recurrence step(call.hidden + (row + t) * 2 * width + first + c, width, left);
            const Vec given = load_part(call.grad_output + (row + t) * width + first + c, left), before = t ? load(states + (t - 1) * n + c) : zero();
            grad = grad + (load(states + t * n + c) > zero() ? given : zero());
            Number* to = call.grad_hidden + (row + t) * 2 * width + first + c;
            store_part(to, left, grad * (before - step.value) * step.factor * (splat(1) - step.factor));
            store_part(to + width, left, grad * (splat(1) - step.factor));
            grad = grad * step.factor;
        }
    }
}

}  // namespace
