#include "scorer.h"

#include <algorithm>
#include <cmath>

#include "denormals.h"

namespace transduce {
namespace {

constexpr int kTokensAtOnce = 512;  // most tokens of sources and targets in one pass

}  // namespace

std::unique_ptr<Network> Scorer::take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Network>(model_);
    std::unique_ptr<Network> network = std::move(idle_.back());
    idle_.pop_back();
    return network;
}

void Scorer::score(const Pairs& pairs, float* log_probs, const std::vector<Head>& heads, float* weights) {
    const FlushDenormals flush;
    const int32_t* tokens = pairs.tokens;
    std::unique_ptr<Network> network = take();
    std::vector<Sentence> sentences;
    std::vector<Sentence*> states;
    std::vector<Source> sources, targets;
    for (int64_t first = 0, last = 0; first < pairs.n; first = last) {
        int rows = 0, n_tokens = 0;
        sources.clear(), targets.clear();
        do {
            sources.push_back(pairs.source(last)), targets.push_back(pairs.target(last));
            rows += targets.back().n, n_tokens += sources.back().n + targets.back().n;
            last++;
        } while (last < pairs.n && n_tokens + pairs.source_length(last) + pairs.length(last) <= kTokensAtOnce);
        const int n = int(sources.size());
        if (int(sentences.size()) < n) sentences.resize(n);
        states.resize(n);
        for (int i = 0; i < n; i++) {
            states[i] = &sentences[i];
            states[i]->weights = weights;
            if (weights) weights += heads.size() * sources[i].n * size_t(targets[i].n);
        }
        network->start(sources.data(), states.data(), n);
        network->read(targets.data(), states.data(), n, heads);
        const RowBest* rest = network->best_tokens({{rows, 1, true}}, tokens);
        for (int r = 0; r < rows; r++, tokens++) *log_probs++ = *tokens < 0 ? 0 : rest[r].forced - log_sum_exp(rest[r]);
        for (Sentence* state : states) network->forget(*state);
    }
    model_.kernels.release();
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(network));
}

}  // namespace transduce
