// Greedy and beam search for one sentence: its live and finished hypotheses, and the decision when to stop. The network is not part of it. The
// rules are those of transduce/decoding/search.py.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "transduce_native.h"

namespace transduce {

struct SearchOptions {
    int beam = 1, n_best = 1;
    float length_penalty = 1;
    bool scores = true;  // whether log-probabilities are computed; false only for greedy search
    bool sampled = false;  // whether to draw `n_best` samples instead of searching; `beam` is then their number too
    int no_repeat_ngram = 0;  // no n-gram of this length occurs twice, except in a prefix; 0: off
    int32_t n_tokens = 0, eos = 0;  // size of the vocabulary, and the token that ends an output
    int32_t placeholder = -1;  // the first of `kPlaceholders` ids that stand for parts of the source to copy; -1: none
};

constexpr int kPlaceholders = 8;
// Minimum log-probability of a missing placeholder, relative to the log-probability of the end of the sentence.
constexpr float kMisplaced = -4.6051702f;  // log(0.01)

// A live hypothesis, given by its row `parent`, extended by one token.
struct Continuation {
    float log_prob;
    int parent;
    int32_t token;
};

using Spelling = std::vector<transduce_spelling>;  // ordered by state and token; see transduce_sentences

struct Finished {
    float log_prob, score;
    bool finished;  // false: cut off at the limit
    std::vector<int32_t> ids;
    std::vector<float> attention;  // [ids, width], see `Search::take_attention`; zeros for the last token of a cut-off hypothesis, which was not read
};

// Returns the number of occurrences of a token that `copies` (see transduce_sentences) requires.
inline uint64_t count_of(uint64_t copies, int32_t token, int32_t placeholder) {
    const int i = token - placeholder;
    return placeholder >= 0 && 0 <= i && i < kPlaceholders ? copies >> 8 * i & 255 : 0;
}

class Search {
public:
    // Starts a new search with one live hypothesis without tokens. Every hypothesis continues `prompt`, whose last token is read first, and
    // starts with `prefix`, followed by tokens that `spelling` allows. These three must outlive the search. Every hypothesis that ends contains
    // the placeholders that `copies` requires (see transduce_sentences). The log-probabilities of the first `n_unscored` tokens of the prefix do
    // not count.
    void start(const SearchOptions& options, int limit, const std::vector<int32_t>& prompt, const std::vector<int32_t>& prefix,
               const Spelling& spelling, uint64_t copies, int n_unscored);

    int n_live() const { return int(live_.size()); }
    int length() const { return length_; }
    int32_t last_token(int row) const { return live_[row].token; }
    float log_prob(int row) const { return live_[row].log_prob; }
    // The row of the previous step that this row continues.
    int parent(int row) const { return live_[row].parent; }
    // The number of copies of each placeholder that this row still needs and that may come next, in 8 bits each.
    uint64_t missing(int row) const { return is_spelling(live_[row]) ? 0 : live_[row].missing; }
    // The next token of the prefix; -1 if the prefix is complete.
    int32_t forced_token() const { return length_ < int(prefix_->size()) ? (*prefix_)[length_] : -1; }

    // Stores the attention weights of this step, `width` numbers for each live hypothesis. Call this before `extend`.
    void take_attention(const float* rows, int width);

    // Fills `tokens` with the tokens that must not come next in this row: `never`, except missing placeholders; the end of the sentence while a
    // placeholder is missing; and tokens that would repeat an n-gram. While a row spells the last word of a prefix, the result is all tokens
    // that its state does not allow. `tokens` stays empty if the result equals `never`, or if a token is forced.
    void banned_tokens(int row, const std::vector<int32_t>& never, std::vector<int32_t>& tokens) const;

    // Extends the live hypotheses by their best continuations, given best first. There must be 2 * beam continuations, or one if the beam is 1 or
    // inside a prefix, or as many as exist. Returns true when the search is done.
    bool extend(const Continuation* best, int n);

    // Sampling: the number of draws in the next step, one for each sample that has not ended, and the row and the sample of a draw. In the first
    // step all samples have the same row.
    int n_draws() const { return length_ ? n_live() : options_.n_best; }
    int draw_row(int draw) const { return length_ ? draw : 0; }
    int draw_sample(int draw) const { return length_ ? live_[draw].sample : draw; }
    // Extends the samples by the drawn tokens, one for each draw. Returns true when all samples have ended.
    bool extend_samples(const Continuation* drawn);

    const std::vector<Finished>& results() const { return finished_; }
    // The tokens, from index `first` on, with which the best result will start in any case.
    std::vector<int32_t> certain_tokens(int first) const;

private:
    struct Live {
        float log_prob;
        int parent;
        int32_t token;
        int node;  // index of the last token in `history_`; -1: none
        int sample = 0;
        uint64_t missing = 0;  // copies of placeholders that the hypothesis still lacks
        int32_t state = 0;     // state of the spelling
    };
    struct Node {
        int before;
        int32_t token;
    };
    std::pair<Spelling::const_iterator, Spelling::const_iterator> steps_of(const Live& live) const;
    bool is_spelling(const Live& live) const;
    int32_t state_after(const Live& live, int32_t token) const;
    uint64_t missing_after(const Live& live, int32_t token) const;
    void repeating_tokens(int row, std::vector<int32_t>& tokens) const;
    void finish(float log_prob, int node, int length, bool finished);
    bool is_done() const;
    float normalized(float log_prob, int length) const;
    float counted(const Continuation& c) const { return length_ < n_unscored_ ? 0 : c.log_prob; }
    std::vector<int32_t> path_to(int node) const;
    std::vector<float> attention_to(int node, size_t n_tokens) const;

    SearchOptions options_;
    const std::vector<int32_t>*prompt_ = nullptr, *prefix_ = nullptr;
    const Spelling* spelling_ = nullptr;
    int limit_ = 0, length_ = 0, n_ended_ = 0, n_unscored_ = 0;
    std::vector<Live> live_, next_;
    std::vector<Node> history_;
    std::vector<float> attention_;  // [nodes of tokens that were read, width]
    size_t width_ = 0;
    std::vector<Finished> finished_;  // best first; cut-off hypotheses come after all others
};

}  // namespace transduce
