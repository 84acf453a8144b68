#include <algorithm>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

template <class Number>
struct Scratch {
    Buffer<Number> rounded;
    Buffer<float> product;
};

template <class Number>
Scratch<Number>& scratch(size_t width, int rows) {
    static thread_local Scratch<Number> own;
    own.rounded.reserve(rows * width), own.product.reserve(size_t(rows) * kPanelColumns);
    return own;
}

int panels(int columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

template <class Work>
void share(int n_threads, int n_pieces, Work work) { Pool::get().run(n_threads, n_pieces, work); }

// The gradient of a small weight is computed in groups of rows, whose operands fit into a cache, and the groups are added.
constexpr int64_t kGroupRows = 1024, kSmallWeight = 1 << 17;
constexpr int64_t kSummed = 8192;  // numbers that a thread adds up at once

// Operands, kept from call to call. One caller at a time: see `Pool`.
template <class Number>
struct Operands {
    Buffer<Number> weight, left, right;
    Buffer<float> bias, gradients;
};
template <class Number>
thread_local Operands<Number> kept_operands;

}  // namespace

template <class Number>
void linear(const LinearCall<Number>& call, int n_threads) {
    const auto& kernels = *training_kernels<Number>();
    auto& operands = kept_operands<Number>;
    const size_t width = round_up(call.inputs, 32);
    operands.weight.reserve(size_t(panels(call.outputs)) * kPanelColumns * width);
    Number* columns = operands.weight.data();
    share(n_threads, panels(call.outputs), [&](int p) { kernels.pack_weight_columns(call, p, columns + size_t(p) * kPanelColumns * width); });
    const int rows = rows_at_once(call.rows);
    share(n_threads, int((call.rows + rows - 1) / rows), [&](int piece) {
        const int64_t first = int64_t(piece) * rows;
        auto& own = scratch<Number>(width, rows);
        kernels.linear_rows(call, first, int(std::min<int64_t>(rows, call.rows - first)), columns, own.rounded.data(), own.product.data());
    });
}

template <class Number>
void linear_backward(const LinearCall<Number>& given, int n_threads) {
    const auto& kernels = *training_kernels<Number>();
    auto& operands = kept_operands<Number>;
    LinearCall<Number> call = given;
    const int block = rows_at_once(call.rows), blocks = int((call.rows + block - 1) / block);
    call.padded_rows = round_up(call.rows, kRowStep), call.padded_outputs = int(round_up(call.outputs, 32));
    const size_t width = round_up(call.outputs, 32), n_bias = width;
    operands.weight.reserve(size_t(panels(call.inputs)) * kPanelColumns * call.padded_outputs);
    operands.left.reserve(size_t(panels(call.outputs)) * kPanelColumns * call.padded_rows);
    operands.right.reserve(round_up(call.rows, kPackedRows) * call.padded_inputs());
    operands.bias.reserve(blocks * n_bias);
    Number *weight = operands.weight.data(), *left = operands.left.data(), *right = operands.right.data();
    float* bias = operands.bias.data();
    share(n_threads, panels(call.inputs),
          [&](int p) { kernels.pack_weight_rows(call, p * kPanelColumns, weight + size_t(p) * kPanelColumns * call.padded_outputs); });
    share(n_threads, blocks, [&](int piece) {
        const int64_t first = int64_t(piece) * block;
        const int rows = int(std::min<int64_t>(block, call.rows - first)), padded = int(std::min<int64_t>(block, call.padded_rows - first));
        auto& own = scratch<Number>(width, block);
        kernels.linear_rows_backward(call, first, rows, padded, weight, left, right, bias + piece * n_bias, own.rounded.data(), own.product.data());
    });
    const int64_t size = int64_t(call.outputs) * call.inputs, group = size <= kSmallWeight ? kGroupRows : std::max<int64_t>(call.rows, 1);
    const int groups = int(std::max<int64_t>((call.rows + group - 1) / group, 1));
    int n_rows = kernels.gradient_rows, n_columns = kernels.gradient_columns, across, down;
    for (;; n_rows > n_columns ? n_rows /= 2 : n_columns /= 2) {  // until there is enough for all threads
        across = (call.inputs + n_columns - 1) / n_columns, down = (call.outputs + n_rows - 1) / n_rows;
        if (groups * across * down >= 4 * n_threads || n_columns <= kernels.gradient_step) break;
    }
    if (groups > 1) operands.gradients.reserve(groups * size);
    float* gradients = groups > 1 ? operands.gradients.data() : call.grad_weight;
    share(n_threads, groups * across * down, [&](int piece) {
        const int of_group = piece % (across * down), first = of_group % down * n_rows, column = of_group / down * n_columns;
        const int64_t begin = piece / (across * down) * group;
        auto& product = scratch<Number>(0, 0).product;
        product.reserve(n_rows * kernels.gradient_columns);
        const OperandRows<Number> rows{begin, std::min(group, call.rows - begin), left, right};
        const int outputs = std::min(n_rows, call.outputs - first), inputs = std::min(n_columns, call.inputs - column);
        kernels.weight_rows_gradient(call, rows, first, outputs, column, inputs, product.data(), gradients + begin / group * size);
    });
    if (groups > 1)
        share(n_threads, int((size + kSummed - 1) / kSummed), [&](int piece) {
            const int64_t first = piece * kSummed, n = std::min(kSummed, size - first);
            std::copy_n(gradients + first, n, call.grad_weight + first);
            for (int g = 1; g < groups; g++)
                for (int64_t i = first; i < first + n; i++) call.grad_weight[i] += gradients[g * size + i];
        });
    for (int n = 0; call.grad_bias && n < call.outputs; n++) {
        double sum = 0;
        for (int b = 0; b < blocks; b++) sum += bias[b * n_bias + n];
        call.grad_bias[n] = float(sum);
    }
}

template void linear(const LinearCall<uint16_t>&, int);
template void linear(const LinearCall<float>&, int);
template void linear_backward(const LinearCall<uint16_t>&, int);
template void linear_backward(const LinearCall<float>&, int);

}  // namespace transduce
