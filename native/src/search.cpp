#include "search.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace transduce {

void Search::start(const SearchOptions& options, int limit, const std::vector<int32_t>& prompt, const std::vector<int32_t>& prefix,
                   const Spelling& spelling, uint64_t copies, int n_unscored) {
    n_unscored_ = n_unscored, options_ = options, prompt_ = &prompt, prefix_ = &prefix, spelling_ = &spelling, limit_ = limit, length_ = 0, n_ended_ = 0;
    live_.assign(1, {0, 0, prompt.back(), -1, 0, copies});
    history_.clear(), finished_.clear(), attention_.clear(), width_ = 0;
    if (options.sampled) finished_.resize(options.n_best);
}

float Search::normalized(float log_prob, int length) const {
    return log_prob / float(std::pow(double(length), double(options_.length_penalty)));
}

std::vector<int32_t> Search::path_to(int node) const {
    std::vector<int32_t> tokens;
    for (; node >= 0; node = history_[node].before) tokens.push_back(history_[node].token);
    std::reverse(tokens.begin(), tokens.end());
    return tokens;
}

void Search::take_attention(const float* rows, int width) {
    width_ = size_t(width);
    if (!length_) return;  // the prompt was read
    attention_.resize(history_.size() * width_);
    for (const Live& live : live_) {
        std::copy_n(rows, width_, attention_.begin() + live.node * width_);
        rows += width;
    }
}

std::vector<float> Search::attention_to(int node, size_t n_tokens) const {
    std::vector<float> rows(n_tokens * width_);
    for (; node >= 0; node = history_[node].before) {
        n_tokens--;
        const size_t from = node * width_;
        if (from < attention_.size()) std::copy_n(attention_.begin() + from, width_, rows.begin() + n_tokens * width_);
    }
    return rows;
}

void Search::banned_tokens(int row, const std::vector<int32_t>& never, std::vector<int32_t>& tokens) const {
    if (forced_token() >= 0) return;
    if (is_spelling(live_[row])) {
        auto [step, end] = steps_of(live_[row]);
        for (int32_t token = 0; token < options_.n_tokens; token++) {
            if (step != end && step->token == token) ++step;
            else tokens.push_back(token);
        }
        return;
    }
    const uint64_t missing = live_[row].missing;
    if (options_.no_repeat_ngram) repeating_tokens(row, tokens);
    if (tokens.empty() && !missing) return;
    for (const int32_t token : never)
        if (!count_of(missing, token, options_.placeholder)) tokens.push_back(token);
    if (missing) tokens.push_back(options_.eos);
}

std::pair<Spelling::const_iterator, Spelling::const_iterator> Search::steps_of(const Live& live) const {
    const auto before = [](const transduce_spelling& a, const transduce_spelling& b) { return a.state < b.state; };
    return std::equal_range(spelling_->begin(), spelling_->end(), transduce_spelling{live.state, 0, 0}, before);
}

bool Search::is_spelling(const Live& live) const {
    if (spelling_->empty() || forced_token() >= 0) return false;
    const auto [first, last] = steps_of(live);
    return first != last;
}

int32_t Search::state_after(const Live& live, int32_t token) const {
    if (!is_spelling(live)) return live.state;
    const auto [first, last] = steps_of(live);
    return std::find_if(first, last, [=](const transduce_spelling& step) { return step.token == token; })->next;
}

uint64_t Search::missing_after(const Live& live, int32_t token) const {
    if (!count_of(live.missing, token, options_.placeholder)) return live.missing;
    return live.missing - (uint64_t(1) << 8 * (token - options_.placeholder));
}

void Search::repeating_tokens(int row, std::vector<int32_t>& tokens) const {
    const size_t n = size_t(options_.no_repeat_ngram);
    std::vector<int32_t> ids = *prompt_;
    const std::vector<int32_t> path = path_to(live_[row].node);
    ids.insert(ids.end(), path.begin(), path.end());
    if (ids.size() < n) return;
    const auto last = ids.end() - (n - 1);  // the first n - 1 tokens of the next n-gram
    for (auto gram = ids.begin(); gram + (n - 1) != ids.end(); ++gram)
        if (gram[n - 1] != options_.eos && std::equal(last, ids.end(), gram)) tokens.push_back(gram[n - 1]);  // the first token may be the end too
}

