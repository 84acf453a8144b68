#include "stack.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

using Call = transduce_stack_call;

struct Weight {
    const float* numbers = nullptr;
    float* grad = nullptr;
    bool adds = false;  // to the gradient that is there
};
struct Layer {
    Weight weight, bias;
    int inputs, outputs;
};
struct Norm {
    Weight gain, shift;
};

// The weights of a call in their order.
class Weights {
public:
    explicit Weights(const Call& call) : call_(call) {}
    Weight next() {
        const int64_t i = n_++;
        return {call_.weights[i], call_.grads ? call_.grads[i] : nullptr, call_.adds && call_.adds[i]};
    }
    Layer layer(int inputs, int outputs) {
        const Weight weight = next();
        return {weight, next(), inputs, outputs};
    }
    Norm norm() {
        const Weight gain = next();
        return {gain, next()};
    }

private:
    const Call& call_;
    int64_t n_ = 0;
};

// Memory that is taken piece by piece in the same order in both passes; null: it is only counted.
class Kept {
public:
    explicit Kept(void* at) : at_(static_cast<char*>(at)) {}
    template <class T>
    T* take(int64_t n) {
        const int64_t from = used_;
        used_ += round_up(n * int64_t(sizeof(T)), 64);
        return at_ ? reinterpret_cast<T*>(at_ + from) : nullptr;
    }
    int64_t used() const { return used_; }

private:
    char* at_;
    int64_t used_ = 0;
};

// A sub-layer: two linear layers with attention or an activation between them, its residual connection and norm.
template <class Number>
struct Sublayer {
    enum Kind { own, recurrent, cross, feed_forward } kind;
    Layer first, second, memory;  // memory: makes keys and values of cross-attention. A recurrent unit has no second layer
    Norm norm;
    uint64_t seed, inner_seed;
    const float* x;       // the input
    const Number* read;   // input of the first layer if it differs from x (rounded or normed); null: x
    float *output, *sum, *statistics;
    Number *rounded, *normed, *hidden, *slope, *inner, *heads;

    bool attends() const { return kind == own || kind == cross; }
};

// Memory for intermediate results, reused in every call.
template <class Number>
struct Scratch {
    Buffer<float> stream, grad;
    Buffer<Number> update, hidden, inner, read, heads;
};

uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

template <class Number>
class Stack {
public:
    Stack(const Call& call, int n_threads) : c(call), n_threads(n_threads), rows(c.batch * c.positions), weights(call), kept(call.kept) {
        const float* x = c.x;
        const Number* read = nullptr;
        for (int b = 0; b < c.n_blocks; b++)
            for (const auto kind : {c.recurrent ? Part::recurrent : Part::own, Part::cross, Part::feed_forward}) {
                if (kind == Part::cross && !c.memory) continue;
                parts.push_back(part(kind, x, read, b + 1 == c.n_blocks && kind == Part::feed_forward));
                x = parts.back().output, read = parts.back().rounded;
            }
        if (c.pre_norm) final_norm = weights.norm(), final_statistics = kept.take<float>(2 * rows);
    }

    int64_t memory() const { return kept.used(); }

    void forward() {
        scratch.update.reserve(rows * c.width);
        if (!c.pre_norm && kIsRounded) scratch.stream.reserve(rows * c.width);
        for (Part& p : parts) forward(p);
        if (!c.pre_norm) return;
        auto norm = norm_call(final_norm, final_statistics);
        norm.x = parts.back().output, norm.output = c.output;
        residual(norm, n_threads);
    }

    void backward() {
        grad = c.grad_x ? c.grad_x : reserved(scratch.grad, c.width);
        if (c.pre_norm) {
            auto norm = norm_call(final_norm, final_statistics);
            norm.normed = parts.back().output, norm.grad_output = c.grad_output, norm.grad_x = grad;
            residual_backward(norm, n_threads);
        }
        incoming = c.pre_norm ? grad : c.grad_output, incoming_read = nullptr;
        for (auto p = parts.rbegin(); p != parts.rend(); ++p) backward(*p);
    }

private:
    using Part = Sublayer<Number>;
    static constexpr bool kIsRounded = sizeof(Number) == 2;

