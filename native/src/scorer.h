// Computes the log-probabilities of given outputs, with all target positions of a sentence in one pass.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "network.h"

namespace transduce {

// Pairs of a source (empty in a model without an encoder) and the tokens that the decoder reads (`inputs`), see transduce_pairs.
struct Pairs : transduce_pairs {
    Pairs(const transduce_pairs& pairs) : transduce_pairs(pairs) {}
    int source_length(int64_t i) const { return sources ? int(source_offsets[i + 1] - source_offsets[i]) : 0; }
    int length(int64_t i) const { return int(offsets[i + 1] - offsets[i]); }
    Source source(int64_t i) const { return {sources ? sources + source_offsets[i] : nullptr, source_length(i)}; }
    Source target(int64_t i) const { return {inputs + offsets[i], length(i)}; }
};

// Several threads may use one scorer at the same time.
class Scorer {
public:
    explicit Scorer(const Model& model) : model_(model) {}

    // Writes to `log_probs`, for each input, the log-probability of the corresponding token in `tokens`; 0 if it is -1. Also writes the attention
    // weights of some cross-attention heads, [heads, inputs, sources] for each pair, one pair after another, to `weights`.
    void score(const Pairs& pairs, float* log_probs, const std::vector<Head>& heads, float* weights);

private:
    std::unique_ptr<Network> take();
    const Model& model_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Network>> idle_;  // kept, so that their memory is allocated only once
};

}  // namespace transduce
