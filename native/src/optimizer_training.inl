// Adam (Kingma and Ba 2015), with decoupled weight decay (Loshchilov and Hutter 2019), and the norm of gradients. Included after vec.h.

namespace {

using transduce::AdamFactors;
using transduce::AdamTensor;

// Updates elements [first, last) of a tensor.
void adam_numbers(const AdamTensor& tensor, const AdamFactors& f, int64_t first, int64_t last) {
    const Vec mean_kept = splat(f.beta1), mean_new = splat(1 - f.beta1), square_kept = splat(f.beta2), square_new = splat(1 - f.beta2);
    const Vec weight_kept = splat(f.weight_kept), rate = splat(-f.rate), root = splat(f.root), epsilon = splat(f.epsilon), scale = splat(f.scale);
    for (int64_t i = first; i < last; i += W) {
        const int n = last - i < W ? int(last - i) : W;
        const Vec grad = load_part(tensor.grad + i, n) * scale;
        const Vec mean = fma(load_part(tensor.mean + i, n), mean_kept, grad * mean_new);
        const Vec square = fma(load_part(tensor.square + i, n), square_kept, grad * grad * square_new);
        const Vec weight = load_part(tensor.weight + i, n) * weight_kept;
        store_part(tensor.mean + i, n, mean);
        store_part(tensor.square + i, n, square);
        store_part(tensor.weight + i, n, fma(rate, mean / fma(sqrt(square), root, epsilon), weight));
    }
}

double sum_of_squares(const float* numbers, int64_t n) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < n; i += 4 * W)
        for (int k = 0; k < 4; k++) {
            const int64_t left = n - i - k * W;
            const Vec x = left > 0 ? load_part(numbers + i + k * W, left < W ? int(left) : W) : zero();
            sums[k] = fma(x, x, sums[k]);
        }
    return double(sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

}  // namespace
