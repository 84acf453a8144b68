// Log-probabilities of given outputs: all target positions of a sentence in one pass.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "network.h"

namespace transduce {

// Pairs of a source (empty in a model without an encoder) and a target, which the model reads as `inputs`: item i of each from
// offset i on.
struct Pairs {
    const int32_t* sources = nullptr;
    const int64_t* source_offsets = nullptr;
    const int32_t* inputs = nullptr;
    const int64_t* offsets = nullptr;
    int64_t n = 0;

    int source_length(int64_t i) const { return sources ? int(source_offsets[i + 1] - source_offsets[i]) : 0; }
    int length(int64_t i) const { return int(offsets[i + 1] - offsets[i]); }
    Source source(int64_t i) const { return {sources ? sources + source_offsets[i] : nullptr, source_length(i)}; }
    Source target(int64_t i) const { return {inputs + offsets[i], length(i)}; }
};

// Safe to call from several threads.
class Scorer {
public:
    explicit Scorer(const Model& model) : model_(model) {}

    // The log-probability of `tokens`, one for each input: of what follows it (-1: nothing, 0). `heads`: of cross-attention, whose
    // weights [heads, inputs, sources] of each pair, one pair behind another, go to `weights`.
    void score(const Pairs& pairs, const int32_t* tokens, float* log_probs, const std::vector<Head>& heads, float* weights);

private:
    std::unique_ptr<Network> take();
    const Model& model_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Network>> idle_;  // their memory is allocated once
};

}  // namespace transduce
