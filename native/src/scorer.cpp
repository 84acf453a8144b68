#include "scorer.h"

#include <algorithm>
#include <cmath>

#include "denormals.h"

namespace transduce {
namespace {

constexpr int kTokensAtOnce = 512;  // of sources and targets, in one pass

}  // namespace

std::unique_ptr<Network> Scorer::take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Network>(model_);
    std::unique_ptr<Network> network = std::move(idle_.back());
    idle_.pop_back();
    return network;
}

void Scorer::score(const Pairs& pairs, const int32_t* tokens, float* log_probs, const std::vector<Head>& heads, float* weights) {
    const FlushDenormals flush;
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
        for (int i = 0; i < n; i++) states[i] = &sentences[i];
        network->start(sources.data(), states.data(), n);
        network->read(targets.data(), states.data(), n, heads, weights);
        const RowBest* rest = network->best_tokens({{rows, 1, true}}, tokens);
        for (int r = 0; r < rows; r++, tokens++) *log_probs++ = *tokens < 0 ? 0 : rest[r].forced - log_sum_exp(rest[r]);
        for (Sentence* state : states) network->forget(*state);
        if (weights)
            for (int i = 0; i < n; i++) weights += heads.size() * sources[i].n * size_t(targets[i].n);
    }
    model_.kernels.release();
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(network));
}

// The weights of one head, from the queries of this layer and the keys that `encode` has left in memory_; queries have a factor
// of log2(e).
void Network::capture(Sentence* const* sentences, int n, int layer) {
    const int head_width = model_.heads.head_width, groups = model_.heads.heads / model_.heads.kv_heads;
    float* to = captured_;
    size_t source = 0, row = 0;
    for (int i = 0; i < n; i++) {
        const int rows = int(sentences[i]->places.size()), n_keys = sentences[i]->n_source;
        for (const Head& head : *heads_wanted_) {
            const size_t key_at = size_t(2 * layer) * model_.key_width + head.head / groups * head_width;
            for (int r = 0; r < rows; r++, to += n_keys) {
                if (head.layer != layer) continue;
                const float* query = wide_.data() + (row + r) * wide_stride_ + head.head * head_width;
                double sum = 0;
                float largest = -HUGE_VALF;
                for (int k = 0; k < n_keys; k++) {
                    const float* key = memory_.data() + (source + k) * memory_stride_ + key_at;
                    float score = 0;
                    for (int c = 0; c < head_width; c++) score += query[c] * key[c];
                    to[k] = score, largest = std::max(largest, score);
                }
                for (int k = 0; k < n_keys; k++) sum += double(to[k] = std::exp2(to[k] - largest));
                for (int k = 0; k < n_keys; k++) to[k] = float(double(to[k]) / sum);
            }
        }
        source += n_keys, row += rows;
    }
}

}  // namespace transduce
