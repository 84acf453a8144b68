// Greedy and beam search of one sentence: which hypotheses live, which have finished, and when to stop. Knows nothing of the
// network. The rules are those of transduce/decoding/search.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace transduce {

struct SearchOptions {
    int beam = 1, n_best = 1;
    float length_penalty = 1;
    bool scores = true;  // false (greedy only): log-probabilities are not known
    bool sampled = false;  // `n_best` samples instead, in their order; the beam is their number
    int no_repeat_ngram = 0;  // no n-gram of this length occurs twice, except in a prefix; 0: off
    int32_t eos = 0;
};

// A live hypothesis (its row, `parent`) with one more token.
struct Continuation {
    float log_prob;
    int parent;
    int32_t token;
};

struct Finished {
    float log_prob, score;
    bool finished;  // false: cut off at the limit
    std::vector<int32_t> ids;
    std::vector<float> attention;  // [ids, width] of `Search::take_attention`; the last token of what was cut off was not read: zeros
};

class Search {
public:
    // Forgets everything; one live hypothesis without tokens. Every hypothesis starts with `prefix` and continues `prompt`, whose
    // last token is read first. Both must outlive the search.
    void start(const SearchOptions& options, int limit, const std::vector<int32_t>& prompt, const std::vector<int32_t>& prefix);

    int n_live() const { return int(live_.size()); }
    int length() const { return length_; }
    int32_t last_token(int row) const { return live_[row].token; }
    float log_prob(int row) const { return live_[row].log_prob; }
    // The row before the last step that this row continues.
    int parent(int row) const { return live_[row].parent; }
    // The token of the prefix that comes next; -1: the prefix is complete.
    int32_t forced_token() const { return length_ < int(prefix_->size()) ? (*prefix_)[length_] : -1; }

    // Keeps rows of `width` numbers, one for each live hypothesis, with the tokens that were read in this step; before `extend`.
    void take_attention(const float* rows, int width);

    // Appends the tokens after which an n-gram of this row would occur a second time; none where a token is forced.
    void repeating_tokens(int row, std::vector<int32_t>& tokens) const;

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
    };
    struct Node {
        int before;
        int32_t token;
    };
    void finish(float log_prob, int node, bool finished);
    bool is_done() const;
    float normalized(float log_prob, int length) const;
    std::vector<int32_t> path_to(int node) const;
    std::vector<float> attention_to(int node, size_t n_tokens) const;

    SearchOptions options_;
    const std::vector<int32_t>*prompt_ = nullptr, *prefix_ = nullptr;
    int limit_ = 0, length_ = 0, n_ended_ = 0;
    std::vector<Live> live_, next_;
    std::vector<Node> history_;
    std::vector<float> attention_;  // [nodes of tokens that were read, width]
    size_t width_ = 0;
    std::vector<Finished> finished_;  // best first, those that were cut off after all others
};

}  // namespace transduce
