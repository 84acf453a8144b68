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

// Operands, kept from call to call.
template <class Number>
struct Operands {
    Buffer<Number> weight, left, right;
    Buffer<float> bias, gradients;
};

}  // namespace

template <class Number>
void linear(const LinearCall<Number>& call, int n_threads) {
    const auto& kernels = *training_kernels<Number>();
    auto& operands = Pool::kept<Operands<Number>>();
    const size_t width = round_up(call.inputs, 32);
    operands.weight.reserve(size_t(panels(call.outputs)) * kPanelColumns * width);
    Number* columns = operands.weight.data();
    share(n_threads, panels(call.outputs), [&](int p) { kernels.pack_weight_columns(call, p, columns + size_t(p) * kPanelColumns * width); });
    const int rows = rows_at_once(call.rows);
    Pool::get().run_rows(n_threads, call.rows, rows, [&](int, int64_t first, int64_t n) {
        auto& own = scratch<Number>(width, rows);
        kernels.linear_rows(call, first, int(n), columns, own.rounded.data(), own.product.data());
    });
}

template <class Number>
void linear_backward(const LinearCall<Number>& given, int n_threads) {
    const auto& kernels = *training_kernels<Number>();
    auto& operands = Pool::kept<Operands<Number>>();
    LinearCall<Number> call = given;
    const int block = rows_at_once(call.rows), blocks = int((call.rows + block - 1) / block);
    call.padded_rows = round_up(call.rows, kRowStep), call.padded_outputs = int(round_up(call.outputs, 32));
    const size_t width = round_up(call.outputs, 32);
    operands.weight.reserve(size_t(panels(call.inputs)) * kPanelColumns * call.padded_outputs);
    operands.left.reserve(size_t(panels(call.outputs)) * kPanelColumns * call.padded_rows);
    operands.right.reserve(round_up(call.rows, kPackedRows) * call.padded_inputs());
    operands.bias.reserve(blocks * width);
    Number *weight = operands.weight.data(), *left = operands.left.data(), *right = operands.right.data();
    float* bias = operands.bias.data();
    share(n_threads, panels(call.inputs),
          [&](int p) { kernels.pack_weight_rows(call, p * kPanelColumns, weight + size_t(p) * kPanelColumns * call.padded_outputs); });
    Pool::get().run_rows(n_threads, call.rows, block, [&](int piece, int64_t first, int64_t rows) {
        const int padded = int(std::min<int64_t>(block, call.padded_rows - first));
        auto& own = scratch<Number>(width, block);
        kernels.linear_rows_backward(call, first, int(rows), padded, weight, left, right, bias + piece * width, own.rounded.data(), own.product.data());
    });
    const int64_t size = int64_t(call.outputs) * call.inputs, group = size <= kSmallWeight ? kGroupRows : call.rows;
    const int groups = int((call.rows + group - 1) / group);
    int n_rows = kernels.gradient_rows, n_columns = kernels.gradient_columns;
    const auto across = [&] { return (call.inputs + n_columns - 1) / n_columns; };
    const auto down = [&] { return (call.outputs + n_rows - 1) / n_rows; };
    while (n_columns > kernels.gradient_step && groups * across() * down() < 4 * n_threads) {  // too few for all threads
        if (n_rows > n_columns) n_rows /= 2;
        else n_columns /= 2;
    }
    const int n_down = down(), in_group = across() * n_down;
    if (groups > 1) operands.gradients.reserve(groups * size), call.adds_weights = false;  // until the groups are added
    float* gradients = groups > 1 ? operands.gradients.data() : call.grad_weight;
    share(n_threads, groups * in_group, [&](int piece) {
        const int of_group = piece % in_group, first = of_group % n_down * n_rows, column = of_group / n_down * n_columns;
        const int64_t begin = piece / in_group * group;
        auto& product = scratch<Number>(0, 0).product;
        product.reserve(n_rows * kernels.gradient_columns);
        const OperandRows<Number> rows{begin, std::min(group, call.rows - begin), left, right};
        const int outputs = std::min(n_rows, call.outputs - first), inputs = std::min(n_columns, call.inputs - column);
        kernels.weight_rows_gradient(call, rows, first, outputs, column, inputs, product.data(), gradients + begin / group * size);
    });
    if (groups > 1)
        Pool::get().run_rows(n_threads, size, kSummed, [&](int, int64_t first, int64_t n) {
            if (!given.adds_weights) std::copy_n(gradients + first, n, call.grad_weight + first);
            for (int g = given.adds_weights ? 0 : 1; g < groups; g++)
                for (int64_t i = first; i < first + n; i++) call.grad_weight[i] += gradients[g * size + i];
        });
    for (int n = 0; call.grad_bias && n < call.outputs; n++) {
        double sum = 0;
        for (int b = 0; b < blocks; b++) sum += bias[b * width + n];
        call.grad_bias[n] = float(sum) + (given.adds_weights ? call.grad_bias[n] : 0);
    }
}

template void linear(const LinearCall<uint16_t>&, int);
template void linear(const LinearCall<float>&, int);
template void linear_backward(const LinearCall<uint16_t>&, int);
template void linear_backward(const LinearCall<float>&, int);

}  // namespace transduce
