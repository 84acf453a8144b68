#include "positions.h"

#include <algorithm>
#include <cmath>

namespace transduce {
namespace {

enum { kNoPositions, kSinusoidal, kSinusoidalHalves, kLearned, kRotary, kFairseq, kMarian };

}  // namespace

Positions::Positions(const Model& model, const Stack& stack) : model_(model), stack_(stack) {
    const transduce_config& c = model.config;
    if (c.positions == kRotary) half_ = c.d_model / c.n_heads / 2, stride_ = 2 * half_;
    else if (c.positions != kNoPositions && c.positions != kLearned) stride_ = model.width;
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
    if (model_.config.positions == kFairseq || model_.config.positions == kMarian) {
        const int half = d_model / 2, first = model_.config.positions == kFairseq ? 2 : 0;
        for (int i = 0; i < half; i++) {
            const double angle = (position + first) * std::exp(i * (-std::log(10000.0) / std::max(1, half - 1)));
            row[i] = float(std::sin(angle)), row[half + i] = float(std::cos(angle));
        }
        if (d_model % 2) row[d_model - 1] = 0;
        return;
    }
    const bool halves = model_.config.positions == kSinusoidalHalves;
    const int n_sines = (d_model + 1) / 2;
    for (int i = 0; i < n_sines; i++) {
        const double angle = position * std::exp(2 * i * (-std::log(10000.0) / d_model));
        row[halves ? i : 2 * i] = float(std::sin(angle));
        if (2 * i + 1 < d_model) row[halves ? n_sines + i : 2 * i + 1] = float(std::cos(angle));
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
    switch (model_.config.positions) {
    case kSinusoidal:
    case kFairseq:
    case kMarian:
    case kSinusoidalHalves: return row(position);
    case kLearned: return stack_.positions.data() + size_t(position) * model_.width;
    default: return nullptr;
    }
}

const float* Positions::cosines(int position) { return row(position); }

}  // namespace transduce