// Inserts a hypothesis of `length` tokens into the n_best results, if it is good enough; `node` is the node of its last token.
void Search::finish(float log_prob, int node, int length, bool finished) {
    const float score = normalized(log_prob, length);
    auto place = finished_.end();
    if (finished) {
        while (place != finished_.begin() && std::prev(place)->score < score) --place;
    }
    if (place == finished_.end() && int(finished_.size()) == options_.n_best) return;
    std::vector<int32_t> ids = path_to(node);
    std::vector<float> attention = attention_to(node, ids.size());
    finished_.insert(place, {log_prob, score, finished, std::move(ids), std::move(attention)});
    if (int(finished_.size()) > options_.n_best) finished_.pop_back();
}

bool Search::is_done() const {
    if (live_.empty()) return true;
    const float best_live = live_[0].log_prob;
    // Enough hypotheses have finished, and the best of them is at least as good as the best live one is now.
    if (n_ended_ >= options_.beam && finished_[0].score >= normalized(best_live, length_)) return true;
    // Otherwise, done if no live hypothesis can still beat the last of the n_best, because log-probabilities only fall.
    return int(finished_.size()) == options_.n_best && finished_.back().score >= normalized(best_live, limit_);
}

bool Search::extend(const Continuation* best, int n) {
    next_.clear();
    for (int i = 0; i < n && int(next_.size()) < options_.beam; i++) {
        const Continuation& c = best[i];
        if (!(c.log_prob > -HUGE_VALF)) continue;  // NaN too
        const int node = live_[c.parent].node;
        if (c.token == options_.eos) {
            if (i >= options_.beam) continue;  // only the `beam` best continuations may finish
            n_ended_++;
            finish(c.log_prob, node, length_ + 1, true);
        } else {
            const Live& live = live_[c.parent];
            next_.push_back({counted(c), c.parent, c.token, int(history_.size()), 0, missing_after(live, c.token), state_after(live, c.token)});
            history_.push_back({node, c.token});
        }
    }
    length_++;
    live_.swap(next_);
    if (is_done()) return true;
    if (length_ < limit_) return false;
    for (const Live& live : live_) {
        if (int(finished_.size()) == options_.n_best) break;
        finish(live.log_prob, live.node, length_, false);
    }
    return true;
}

bool Search::extend_samples(const Continuation* drawn) {
    next_.clear();
    for (int i = 0, n = n_draws(); i < n; i++) {
        const Continuation& c = drawn[i];
        const bool ends = c.token == options_.eos;
        int node = live_[c.parent].node;
        if (!ends) {
            history_.push_back({node, c.token});
            node = int(history_.size()) - 1;
        }
        if (ends || length_ + 1 == limit_) {
            std::vector<int32_t> ids = path_to(node);
            std::vector<float> attention = attention_to(node, ids.size());
            finished_[draw_sample(i)] = {counted(c), counted(c) / float(length_ + 1), ends, std::move(ids), std::move(attention)};
            continue;
        }
        const Live& live = live_[c.parent];
        next_.push_back({counted(c), c.parent, c.token, node, draw_sample(i), missing_after(live, c.token), state_after(live, c.token)});
    }
    length_++;
    live_.swap(next_);
    return live_.empty();
}

// The final result is the best finished hypothesis so far, or it continues a live one. The tokens that all of these share are certain.
std::vector<int32_t> Search::certain_tokens(int first) const {
    if (live_.empty()) return {};
    std::vector<int> nodes;
    for (const Live& live : live_) nodes.push_back(live.node);
    while (std::adjacent_find(nodes.begin(), nodes.end(), std::not_equal_to<int>()) != nodes.end())
        for (int& node : nodes) node = history_[node].before;  // all have the same number of tokens
    std::vector<int32_t> shared = path_to(nodes[0]);
    if (!options_.sampled && !finished_.empty()) {
        const std::vector<int32_t>& best = finished_[0].ids;
        const size_t most = std::min(shared.size(), best.size());
        shared.resize(std::mismatch(shared.begin(), shared.begin() + most, best.begin()).first - shared.begin());
    }
    shared.erase(shared.begin(), shared.begin() + std::min(shared.size(), size_t(first)));
    return shared;
}

}  // namespace transduce
