#include "positions.h"

#include <algorithm>
#include <cmath>

namespace transduce {
namespace {

// The bucket of a key `distance` positions after its query. Small distances have a bucket each; larger ones share buckets whose width grows
// exponentially, up to 128. In float32, as the reference does.
int bucket(int distance, bool causal) {
    const int n = causal ? kBuckets : kBuckets / 2, n_exact = n / 2, first = !causal && distance > 0 ? n : 0;
    distance = causal ? std::max(0, -distance) : std::abs(distance);
    if (distance < n_exact) return first + distance;
    const float scale = float((n - n_exact) / std::log(128.0 / n_exact));
    return first + std::min(n - 1, n_exact + int(std::log(float(distance) / float(n_exact)) * scale));
}

// The slopes for the largest power of two of heads, then every other slope for the next power of two.
float alibi_slope(int head, int n_heads) {
    int lower = 1;
    while (2 * lower <= n_heads) lower *= 2;
    return float(std::pow(2.0, head < lower ? -8.0 * (head + 1) / lower : -4.0 * (2 * (head - lower) + 1) / lower));
}

}  // namespace

Positions::Positions(const Model& model, const Stack& stack) : model_(model), stack_(stack) {
    const transduce_config& c = model.config;
    if (c.positions == kRotary) half_ = c.d_key / 2, stride_ = 2 * half_;
    else if (c.positions >= kSinusoidal) stride_ = model.width;
}

void Positions::compute(int position, float* row) const {
    const int d_model = model_.config.d_model;
    if (half_) {  // in float32, as the reference does
        for (int i = 0; i < half_; i++) {
            const float angle = float(position) * std::exp(float(2 * i) * float(-std::log(10000.0) / (2 * half_)));
            row[i] = std::cos(angle), row[half_ + i] = std::sin(angle);
        }
        return;
    }
    // The wavelengths are a geometric series. It ends just before 10000 * 2 pi, or exactly there for Marian's and fairseq's sinusoids.
    const int kind = model_.config.positions, first = kind == kFairseq ? 2 : 0;
    const bool reaches_end = kind >= kFairseq, halves = kind != kSinusoidal;
    const int n_sines = reaches_end ? d_model / 2 : (d_model + 1) / 2;
    const double rate = -std::log(10000.0) / (reaches_end ? std::max(1, n_sines - 1) : d_model / 2.0);
    for (int i = 0; i < n_sines; i++) {
        const double angle = (position + first) * std::exp(i * rate);
        row[halves ? i : 2 * i] = float(std::sin(angle));
        if (n_sines + i < d_model) row[halves ? n_sines + i : 2 * i + 1] = float(std::cos(angle));
    }
}

const float* Positions::row(int position) {
    const size_t known = rows_.size() / stride_;
    if (size_t(position) >= known) {
        const size_t wanted = std::max<size_t>(position + 1, std::max<size_t>(64, 2 * known));
        rows_.resize(wanted * stride_);
        for (size_t p = known; p < wanted; p++) compute(int(p), &rows_[p * stride_]);
    }
    return &rows_[size_t(position) * stride_];
}

const float* Positions::added(int position) {
    if (model_.config.positions == kLearned) return stack_.positions.data() + size_t(position) * model_.width;
    return model_.config.positions >= kSinusoidal ? row(position) : nullptr;
}

const float* Positions::cosines(int position) { return row(position); }

float Positions::bias(int head, int distance) const {
    const int n_heads = model_.config.n_heads;
    if (model_.config.positions == kAlibi) return -alibi_slope(head, n_heads) * float(std::abs(distance));
    return stack_.score_biases[bucket(distance, &stack_ == &model_.decoder) * n_heads + head];
}

void Positions::reserve_biases(int n) {
    if (n <= reach_ || (model_.config.positions != kT5 && model_.config.positions != kAlibi)) return;
    reach_ = std::max(n, 2 * reach_);
    biases_.assign(bias_stride() * ((model_.config.n_heads + 3) / 4), 0);
    for (int head = 0; head < model_.config.n_heads; head++)
        for (int distance = -reach_; distance < reach_; distance++)
            biases_[bias_stride() * (head / 4) + size_t(reach_ + distance) * 4 + head % 4] = kLog2E * bias(head, distance);
}

}  // namespace transduce
