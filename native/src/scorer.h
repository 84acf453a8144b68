// Log-probabilities of given outputs: all target positions of a sentence in one pass.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "network.h"

namespace transduce {

// Pairs of a source (empty in a model without an encoder) and the `inputs` that the decoder reads. Item i of each list begins at offset i.
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

    // Computes the log-probability of `tokens`: for each input, the token that follows it, or -1, which scores 0. `heads`: heads of
    // cross-attention. Their weights, [heads, inputs, sources] for each pair, are written to `weights`, pair after pair.
    void score(const Pairs& pairs, const int32_t* tokens, float* log_probs, const std::vector<Head>& heads, float* weights);

private:
    std::unique_ptr<Network> take();
    const Model& model_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Network>> idle_;  // their memory is allocated once
};

}  // namespace transduce
