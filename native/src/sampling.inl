// Passes over whole rows of logits, for sampling. Included by target_*.cpp after vec.h. Rows have a multiple of kPad columns.

namespace {

using transduce::kGroupColumns;

void group_maxima(const float* logits, int n, float* maxima) {
    for (int group = 0; group < n; group += kGroupColumns) {
        Vec largest = load(logits + group);
        for (int i = W; i < kGroupColumns; i += W) largest = max(largest, load(logits + group + i));
        maxima[group / kGroupColumns] = max_of(largest);
    }
}

void weigh(const float* logits, int n, float scale, float largest, float* weights, float* sums) {
    const Vec factor = splat(scale * kLog2E), shift = splat(largest);
    for (int group = 0; group < n; group += kGroupColumns) {
        Vec sum = zero();
        for (int i = group; i < group + kGroupColumns; i += W) {
            const Vec weight = exp2((load(logits + i) - shift) * factor);
            store(weights + i, weight);
            sum = sum + weight;
        }
        sums[group / kGroupColumns] = sum_of(sum);
    }
}

}  // namespace
