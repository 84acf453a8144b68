// The C interface of training: checks what it is given, and calls the kernels.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "training.h"
#include "transduce_native.h"

using namespace transduce::abi;

namespace {

template <class Number>
void require_kernels(int32_t n_threads) {
    require(transduce::training_kernels<Number>(), "this CPU has no kernels of training in this precision");
    require(1 <= n_threads && n_threads <= kMaxThreads, "n_threads: must be from 1 to 1024");
}

transduce::Dropout dropout_of(float p, uint64_t seed) {
    require(0 <= p && p < 1, "p: out of range");
    return {uint32_t(std::llround(double(p) * 4294967296.0)), 1 / (1 - p), seed};
}

template <class Number>
const Number* in(const void* numbers) { return static_cast<const Number*>(numbers); }
template <class Number>
Number* out(void* numbers) { return static_cast<Number*>(numbers); }

// Calls `work` with a number of the type of the call's.
template <class Call, class Work>
void with_numbers(const Call* call, Work work) {
    require(call, "call must not be null");
    if (call->is_bf16) work(uint16_t());
    else work(float());
}

// Calls `take` for each tensor that has numbers; it returns whether these are there.
template <class Tensor, class Take>
void for_each_tensor(const Tensor* tensors, int64_t n, int32_t n_threads, Take take) {
    require_kernels<float>(n_threads);
    require(n >= 0 && (tensors || !n), "tensors: must not be null");
    for (int64_t i = 0; i < n; i++)
        require(tensors[i].n == 0 || (tensors[i].n > 0 && take(tensors[i])), "tensors: numbers must not be null");
}

// `fine`: what it writes and reads besides queries, keys and values is there.
template <class Number>
transduce::HeadsCall<Number> checked(const transduce_heads_call* call, int32_t n_threads, bool fine) {
    require(call && call->query && call->key && call->value && fine, "call and its numbers must not be null");
    const transduce_heads_call& c = *call;
    require_kernels<Number>(n_threads);
    require(c.batch >= 0 && c.batch <= INT32_MAX && 1 <= c.kv_heads && c.kv_heads <= c.heads && c.heads <= 1 << 14 && c.heads % c.kv_heads == 0,
            "batch or heads: out of range");
    for (const int32_t size : {c.queries, c.keys, c.width, c.value_width}) require(1 <= size && size <= kMaxSource, "sizes: out of range");
    require(!c.causal || c.queries == c.keys, "causal attention needs as many keys as queries");
    transduce::HeadsCall<Number> found{c.batch, c.heads, c.kv_heads, c.queries, c.keys, c.width, c.value_width, c.causal != 0, c.scale,
                               dropout_of(c.p, c.seed), in<Number>(c.query), in<Number>(c.key), in<Number>(c.value), {}, {}, {},
                               c.bias, {}, out<Number>(c.output), in<Number>(c.grad_output), {}, out<Number>(c.grad_query), out<Number>(c.grad_key),
                               out<Number>(c.grad_value), {}, {}, {}};
    const std::pair<const int64_t*, int64_t*> strides[] = {{c.query_strides, found.query_strides}, {c.key_strides, found.key_strides},
        {c.value_strides, found.value_strides}, {c.bias_strides, found.bias_strides}, {c.grad_strides, found.grad_strides},
        {c.grad_query_strides, found.grad_query_strides}, {c.grad_key_strides, found.grad_key_strides}, {c.grad_value_strides, found.grad_value_strides}};
    for (const auto& [from, to] : strides) std::copy_n(from, 3, to);
    return found;
}

template <class Number>
transduce::ResidualCall<Number> checked(const transduce_residual_call* call, int32_t n_threads) {
    const transduce_residual_call& c = *call;
    require_kernels<Number>(n_threads);
    require(c.rows >= 0 && c.rows <= INT32_MAX && 1 <= c.width && c.width <= 1 << 16, "rows or width: out of range");
    require(c.epsilon >= 0, "epsilon: out of range");
    return {c.rows, c.width, c.x, in<Number>(c.update), c.gain, c.shift, c.epsilon, c.rms != 0, dropout_of(c.p, c.seed), c.sum, c.statistics,
            c.output, out<Number>(c.rounded), c.grad_output, c.normed, in<Number>(c.grad_rounded), c.grad_kept, c.grad_x,
            out<Number>(c.grad_update), c.grad_gain, c.grad_shift};
}

transduce::EmbeddingCall checked(const transduce_embedding_call* call, int32_t n_threads) {
    const transduce_embedding_call& c = *call;
    require_kernels<float>(n_threads);
    require(c.rows >= 0 && c.rows <= INT32_MAX && 1 <= c.width && c.width <= 1 << 16 && 1 <= c.vocabulary && 1 <= c.length && c.length <= INT32_MAX,
            "rows, width, vocabulary or length: out of range");
    require(std::all_of(c.ids, c.ids + c.rows, [&](int64_t id) { return 0 <= id && id < c.vocabulary; }), "ids: out of range");
    return {c.rows, c.length, c.width, c.vocabulary, c.ids, c.table, c.positions, c.scale, dropout_of(c.p, c.seed), c.output, c.grad_output,
            c.grad_table, c.grad_positions, c.adds != 0};
}

// Checks that the calls for its parts do not make.
const transduce_sublayer_call& checked(const transduce_sublayer_call* call) {
    require(call, "call must not be null");
    const transduce_sublayer_call& c = *call;
    require(0 <= c.batch && 1 <= c.positions && c.positions <= kMaxSource && c.batch <= INT32_MAX / c.positions && 1 <= c.width && c.width <= 1 << 16,
            "batch, positions or width: out of range");
    require(c.second.outputs == c.width && c.first.inputs == c.width, "width: not that of the layers");
    require(c.heads >= 0 && c.first.outputs >= 1 && c.second.inputs >= 1, "heads or layers: out of range");
    const int64_t heads = int64_t(c.heads) * c.key_width + (c.key ? 0 : int64_t(c.kv_heads) * (int64_t(c.key_width) + c.value_width));
    if (c.heads) require(c.first.outputs == heads && c.second.inputs == int64_t(c.heads) * c.value_width, "heads: not those of the layers");
    else require(c.first.outputs == c.second.inputs, "the second layer does not take the first one's output");
    return c;
}

template <class Number>
transduce::LinearCall<Number> checked(const transduce_linear_call* call, int32_t n_threads) {
    const transduce_linear_call& c = *call;
    require_kernels<Number>(n_threads);
    require(1 <= c.rows && c.rows <= INT32_MAX && 1 <= c.inputs && c.inputs <= 1 << 20 && 1 <= c.outputs && c.outputs <= 1 << 20,
            "rows, inputs or outputs: out of range");
    require(c.x && c.weight, "x and weight must not be null");
    require(c.is_bf16 || (!c.x_is_bf16 && !c.grad_is_bf16), "float32 products take float32 numbers");
    require(-1 <= c.activation && c.activation <= int32_t(transduce::Activation::silu), "activation: out of range");
    return {c.rows, c.inputs, c.outputs, c.x, !c.x_is_bf16 == !c.is_bf16, !c.grad_is_bf16 == !c.is_bf16, c.weight, c.bias, c.activation >= 0,
            transduce::Activation(std::max(c.activation, 0)), dropout_of(c.p, c.seed), out<Number>(c.output), out<Number>(c.slope), c.grad_output, c.grad_x,
            c.grad_weight, c.grad_bias, c.adds != 0};
}

}  // namespace