    Part part(typename Part::Kind kind, const float* x, const Number* read, bool is_last) {
        Part p{};
        const int heads = c.heads * c.key_width, memory_heads = c.kv_heads * (c.key_width + c.value_width);
        const int first = kind == Part::feed_forward ? c.inner_width * (c.gated ? 2 : 1)
                          : kind == Part::recurrent  ? 2 * c.width
                          : kind == Part::cross      ? heads
                                                     : heads + memory_heads;
        const int second = kind == Part::feed_forward ? c.inner_width : c.heads * c.value_width;
        p.kind = kind, p.x = x, p.read = read;
        p.first = weights.layer(c.width, first);
        if (kind == Part::cross) p.memory = weights.layer(c.width, memory_heads), p.heads = kept.take<Number>(memory_rows() * memory_heads);
        if (kind != Part::recurrent) p.second = weights.layer(second, c.width);
        p.norm = weights.norm();
        p.seed = mixed(c.seed + 2 * parts.size() + 1), p.inner_seed = mixed(c.seed + 2 * parts.size() + 2);
        p.statistics = kept.take<float>(2 * rows);
        p.hidden = kept.take<Number>(rows * first);
        if (p.attends() || (kind == Part::feed_forward && c.gated)) p.inner = kept.take<Number>(rows * second);
        else if (kind == Part::feed_forward && c.activation > 0) p.slope = kept.take<Number>(rows * first);
        if (c.pre_norm) {
            p.normed = kept.take<Number>(rows * c.width), p.output = kept.take<float>(rows * c.width);
            return p;
        }
        p.sum = kept.take<float>(rows * c.width);
        if (is_last) p.output = c.output;
        else if (kIsRounded) p.rounded = kept.take<Number>(rows * c.width), p.output = c.kept ? reserved(scratch.stream, c.width) : nullptr;
        else p.output = kept.take<float>(rows * c.width);
        return p;
    }

    int64_t memory_rows() const { return c.batch * c.memory_positions; }

    template <class T>
    T* reserved(Buffer<T>& buffer, int64_t width) {
        buffer.reserve(rows * width);
        return buffer.data();
    }

    LinearCall<Number> linear_call(const Layer& layer, int64_t n, const void* x, bool x_is_number) const {
        LinearCall<Number> call{};
        call.rows = n, call.inputs = layer.inputs, call.outputs = layer.outputs, call.x = x, call.x_is_number = x_is_number;
        call.grad_is_number = true, call.weight = layer.weight.numbers, call.bias = layer.bias.numbers;
        call.grad_weight = layer.weight.grad, call.grad_bias = layer.bias.grad, call.adds_weights = layer.weight.adds;
        return call;
    }

    // The first layer, whose output has the activation of a feed-forward network that is not gated.
    LinearCall<Number> first_call(const Part& p) const {
        const void* x = c.pre_norm ? static_cast<const void*>(p.normed) : p.read ? static_cast<const void*>(p.read) : p.x;
        auto call = linear_call(p.first, rows, x, c.pre_norm || p.read || !kIsRounded);
        call.output = p.hidden;
        if (p.kind == Part::feed_forward && !c.gated)
            call.activates = true, call.activation = Activation(c.activation), call.dropout = dropout_of(c.activation_p, p.inner_seed), call.slope = p.slope;
        return call;
    }

    LinearCall<Number> second_call(const Part& p) const { return linear_call(p.second, rows, p.inner ? p.inner : p.hidden, true); }

    LinearCall<Number> memory_call(const Part& p) const {
        auto call = linear_call(p.memory, memory_rows(), c.memory, !kIsRounded);
        call.output = p.heads;
        return call;
    }

    ResidualCall<Number> residual_call(const Part& p) const {
        ResidualCall<Number> call{};
        call.rows = rows, call.width = c.width, call.dropout = dropout_of(c.p, p.seed);
        return call;
    }

    void add_norm(ResidualCall<Number>& call, const Norm& norm, float* statistics) const {
        call.gain = norm.gain.numbers, call.shift = norm.shift.numbers, call.statistics = statistics, call.epsilon = c.epsilon, call.rms = c.rms;
        call.grad_gain = norm.gain.grad, call.grad_shift = norm.shift.grad, call.adds = norm.gain.adds;
    }

    ResidualCall<Number> norm_call(const Norm& norm, float* statistics) const {
        ResidualCall<Number> call{};
        call.rows = rows, call.width = c.width;
        add_norm(call, norm, statistics);
        return call;
    }

