// Greedy and beam search of one sentence: which hypotheses live, which have finished, and when to stop. Knows nothing of the
// network. The rules are those of transduce/decoding/search.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace transduce {

struct SearchOptions {
    int beam = 1, n_best = 1;
    float length_penalty = 1;
    bool scores = true;  // false (greedy only): log-probabilities are not known
    bool sampled = false;  // `n_best` samples instead, in their order; the beam is their number
    int no_repeat_ngram = 0;  // no n-gram of this length occurs twice, except in a prefix; 0: off
    int32_t n_tokens = 0, eos = 0;  // n_tokens: of the vocabulary
    int32_t placeholder = -1;  // the first of `kPlaceholders` ids that stand for parts to copy; -1: none
};

constexpr int kPlaceholders = 8;
// Logarithm of the probability of a placeholder where a model would end, as a fraction of the end's.
constexpr float kMisplaced = -4.6051702f;  // log(0.01)

// A live hypothesis (its row, `parent`) with one more token.
struct Continuation {
    float log_prob;
    int parent;
    int32_t token;
};

// A token that may come in a state, and the higher state that it leads to; see transduce_sentences.
struct SpellingStep {
    int32_t state, token, next;
};
using Spelling = std::vector<SpellingStep>;  // ordered by state and token

struct Finished {
    float log_prob, score;
    bool finished;  // false: cut off at the limit
    std::vector<int32_t> ids;
    std::vector<float> attention;  // [ids, width] of `Search::take_attention`; the last token of what was cut off was not read: zeros
};

// How often a token occurs in `copies` of transduce_sentences.
inline uint64_t count_of(uint64_t copies, int32_t token, int32_t placeholder) {
    const int i = token - placeholder;
    return placeholder >= 0 && 0 <= i && i < kPlaceholders ? copies >> 8 * i & 255 : 0;
}

class Search {
public:
    // Forgets everything; one live hypothesis without tokens. Every hypothesis continues `prompt`, whose last token is read first, and
    // starts with `prefix` and tokens of `spelling`. All three must outlive the search. Every hypothesis that ends has the `copies` of
    // transduce_sentences. The log-probabilities of the first `n_unscored` tokens of the prefix do not count.
    void start(const SearchOptions& options, int limit, const std::vector<int32_t>& prompt, const std::vector<int32_t>& prefix,
               const Spelling& spelling, uint64_t copies, int n_unscored);

    int n_live() const { return int(live_.size()); }
    int length() const { return length_; }
    int32_t last_token(int row) const { return live_[row].token; }
    float log_prob(int row) const { return live_[row].log_prob; }
    // The row before the last step that this row continues.
    int parent(int row) const { return live_[row].parent; }
    // The placeholders that this row still needs and that may come now: 8 bits for each.
    uint64_t missing(int row) const { return is_spelling(live_[row]) ? 0 : live_[row].missing; }
    // The token of the prefix that comes next; -1: the prefix is complete.
    int32_t forced_token() const { return length_ < int(prefix_->size()) ? (*prefix_)[length_] : -1; }

    // Keeps rows of `width` numbers, one for each live hypothesis, with the tokens that were read in this step; before `extend`.
    void take_attention(const float* rows, int width);

    // The tokens that must not follow in this row: `never`, except placeholders that are missing; the end while one is missing; and those
    // after which an n-gram would occur a second time. While it spells, all but the tokens of its state. Stays empty if it is `never`, and
    // where a token is forced.
    void banned_tokens(int row, const std::vector<int32_t>& never, std::vector<int32_t>& tokens) const;

    // Extends the live hypotheses by the best of all their continuations, best first: 2 * beam of them or, for a beam of 1 or in a
    // prefix, one; fewer if there are no more. True when the search is done.
    bool extend(const Continuation* best, int n);

    // Sampling: what is drawn next, for each sample that has not ended; all samples begin with the same row.
    int n_draws() const { return length_ ? n_live() : options_.n_best; }
    int draw_row(int draw) const { return length_ ? draw : 0; }
    int draw_sample(int draw) const { return length_ ? live_[draw].sample : draw; }
    // Extends the samples by the tokens that were drawn, one for each draw. True when all have ended.
    bool extend_samples(const Continuation* drawn);

    const std::vector<Finished>& results() const { return finished_; }
    // The tokens from number `first` on that the best result will start with, whatever comes.
    std::vector<int32_t> certain_tokens(int first) const;

private:
    struct Live {
        float log_prob;
        int parent;
        int32_t token;
        int node;  // of the last token, in `history_`; -1: none
        int sample = 0;
        uint64_t missing = 0;  // what is left of the copies
        int32_t state = 0;     // of the spelling
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
    std::vector<Finished> finished_;  // best first, those that were cut off after all others
};

}  // namespace transduce
