#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace transduce {
namespace {

constexpr float kSlack = 1e-3f;  // tolerance of a lower bound of logits, which rounding must not make too high
constexpr float kCoolest = 1e-30f;  // lower temperatures are as good as 0, and their inverse may be infinite

}  // namespace

int32_t Sampler::draw(float* logits, int n, int columns, const std::vector<int32_t>& banned,
                      const std::vector<std::pair<int32_t, float>>& raised, const Sampling& sampling, double number, float& log_prob) {
    const int n_groups = columns / kGroupColumns;
    maxima_.resize(n_groups), sums_.resize(n_groups), weights_.resize(columns);
    kernels_.group_maxima(logits, columns, maxima_.data());
    const auto largest_of = [](const std::vector<float>& values) { return *std::max_element(values.begin(), values.end()); };
    const float first = largest_of(maxima_);
    kernels_.weigh(logits, columns, 1, first, weights_.data(), sums_.data());
    const double log_sum = double(first) + std::log(std::accumulate(sums_.begin(), sums_.end(), 0.0));
    if (!std::isfinite(log_sum)) return -1;

    own_.clear();
    for (const auto& [id, least] : raised) {
        own_.push_back(logits[id]);
        logits[id] = std::max(logits[id], least);
        maxima_[id / kGroupColumns] = std::max(maxima_[id / kGroupColumns], logits[id]);
    }
    for (const int32_t id : banned) {
        logits[id] = 2 * kNever;
        const float* group = logits + id / kGroupColumns * kGroupColumns;
        maxima_[id / kGroupColumns] = *std::max_element(group, group + kGroupColumns);
    }
    const float largest = largest_of(maxima_);
    if (!(largest > kNever / 2)) return -1;
    const Sampling how = sampling.temperature > kCoolest ? sampling : Sampling{1, 1, 1};
    if (how.temperature != 1 || largest != first || !raised.empty())
        kernels_.weigh(logits, columns, 1 / how.temperature, largest, weights_.data(), sums_.data());
    const auto exclude = [this](int id) {
        weights_[id] = 0;
        const float* group = &weights_[id / kGroupColumns * kGroupColumns];
        sums_[id / kGroupColumns] = std::accumulate(group, group + kGroupColumns, 0.0f);
    };
    for (const int32_t id : banned) exclude(id);
    if (n < columns) std::fill(weights_.begin() + n, weights_.end(), 0.0f), exclude(n);

    const bool few = how.top_k > 0 && how.top_k < n;
    if (few) take_top_k(logits, n, how.top_k);
    if (how.top_p < 1) take_top_p(logits, n, few, how);
    if ((few || how.top_p < 1) && taken_.empty()) return -1;  // logits that are not numbers
    const int32_t token = few || how.top_p < 1 ? draw_from_taken(number) : draw_from_all(n, number);
    float own = logits[token];
    for (size_t i = 0; i < raised.size(); i++)
        if (raised[i].first == token) own = own_[i];
    log_prob = float(double(own) - log_sum);
    return token;
}

// The token at which the cumulative weight passes the fraction `number` of the total weight.
int32_t Sampler::draw_from_all(int n, double number) const {
    double left = number * std::accumulate(sums_.begin(), sums_.end(), 0.0);
    size_t group = 0;
    while (group + 1 < sums_.size() && left >= double(sums_[group])) left -= double(sums_[group++]);
    for (int id = int(group) * kGroupColumns; id < n; id++) {
        if (left < double(weights_[id])) return id;
        left -= double(weights_[id]);
    }
    while (n > 1 && !(weights_[n - 1] > 0)) n--;  // rounding has passed the end
    return n - 1;
}

void Sampler::take_at_least(const float* logits, int n, float least) {
    taken_.clear();
    for (size_t group = 0; group < maxima_.size(); group++) {
        if (!(maxima_[group] >= least)) continue;
        const int begin = int(group) * kGroupColumns, end = std::min(n, begin + kGroupColumns);
        for (int id = begin; id < end; id++)
            if (logits[id] >= least && weights_[id] > 0) taken_.push_back({logits[id], weights_[id], id});
    }
}

// Takes the k best tokens, and all tokens that are equal to the k-th.
void Sampler::take_top_k(const float* logits, int n, int k) {
    float least = kNever;
    if (k <= int(maxima_.size())) {  // at least k logits reach the k-th largest maximum of a group
        order_ = maxima_;
        std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.end(), std::greater<float>());
        least = order_[k - 1];
    }
    take_at_least(logits, n, least);
    if (int(taken_.size()) <= k) return;
    order_.clear();
    for (const Token& token : taken_) order_.push_back(token.logit);
    std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.end(), std::greater<float>());
    least = order_[k - 1];
    taken_.erase(std::remove_if(taken_.begin(), taken_.end(), [=](const Token& token) { return token.logit < least; }), taken_.end());
}

// Takes the fewest best tokens (at least one) whose weights sum to at least top_p of the total: of the `taken` tokens, or else of all.
void Sampler::take_top_p(const float* logits, int n, bool taken, const Sampling& sampling) {
    double sum = std::accumulate(sums_.begin(), sums_.end(), 0.0);
    if (taken) {
        sum = 0;
        for (const Token& token : taken_) sum += double(token.weight);
    } else {
        // Tokens with a weight below (1 - p) sum / n together have less than (1 - p) sum, so none of them is needed.
        const float largest = *std::max_element(maxima_.begin(), maxima_.end());
        take_at_least(logits, n, largest + sampling.temperature * float(std::log((1 - sampling.top_p) * sum / n)) - kSlack);
    }
    if (taken_.empty()) return;
    const auto better = [](const Token& a, const Token& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; };
    double before = 0;
    sorted_ = taken_;
    auto first = sorted_.begin(), last = sorted_.end();  // the last token that is needed is one of these
    while (last - first > 1) {
        const auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, better);
        const double half = std::accumulate(first, middle, 0.0, [](double total, const Token& token) { return total + double(token.weight); });
        if (before + half >= sampling.top_p * sum) last = middle;
        else before += half, first = middle;
    }
    const Token cut = *first;
    taken_.erase(std::remove_if(taken_.begin(), taken_.end(), [&](const Token& token) { return better(cut, token); }), taken_.end());
}

int32_t Sampler::draw_from_taken(double number) const {
    double left = 0;
    for (const Token& token : taken_) left += double(token.weight);
    left *= number;
    for (const Token& token : taken_) {
        if (left < double(token.weight)) return token.id;
        left -= double(token.weight);
    }
    return taken_.back().id;
}

}  // namespace transduce
