// Adam, Muon, and the norm of gradients: their tensors, divided among threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

constexpr int64_t kPieceNumbers = 1 << 15;

struct Piece {
    int64_t tensor, first, last;
};

template <class Size>
std::vector<Piece> pieces_of(int64_t n, Size size) {
    std::vector<Piece> found;
    for (int64_t i = 0; i < n; i++)
        for (int64_t first = 0; first < size(i); first += kPieceNumbers) found.push_back({i, first, std::min(first + kPieceNumbers, size(i))});
    return found;
}

// Room for four matrices, two of them with `rows` padded to whole vectors, and for the rounded operands: all rows, and a panel of 64 columns.
size_t memory_of(const MuonMatrix& matrix, size_t number_size) {
    const size_t rows = std::min(matrix.rows, matrix.columns), padded_rows = round_up(rows, 16);
    const size_t stride = round_up(std::max(matrix.rows, matrix.columns), kPanelColumns), gram = round_up(rows, kPanelColumns);
    return 2 * padded_rows * stride + 2 * rows * gram + ((rows + kPanelColumns) * std::max(stride, gram) * number_size + 3) / 4;
}

template <class Number>
void share_matrices(const TrainingKernels<Number>& kernels, const MuonMatrix* matrices, int64_t n, const MuonCall& call, int n_threads) {
    std::vector<const MuonMatrix*> largest_first;
    for (int64_t i = 0; i < n; i++) largest_first.push_back(matrices + i);
    std::stable_sort(largest_first.begin(), largest_first.end(), [](const MuonMatrix* a, const MuonMatrix* b) {
        return int64_t(a->rows) * a->columns > int64_t(b->rows) * b->columns;
    });
    Pool::get().run(n_threads, int(n), [&](int i) {
        static thread_local Buffer<float> scratch;
        scratch.reserve(memory_of(*largest_first[i], sizeof(Number)));
        kernels.muon_step(call, *largest_first[i], scratch.data());
    });
}

}  // namespace

void adam(const AdamTensor* tensors, int64_t n, const AdamOptions& options, int n_threads) {
    std::vector<AdamFactors> factors(n);
    for (int64_t i = 0; i < n; i++) {
        const double step = *tensors[i].step += 1;
        factors[i] = {float(options.beta1), float(options.beta2), float(1 - options.lr * options.weight_decay),
                      float(options.lr / (1 - std::pow(options.beta1, step))), float(1 / std::sqrt(1 - std::pow(options.beta2, step))),
                      float(options.epsilon), float(options.scale)};
    }
    const std::vector<Piece> pieces = pieces_of(n, [&](int64_t i) { return tensors[i].n; });
    const auto kernel = training_kernels<float>()->adam_numbers;
    Pool::get().run(n_threads, int(pieces.size()), [&](int i) {
        kernel(tensors[pieces[i].tensor], factors[pieces[i].tensor], pieces[i].first, pieces[i].last);
    });
}

double norm(const float* const* tensors, const int64_t* sizes, int64_t n, int n_threads) {
    const std::vector<Piece> pieces = pieces_of(n, [&](int64_t i) { return sizes[i]; });
    std::vector<double> squares(pieces.size());
    const auto kernel = training_kernels<float>()->sum_of_squares;
    Pool::get().run(n_threads, int(pieces.size()), [&](int i) {
        squares[i] = kernel(tensors[pieces[i].tensor] + pieces[i].first, pieces[i].last - pieces[i].first);
    });
    double sum = 0;
    for (const double square : squares) sum += square;
    return std::sqrt(sum);
}

void muon(const MuonMatrix* matrices, int64_t n, const MuonCall& call, int n_threads) {
    if (const auto* kernels = training_kernels<uint16_t>()) share_matrices(*kernels, matrices, n, call, n_threads);
    else share_matrices(*training_kernels<float>(), matrices, n, call, n_threads);
}

}  // namespace transduce
