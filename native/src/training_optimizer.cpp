#include <cmath>
#include <vector>

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

}  // namespace transduce
