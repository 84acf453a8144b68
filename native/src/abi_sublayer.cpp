// A sub-layer of a Transformer's block with its residual connection and norm: the calls for its parts, one after another.

#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "pool.h"
#include "training.h"
#include "transduce_native.h"

namespace transduce {
namespace {

using Call = transduce_sublayer_call;

// Intermediate results, in the same memory in every queued call: it stays in the caches.
struct Memory {
    Buffer<char> update, hidden, inner, read;
};
Memory& memory() { return Pool::kept<Memory>(); }

// Makes calls until one of them fails.
struct Calls {
    int n_threads;
    int32_t code = TRANSDUCE_OK;

    template <class PartCall>
    void make(int32_t (*function)(const PartCall*, int32_t), const PartCall& call) {
        if (!code) code = function(&call, n_threads);
    }
};

int64_t rows_of(const Call& c) { return c.batch * c.positions; }

void* reserve(Buffer<char>& buffer, const Call& c, int32_t width) {
    buffer.reserve(size_t(rows_of(c)) * width * sizeof(float));
    return buffer.data();
}

transduce_linear_call linear_of(const Call& c, const transduce_layer& layer, const void* x, bool x_is_bf16) {
    transduce_linear_call found{};
    found.rows = rows_of(c), found.inputs = layer.inputs, found.outputs = layer.outputs;
    found.is_bf16 = found.grad_is_bf16 = c.is_bf16, found.x_is_bf16 = x_is_bf16, found.x = x, found.activation = -1;
    found.weight = layer.weight, found.bias = layer.bias, found.grad_weight = layer.grad_weight, found.grad_bias = layer.grad_bias;
    return found;
}

// The first layer, whose output has the activation of a feed-forward network.
transduce_linear_call first_of(const Call& c) {
    auto found = c.pre_norm ? linear_of(c, c.first, c.normed, c.is_bf16)
                 : c.read   ? linear_of(c, c.first, c.read, c.read_is_bf16)
                            : linear_of(c, c.first, c.x, false);
    found.output = c.hidden;
    if (!c.heads) found.activation = c.activation, found.p = c.inner_p, found.seed = c.inner_seed, found.slope = c.slope;
    return found;
}

transduce_linear_call second_of(const Call& c) { return linear_of(c, c.second, c.heads ? c.inner : c.hidden, c.is_bf16); }

transduce_residual_call residual_of(const Call& c) {
    transduce_residual_call found{};
    found.rows = rows_of(c), found.width = c.width, found.rms = c.rms, found.is_bf16 = c.is_bf16, found.epsilon = c.epsilon;
    return found;
}

void add_norm(const Call& c, transduce_residual_call& call) {
    call.gain = c.gain, call.shift = c.shift, call.statistics = c.statistics, call.grad_gain = c.grad_gain, call.grad_shift = c.grad_shift;
}

void add_update(const Call& c, transduce_residual_call& call) { call.p = c.p, call.seed = c.seed; }

void set(int64_t* strides, int64_t batch, int64_t head, int64_t position) { strides[0] = batch, strides[1] = head, strides[2] = position; }

void copy(const int64_t* from, int64_t* to) { std::copy_n(from, 3, to); }

// Queries, and in self-attention keys and values, side by side at each position: in `hidden`, or in its gradient.
template <class Pointer>
struct Place {
    Pointer& numbers;
    int64_t* strides;
};
template <class Pointer>
void place_heads(const Call& c, void* hidden, Place<Pointer> query, Place<Pointer> key, Place<Pointer> value) {
    const int64_t row = c.first.outputs, batch = row * c.positions, size = c.is_bf16 ? 2 : 4;
    char* const numbers = static_cast<char*>(hidden);
    query.numbers = numbers;
    set(query.strides, batch, c.key_width, row);
    if (c.key) return;
    key.numbers = numbers + size * c.heads * c.key_width, value.numbers = numbers + size * (c.heads + c.kv_heads) * c.key_width;
    set(key.strides, batch, c.key_width, row), set(value.strides, batch, c.value_width, row);
}

transduce_heads_call heads_of(const Call& c) {
    transduce_heads_call found{};
    found.batch = c.batch, found.heads = c.heads, found.kv_heads = c.kv_heads, found.queries = c.positions, found.keys = c.keys;
    found.width = c.key_width, found.value_width = c.value_width, found.causal = c.causal, found.is_bf16 = c.is_bf16;
    found.scale = float(std::pow(double(c.key_width), -0.5)), found.p = c.inner_p, found.seed = c.inner_seed;
    found.key = c.key, found.value = c.value, found.bias = c.bias, found.output = c.inner;
    copy(c.key_strides, found.key_strides), copy(c.value_strides, found.value_strides), copy(c.bias_strides, found.bias_strides);
    place_heads<const void*>(c, c.hidden, {found.query, found.query_strides}, {found.key, found.key_strides}, {found.value, found.value_strides});
    return found;
}

transduce_heads_call heads_backward_of(const Call& c, void* grad_hidden, const void* grad_inner) {
    transduce_heads_call found = heads_of(c);
    found.grad_key = c.grad_key, found.grad_value = c.grad_value, found.grad_output = grad_inner;
    copy(c.grad_key_strides, found.grad_key_strides), copy(c.grad_value_strides, found.grad_value_strides);
    place_heads<void*>(c, grad_hidden, {found.grad_query, found.grad_query_strides}, {found.grad_key, found.grad_key_strides},
                       {found.grad_value, found.grad_value_strides});
    set(found.grad_strides, int64_t(c.positions) * c.second.inputs, c.value_width, c.second.inputs);
    return found;
}

}  // namespace

int32_t sublayer(const Call& c, int32_t n_threads) {
    Calls calls{n_threads};
    if (c.pre_norm) {
        auto norm = residual_of(c);
        add_norm(c, norm);
        norm.x = c.x;
        if (c.is_bf16) norm.rounded = c.normed;
        else norm.output = static_cast<float*>(c.normed);
        calls.make(transduce_residual, norm);
    }
    calls.make(transduce_linear, first_of(c));
    if (c.heads) calls.make(transduce_attend, heads_of(c));
    auto second = second_of(c);
    second.output = reserve(memory().update, c, c.width);
    calls.make(transduce_linear, second);
    auto residual = residual_of(c);
    add_update(c, residual);
    residual.x = c.x, residual.update = second.output, residual.sum = c.pre_norm ? c.output : c.sum;
    if (!c.pre_norm) add_norm(c, residual), residual.output = c.output, residual.rounded = c.rounded;
    calls.make(transduce_residual, residual);
    return calls.code;
}

int32_t sublayer_backward(const Call& c, int32_t n_threads) {
    Calls calls{n_threads};
    auto residual = residual_of(c);
    add_update(c, residual);
    residual.grad_output = c.grad_output, residual.grad_update = reserve(memory().update, c, c.width);
    if (!c.pre_norm) add_norm(c, residual), residual.normed = c.sum, residual.grad_rounded = c.grad_rounded, residual.grad_x = c.grad_x;
    calls.make(transduce_residual_backward, residual);
    auto second = second_of(c);
    void* grad_hidden = reserve(memory().hidden, c, c.first.outputs);
    void* grad_inner = c.heads ? reserve(memory().inner, c, c.second.inputs) : grad_hidden;
    second.grad_output = residual.grad_update, second.grad_x = grad_inner;
    calls.make(transduce_linear_backward, second);
    if (c.heads) calls.make(transduce_attend_backward, heads_backward_of(c, grad_hidden, grad_inner));
    auto first = first_of(c);
    first.grad_output = grad_hidden;
    if (c.pre_norm) first.grad_x = reserve(memory().read, c, c.width);
    else first.grad_x = c.read ? c.grad_read : c.grad_x, first.adds = !c.read;
    calls.make(transduce_linear_backward, first);
    if (!c.pre_norm) return calls.code;
    auto norm = residual_of(c);
    add_norm(c, norm);
    norm.normed = c.x, norm.grad_kept = c.grad_output, norm.grad_x = c.grad_x;
    if (c.is_bf16) norm.grad_rounded = first.grad_x;
    else norm.grad_output = static_cast<float*>(first.grad_x);
    calls.make(transduce_residual_backward, norm);
    return calls.code;
}

}  // namespace transduce
