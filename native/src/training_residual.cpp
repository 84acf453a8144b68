#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {
template <class Number>
void residual(const ResidualCall<Number>& call, int n_threads) {
    const auto kernel = training_kernels<Number>()->residual_rows;
    Pool::get().run_rows(n_threads, call.rows, kPieceRows, [&](int, int64_t first, int64_t n) { kernel(call, first, first + n); });
}

template <class Number>
void residual_backward(const ResidualCall<Number>& call, int n_threads) {
    const auto& kernels = *training_kernels<Number>();
    if (!call.grad_x)
        return Pool::get().run_rows(n_threads, call.rows, kPieceRows,
                                    [&](int, int64_t first, int64_t n) { kernels.dropout_rows_backward(call, first, first + n); });
    // Sums of each piece, which are then added in their order, whichever thread they are from.
    const size_t width = round_up(call.width, 16), pieces = (call.rows + kPieceRows - 1) / kPieceRows;
    Buffer<float> sums(pieces * 2 * width);
    Pool::get().run_rows(n_threads, call.rows, kPieceRows, [&](int piece, int64_t first, int64_t n) {
        float* own = sums.data() + size_t(piece) * 2 * width;
        kernels.residual_rows_backward(call, first, first + n, own, own + width);
    });
    for (int k = 0; k < call.width; k++) {
        double gain = 0, shift = 0;
        for (size_t p = 0; p < pieces; p++) gain += sums[p * 2 * width + k], shift += sums[(p * 2 + 1) * width + k];
        call.grad_gain[k] = float(gain) + (call.adds ? call.grad_gain[k] : 0);
        if (call.grad_shift) call.grad_shift[k] = float(shift) + (call.adds ? call.grad_shift[k] : 0);
    }
}

template void residual(const ResidualCall<uint16_t>&, int);
template void residual(const ResidualCall<float>&, int);
template void residual_backward(const ResidualCall<uint16_t>&, int);
template void residual_backward(const ResidualCall<float>&, int);

}  // namespace transduce