    // Sets the strides of a tensor [batch, positions, row] in which the heads of a position are contiguous.
    static void set(int64_t* strides, int64_t positions, int64_t head, int64_t row) {
        strides[0] = positions * row, strides[1] = head, strides[2] = row;
    }

    HeadsCall<Number> heads_call(const Part& p) const {
        HeadsCall<Number> call{};
        const bool is_own = p.kind == Part::own;
        const int keys = is_own ? c.positions : c.memory_positions, row = is_own ? p.first.outputs : p.memory.outputs;
        call.batch = c.batch, call.heads = c.heads, call.kv_heads = c.kv_heads, call.queries = c.positions, call.keys = keys;
        call.width = c.key_width, call.value_width = c.value_width, call.causal = is_own && c.causal;
        call.scale = float(std::pow(double(c.key_width), -0.5)), call.dropout = dropout_of(c.attention_p, p.inner_seed);
        call.query = p.hidden, call.key = keys_of(p, p.hidden, p.heads), call.value = call.key + c.kv_heads * c.key_width;
        set(call.query_strides, c.positions, c.key_width, p.first.outputs);
        set(call.key_strides, keys, c.key_width, row), set(call.value_strides, keys, c.value_width, row);
        call.bias = is_own ? c.bias : c.memory_bias;
        std::copy_n(is_own ? c.bias_strides : c.memory_bias_strides, 3, call.bias_strides);
        call.output = p.inner;
        return call;
    }

    // The address of the keys: after the queries of a position in self-attention, or in the projected memory.
    template <class T>
    T* keys_of(const Part& p, T* hidden, T* heads) const { return p.kind == Part::own ? hidden + c.heads * c.key_width : heads; }

    GateCall<Number> gate_call(const Part& p) const {
        return {c.inner_width, Activation(c.activation), dropout_of(c.activation_p, p.inner_seed), p.hidden, p.inner, nullptr, nullptr};
    }

    void gate(const GateCall<Number>& call) const {
        const auto kernel = training_kernels<Number>()->gate_rows;
        Pool::get().run_rows(n_threads, rows, kPieceRows, [&](int, int64_t first, int64_t n) { kernel(call, first, first + n); });
    }

    void rotate(const Part& p, Number* numbers, float direction) const {
        const auto kernel = training_kernels<Number>()->rotate_rows;
        const RotateCall<Number> call{c.positions, c.heads + c.kv_heads, c.key_width, p.first.outputs, c.cos, c.sin, direction, numbers};
        Pool::get().run_rows(n_threads, rows, kPieceRows, [&](int, int64_t first, int64_t n) { kernel(call, first, first + n); });
    }

    void recur(const RecurrentCall<Number>& call) const {
        const auto kernel = training_kernels<Number>()->recur_columns;
        const int shares = (c.width + kRecurrentColumns - 1) / kRecurrentColumns;
        Pool::get().run(n_threads, int(c.batch) * shares, [&](int piece) {
            static thread_local Buffer<float> states;
            states.reserve(size_t(c.positions) * kRecurrentColumns);
            kernel(call, piece / shares, piece % shares * kRecurrentColumns, states.data());
        });
    }

    void forward(Part& p) {
        if (c.pre_norm) {
            auto norm = norm_call(p.norm, p.statistics);
            norm.x = p.x;
            if constexpr (kIsRounded) norm.rounded = p.normed;
            else norm.output = p.normed;
            residual(norm, n_threads);
        }
        linear(first_call(p), n_threads);
        if (p.kind == Part::own && c.cos) rotate(p, p.hidden, 1);
        if (p.kind == Part::feed_forward && c.gated) gate(gate_call(p));
        if (p.kind == Part::cross) linear(memory_call(p), n_threads);
        if (p.attends()) attend(heads_call(p), n_threads);
        if (p.kind == Part::recurrent) {
            recur({c.positions, c.width, p.hidden, scratch.update.data(), nullptr, nullptr});
        } else {
            auto second = second_call(p);
            second.output = scratch.update.data();
            linear(second, n_threads);
        }
        auto sum = residual_call(p);
        sum.x = p.x, sum.update = scratch.update.data(), sum.sum = c.pre_norm ? p.output : p.sum;
        if (!c.pre_norm) add_norm(sum, p.norm, p.statistics), sum.output = p.output, sum.rounded = p.rounded;
        residual(sum, n_threads);
    }