extern "C" {

int32_t transduce_can_train(void) {
    int32_t found = 0;
    guarded([&] { found = transduce::training_kernels<uint16_t>() ? 2 : transduce::training_kernels<float>() ? 1 : 0; });
    return found;
}

int32_t transduce_loss(const transduce_loss_call* call, int32_t n_threads) {
    return guarded([&] {
        require(call && call->loss && call->nll, "call, loss and nll must not be null");
        const transduce_loss_call& c = *call;
        require(c.rows >= 0 && c.rows <= INT32_MAX && 1 <= c.width && c.width <= 1 << 14 && 1 <= c.vocabulary && c.vocabulary <= 1 << 24,
                "rows, width or vocabulary: out of range");
        with_numbers(call, [&](auto number) { require_kernels<decltype(number)>(n_threads); });
        require(c.rows == 0 || (c.hidden && c.gold), "hidden and gold must not be null");
        require(c.weight && (c.rows == 0 || !c.grad_hidden == !c.grad_weight) && (!c.grad_bias || (c.grad_weight && c.bias)),
                "weight and gradients: some are null");
        for (int64_t i = 0; i < c.rows; i++) require(c.gold[i] == c.pad || (0 <= c.gold[i] && c.gold[i] < c.vocabulary), "gold: must be tokens of the vocabulary");
        with_numbers(call, [&](auto number) {
            const transduce::Loss found = transduce::smoothed_loss<decltype(number)>(
                {c.hidden, c.weight, c.bias, c.gold, c.rows, c.pad, c.width, c.vocabulary, c.smoothing, c.grad_hidden, c.grad_weight, c.grad_bias}, n_threads);
            *c.loss = float(found.loss), *c.nll = float(found.nll);
        });
    });
}

int32_t transduce_attend(const transduce_heads_call* call, int32_t n_threads) {
    return guarded([&] {
        with_numbers(call, [&](auto number) { transduce::attend(checked<decltype(number)>(call, n_threads, call->output), n_threads); });
    });
}

int32_t transduce_attend_backward(const transduce_heads_call* call, int32_t n_threads) {
    return guarded([&] {
        const bool fine = call && call->grad_output && call->grad_query && call->grad_key && call->grad_value;
        with_numbers(call, [&](auto number) {
            auto found = checked<decltype(number)>(call, n_threads, fine);
            found.output = nullptr;
            transduce::attend(found, n_threads);
        });
    });
}

int32_t transduce_residual(const transduce_residual_call* call, int32_t n_threads) {
    return guarded([&] {
        const bool norms = call && (call->output || call->rounded);
        require(call && (call->update ? call->sum != nullptr : call->x && norms), "what is read and written must not be null");
        require(norms == (call->statistics != nullptr) && (!norms || call->gain), "a norm needs gain, statistics and a place for its result");
        require(!call->rounded || call->is_bf16, "rounded: only in bfloat16");
        with_numbers(call, [&](auto number) { transduce::residual(checked<decltype(number)>(call, n_threads), n_threads); });
    });
}

int32_t transduce_residual_backward(const transduce_residual_call* call, int32_t n_threads) {
    return guarded([&] {
        require(call && (call->grad_output || call->grad_rounded), "a gradient must not be null");
        require(!call->grad_rounded || (call->is_bf16 && call->grad_x), "grad_rounded: only of a norm in bfloat16");
        require(!call->grad_kept || call->grad_x, "grad_kept: only with a norm");
        require(call->grad_x ? call->gain && call->statistics && call->normed && call->grad_gain : call->grad_update != nullptr,
                "what is read and written must not be null");
        with_numbers(call, [&](auto number) { transduce::residual_backward(checked<decltype(number)>(call, n_threads), n_threads); });
    });
}

int32_t transduce_embedding(const transduce_embedding_call* call, int32_t n_threads) {
    return guarded([&] {
        require(call && call->ids && call->table && call->output, "ids, table and output must not be null");
        transduce::embedding(checked(call, n_threads), n_threads);
    });
}

int32_t transduce_embedding_backward(const transduce_embedding_call* call, int32_t n_threads) {
    return guarded([&] {
        require(call && call->ids && call->grad_output, "ids and grad_output must not be null");
        transduce::embedding_backward(checked(call, n_threads), n_threads);
    });
}

int32_t transduce_linear(const transduce_linear_call* call, int32_t n_threads) {
    return guarded([&] {
        require(call && call->output, "call and output must not be null");
        with_numbers(call, [&](auto number) { transduce::linear(checked<decltype(number)>(call, n_threads), n_threads); });
    });
}

int32_t transduce_linear_backward(const transduce_linear_call* call, int32_t n_threads) {
    return guarded([&] {
        require(call && call->grad_output && call->grad_weight, "call and gradients must not be null");
        require(call->activation < 0 || (call->activation ? call->slope : call->output), "activation: its slope or output is null");
        with_numbers(call, [&](auto number) { transduce::linear_backward(checked<decltype(number)>(call, n_threads), n_threads); });
    });
}

int32_t transduce_sublayer(const transduce_sublayer_call* call, int32_t n_threads) {
    return guarded([&] { pass_on(transduce::sublayer(checked(call), n_threads)); });
}

int32_t transduce_sublayer_backward(const transduce_sublayer_call* call, int32_t n_threads) {
    return guarded([&] { pass_on(transduce::sublayer_backward(checked(call), n_threads)); });
}

int32_t transduce_run(const transduce_step* steps, int64_t n, int32_t n_threads, int64_t most, int64_t* left) {
    return guarded([&] {
        require(n >= 0 && (steps || !n) && most >= 0 && left, "steps, most or left: out of range or null");
        require(1 <= n_threads && n_threads <= kMaxThreads, "n_threads: must be from 1 to 1024");
        auto& pool = transduce::Pool::get();
        if (n_threads == 1) pool.wait(0);  // calls that were added with more threads come first
        for (const transduce_step* step = steps; step < steps + n; step++) {
            const auto make = [step = *step, n_threads] { pass_on(step.function(step.call, n_threads)); };
            if (n_threads > 1) pool.add(n_threads, make);
            else make();
        }
        *left = pool.wait(most);
        if (!*left) pool.rethrow_error();
    });
}

int32_t transduce_adam(const transduce_adam_tensor* tensors, int64_t n, double lr, double beta1, double beta2, double epsilon, double weight_decay,
                       double scale, int32_t n_threads) {
    return guarded([&] {
        std::vector<transduce::AdamTensor> found;
        for_each_tensor(tensors, n, n_threads, [&](const transduce_adam_tensor& t) {
            found.push_back({t.weight, t.grad, t.mean, t.square, t.step, t.n});
            return t.weight && t.grad && t.mean && t.square && t.step;
        });
        transduce::adam(found.data(), int64_t(found.size()), {lr, beta1, beta2, epsilon, weight_decay, scale}, n_threads);
    });
}

int32_t transduce_muon(const transduce_muon_matrix* matrices, int64_t n, float scale, const float* coefficients, int32_t steps, int32_t n_threads) {
    return guarded([&] {
        require_kernels<float>(n_threads);
        require(0 <= n && n <= INT32_MAX && (matrices || !n) && coefficients && 0 <= steps, "n, steps, matrices or coefficients: out of range or null");
        std::vector<transduce::MuonMatrix> found;
        for (int64_t i = 0; i < n; i++) {
            const transduce_muon_matrix& m = matrices[i];
            require(m.weight && m.grad && m.mean, "matrices: numbers must not be null");
            require(1 <= m.rows && m.rows <= 1 << 20 && 1 <= m.columns && m.columns <= 1 << 20, "rows or columns: out of range");
            found.push_back({m.weight, m.grad, m.mean, m.rows, m.columns, m.rate, m.weight_kept, m.momentum});
        }
        transduce::muon(found.data(), n, {scale, {coefficients[0], coefficients[1], coefficients[2]}, steps}, n_threads);
    });
}

int32_t transduce_norm(const float* const* tensors, const int64_t* sizes, int64_t n, int32_t n_threads, double* norm) {
    return guarded([&] {
        require_kernels<float>(n_threads);
        require(norm && n >= 0 && ((tensors && sizes) || !n), "tensors, sizes and norm must not be null");
        for (int64_t i = 0; i < n; i++) require(sizes[i] == 0 || (sizes[i] > 0 && tensors[i]), "tensors: numbers must not be null");
        *norm = transduce::norm(tensors, sizes, n, n_threads);
    });
}

}  // extern "C"
