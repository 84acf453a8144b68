// The C interface of training: checks the arguments and calls the kernels.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "pool.h"
#include "stack.h"
#include "training.h"
#include "transduce_native.h"

using namespace transduce::abi;

namespace {

template <class Number>
void require_kernels(int32_t n_threads) {
    require(transduce::training_kernels<Number>(), "this CPU has no kernels of training in this precision");
    require(1 <= n_threads && n_threads <= kMaxThreads, "n_threads: must be from 1 to 1024");
}

// Calls `take` for each tensor with n > 0; `take` returns false if one of the tensor's pointers is null.
template <class Tensor, class Take>
void for_each_tensor(const Tensor* tensors, int64_t n, int32_t n_threads, Take take) {
    require_kernels<float>(n_threads);
    require(n >= 0 && (tensors || !n), "tensors: must not be null");
    for (int64_t i = 0; i < n; i++)
        require(tensors[i].n == 0 || (tensors[i].n > 0 && take(tensors[i])), "tensors: numbers must not be null");
}

const transduce_stack_call& checked(const transduce_stack_call* call, int32_t n_threads) {
    require(call, "call must not be null");
    const transduce_stack_call& c = *call;
    transduce::with_numbers(c.is_bf16, [&](auto number) { require_kernels<decltype(number)>(n_threads); });
    require(c.weights && c.kept && c.output, "weights, kept and output must not be null");
    require(1 <= c.positions && c.positions <= kMaxSource && 1 <= c.batch && c.batch <= INT32_MAX / c.positions, "batch or positions: out of range");
    for (const int32_t size : {c.width, c.heads, c.kv_heads, c.key_width, c.value_width, c.inner_width}) require(1 <= size && size <= 1 << 20, "sizes: out of range");
    require(c.heads % c.kv_heads == 0 && -1 < c.activation && c.activation <= int32_t(transduce::Activation::silu), "heads or activation: out of range");
    for (const float p : {c.p, c.attention_p, c.activation_p}) require(0 <= p && p < 1, "p: out of range");
    require(c.n_blocks >= 1 && c.x, "n_blocks: out of range, or x is null");
    return c;
}

transduce::EmbeddingCall checked(const transduce_embedding_call* call, int32_t n_threads) {
    const transduce_embedding_call& c = *call;
    require_kernels<float>(n_threads);
    require(c.rows >= 0 && c.rows <= INT32_MAX && 1 <= c.width && c.width <= 1 << 16 && 1 <= c.vocabulary && 1 <= c.length && c.length <= INT32_MAX,
            "rows, width, vocabulary or length: out of range");
    require(0 <= c.p && c.p < 1, "p: out of range");
    require(std::all_of(c.ids, c.ids + c.rows, [&](int64_t id) { return 0 <= id && id < c.vocabulary; }), "ids: out of range");
    return {c.rows, c.length, c.width, c.vocabulary, c.ids, c.table, c.positions, c.scale, transduce::dropout_of(c.p, c.seed), c.output, c.grad_output,
            c.grad_table, c.grad_positions, c.adds != 0};
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
        transduce::with_numbers(c.is_bf16, [&](auto number) { require_kernels<decltype(number)>(n_threads); });
        require(c.rows == 0 || (c.hidden && c.gold), "hidden and gold must not be null");
        require(c.weight && (c.rows == 0 || !c.grad_hidden == !c.grad_weight) && (!c.grad_bias || (c.grad_weight && c.bias)),
                "weight and gradients: some are null");
        for (int64_t i = 0; i < c.rows; i++) require(c.gold[i] == c.pad || (0 <= c.gold[i] && c.gold[i] < c.vocabulary), "gold: must be tokens of the vocabulary");
        transduce::with_numbers(c.is_bf16, [&](auto number) {
            const transduce::Loss found = transduce::smoothed_loss<decltype(number)>(
                {c.hidden, c.weight, c.bias, c.gold, c.rows, c.pad, c.width, c.vocabulary, c.smoothing, c.grad_hidden, c.grad_weight, c.grad_bias}, n_threads);
            *c.loss = float(found.loss), *c.nll = float(found.nll);
        });
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

int32_t transduce_stack_memory(const transduce_stack_call* call, int64_t* bytes) {
    return guarded([&] { *bytes = transduce::stack_memory(*call); });
}

int32_t transduce_stack(const transduce_stack_call* call, int32_t n_threads) {
    return guarded([&] { transduce::stack(checked(call, n_threads), n_threads); });
}

int32_t transduce_stack_backward(const transduce_stack_call* call, int32_t n_threads) {
    return guarded([&] { transduce::stack_backward(checked(call, n_threads), n_threads); });
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