    void backward(Part& p) {
        auto sum = residual_call(p);
        sum.grad_output = incoming, sum.grad_update = reserved(scratch.update, c.width);
        if (!c.pre_norm) add_norm(sum, p.norm, p.statistics), sum.normed = p.sum, sum.grad_rounded = incoming_read, sum.grad_x = grad;
        residual_backward(sum, n_threads);
        Number* const grad_hidden = reserved(scratch.hidden, p.first.outputs);
        Number* const grad_inner = p.inner ? reserved(scratch.inner, p.second.inputs) : grad_hidden;
        if (p.kind == Part::recurrent) {
            recur({c.positions, c.width, p.hidden, nullptr, sum.grad_update, grad_hidden});
        } else {
            auto second = second_call(p);
            second.grad_output = sum.grad_update, second.grad_x = grad_inner;
            linear_backward(second, n_threads);
        }
        if (p.attends()) attend_backward(p, grad_hidden, grad_inner);
        if (p.kind == Part::own && c.cos) rotate(p, grad_hidden, -1);
        if (p.kind == Part::feed_forward && c.gated) {
            auto call = gate_call(p);
            call.output = nullptr, call.grad_output = grad_inner, call.grad_hidden = grad_hidden;
            gate(call);
        }
        auto first = first_call(p);
        first.grad_output = grad_hidden;
        Number* const grad_read = c.pre_norm || p.read ? reserved(scratch.read, c.width) : nullptr;
        if (grad_read) first.grad_x = grad_read;
        else first.grad_x = grad, first.adds = true;
        linear_backward(first, n_threads);
        incoming = grad, incoming_read = grad_read;
        if (!c.pre_norm) return;
        auto norm = norm_call(p.norm, p.statistics);
        norm.normed = p.x, norm.grad_kept = grad, norm.grad_x = grad;
        if constexpr (kIsRounded) norm.grad_rounded = grad_read;
        else norm.grad_output = grad_read;
        residual_backward(norm, n_threads);
        incoming_read = nullptr;
    }

    void attend_backward(const Part& p, Number* grad_hidden, Number* grad_inner) {
        auto call = heads_call(p);
        const bool is_own = p.kind == Part::own;
        if (!is_own) scratch.heads.reserve(memory_rows() * p.memory.outputs);
        call.output = nullptr, call.grad_output = grad_inner;
        set(call.grad_strides, c.positions, c.value_width, p.second.inputs);
        call.grad_query = grad_hidden, call.grad_key = keys_of(p, grad_hidden, scratch.heads.data()), call.grad_value = call.grad_key + c.kv_heads * c.key_width;
        std::copy_n(call.query_strides, 3, call.grad_query_strides), std::copy_n(call.key_strides, 3, call.grad_key_strides);
        std::copy_n(call.value_strides, 3, call.grad_value_strides);
        attend(call, n_threads);
        if (is_own) return;
        auto memory = memory_call(p);
        memory.grad_output = scratch.heads.data(), memory.grad_x = c.grad_memory, memory.adds = has_grad_memory;
        linear_backward(memory, n_threads);
        has_grad_memory = true;
    }

    const Call& c;
    const int n_threads;
    const int64_t rows;
    Scratch<Number>& scratch = Pool::kept<Scratch<Number>>();
    Weights weights;
    Kept kept;
    std::vector<Part> parts;
    Norm final_norm;
    float* final_statistics = nullptr;
    float* grad = nullptr;                  // the gradient of the input of a sub-layer
    const float* incoming = nullptr;        // that of its output
    const Number* incoming_read = nullptr;  // and of its rounded copy
    bool has_grad_memory = false;
};

}  // namespace

int64_t stack_memory(const Call& call) {
    int64_t found = 0;
    Call counted = call;
    counted.kept = nullptr;
    with_numbers(call.is_bf16, [&](auto number) { found = Stack<decltype(number)>(counted, 1).memory(); });
    return found;
}

void stack(const Call& call, int n_threads) {
    with_numbers(call.is_bf16, [&](auto number) { Stack<decltype(number)>(call, n_threads).forward(); });
}

void stack_backward(const Call& call, int n_threads) {
    with_numbers(call.is_bf16, [&](auto number) { Stack<decltype(number)>(call, n_threads).backward(); });
}

}  // namespace transduce
