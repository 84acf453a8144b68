// Log-probabilities of given outputs: all target positions of a sentence in one pass.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "network.h"

namespace transduce {

// Pairs of a source (empty in a model without an encoder) and the `inputs` that the decoder reads. Item i of each list begins at offset i.
struct Pairs : transduce_pairs {
    Pairs(const transduce_pairs& pairs) : transduce_pairs(pairs) {}
    int source_length(int64_t i) const { return sources ? int(source_offsets[i + 1] - source_offsets[i]) : 0; }
    int length(int64_t i) const { return int(offsets[i + 1] - offsets[i]); }
    Source source(int64_t i) const { return {sources ? sources + source_offsets[i] : nullptr, source_length(i)}; }
    Source target(int64_t i) const { return {inputs + offsets[i], length(i)}; }
};

// Safe to call from several threads.
class Scorer {
public:
    explicit Scorer(const Model& model) : model_(model) {}

    // The log-probability of each of `tokens`: of what follows it (-1: nothing, 0). `heads`: of cross-attention, whose
    // weights [heads, inputs, sources] of each pair, one pair behind another, go to `weights`.
    void score(const Pairs& pairs, float* log_probs, const std::vector<Head>& heads, float* weights);

private:
    std::unique_ptr<Network> take();
    const Model& model_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Network>> idle_;  // their memory is allocated once
};

}  // namespace transduce
