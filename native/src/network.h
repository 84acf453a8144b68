// Computes forward passes in one thread: the encoder for whole sentences, then the decoder for the live hypotheses of many sentences, one token
// at a time.
#pragma once

#include <vector>

#include "cache.h"
#include "model.h"
#include "positions.h"
#include "sampler.h"

namespace transduce {

// The state of a sentence in the network.
struct Sentence {
    std::vector<char*> memory_blocks, blocks;  // blocks with the keys and values of the source, and of the hypotheses
    std::vector<uint16_t> memory_mask;
    int n_source = 0;
    Ancestors ancestors;
    RecurrentStates states;
    std::vector<int> places;             // places (see Ancestors) of the tokens of this pass
    std::vector<const uint16_t*> masks;  // for each token of this pass, the places to which it attends
    std::vector<const float*> biases;    // for each token of this pass, its biases in the layout of AttentionCall
    size_t bias_stride = 0;
    std::vector<int> positions;          // position of the token in each place
    std::vector<float> place_biases;     // memory for the biases of a step's tokens; keys are in the order of places, not of positions
    float* weights = nullptr;            // receives the attention of the requested heads, [heads, tokens of this pass, source]; null: not requested
    int position = 0;                    // position of the next token
    int n_rows = 1;                      // number of live hypotheses

    // Replaces all hypotheses by `rows` hypotheses; hypothesis i continues the earlier hypothesis parent(i).
    template <class Parent>
    void reorder(int rows, Parent parent) {
        n_rows = rows;
        ancestors.reorder(rows, parent);
        states.reorder(rows, parent);
    }
};

struct Source {
    const int32_t* ids;
    int n;
};

// The results to compute for some consecutive rows of a step: the `k` best tokens and, if `scores`, the sum of exponentials. A single best token
// without scores may be found by screening, see Model.
struct BestWanted {
    int rows, k;
    bool scores;
};

// A token to draw from a row of a step. `number`: a random number in [0, 1).
struct Draw {
    int row;
    const Sampling* sampling;
    double number;
    uint64_t missing;    // missing placeholders, in the form of `Search::missing`
    int32_t token = -1;  // -1: logits are not numbers
    float log_prob = 0;
};

class Network {
public:
    explicit Network(const Model& model);

    // Starts `n` sentences: encodes each source or, in a model without an encoder, reads it as the beginning of the target.
    void start(const Source* sources, Sentence* const* sentences, int n);
    // Reads all given tokens of each sentence, which must have a single hypothesis, in one pass. Rows are tokens, sentence by sentence. The
    // attention weights of `heads` are written to `weights` of each sentence.
    void read(const Source* targets, Sentence* const* sentences, int n, const std::vector<Head>& heads = {});
    // Reads the next token of each live hypothesis, tokens [rows]. Rows are hypotheses, sentence by sentence. The attention weights of the
    // model's guided head are written to `weights` of each sentence.
    void step(Sentence* const* sentences, int n, const std::vector<int32_t>& tokens);
    // After `step` or `read`: returns the best tokens of each row, valid until the next call. `forced`: for each row, a token whose logit is
    // returned too, or -1; null if no row has such a token.
    const RowBest* best_tokens(const std::vector<BestWanted>& parts, const int32_t* forced);
    // Sets a list of tokens for each row of this step that must not be chosen. An empty list stands for `never`; null: all rows have `never`.
    void ban(const std::vector<int32_t>* tokens) { banned_ = tokens; }
    // The tokens that are not chosen by default: padding, the unknown token, the start token and placeholders.
    const std::vector<int32_t>& never() const { return never_; }
    // After `step`: draws tokens, and fills in `token` and `log_prob` of each draw.
    void draw(std::vector<Draw>& draws);
    // Returns the blocks of a sentence to the pool.
    void forget(Sentence& sentence);

private:
    void reserve_rows(int rows);
    void set_biases(Sentence& sentence);
    void embed(const Stack& stack, Positions& positions, int row, int token, int position);
    const float* before_sublayer(const NormWeights& norm, int rows);
    void after_sublayer(const PackedMatrix& last, const NormWeights& norm, int rows);
    const float* after_stack(const Stack& stack, int rows);
    void project_and_rotate(const Layer& layer, int rows, Positions& positions);
    void feed_forward(const Layer& layer, int rows);
    void attend_within(const std::vector<int>& starts);
    void encode(const Source* sources, Sentence* const* sentences, int n);
    void decode(Sentence* const* sentences, int n, int rows, const std::vector<Head>& heads);
    void attend_to_history(Sentence* const* sentences, int n, int layer);
    void recur(Sentence* const* sentences, int n, int layer, int rows);
    void attend_to_memory(Sentence* const* sentences, int n, int layer, const std::vector<Head>& heads);
    void attend(const AttentionKernels& kernels, int first_row, int n_rows, int n_blocks, const Sentence* recorded = nullptr);
    void point_at(const std::vector<char*>& blocks, int layer);

    void start_best(const std::vector<BestWanted>& parts);
    static void hide_padding(const PackedMatrix& matrix, float* logits, int column, int last);
    void take_exact(int first, int rows, bool scores);
    void take_screened(int first, int rows);
    void decide(Screen& screen, int row);
    const std::vector<int32_t>& banned(int row) const;

    const Model& model_;
    const Kernels& kernels_;
    Multiplier multiplier_, screen_multiplier_;
    std::vector<Screen> screens_;
    BlockPool pool_;
    Positions source_positions_, target_positions_;
    int capacity_ = 0;  // rows
    size_t width_, heads_stride_, wide_stride_, memory_stride_;
    Buffer<float> x_, normed_, heads_, wide_, memory_;
    const float* pending_ = nullptr;  // a bias that the next norm adds to x
    const float* hidden_ = nullptr;   // hidden states of the last step
    const int32_t* forced_ = nullptr; // forced tokens of its rows
    const std::vector<int32_t>* banned_ = nullptr;
    std::vector<int32_t> never_;
    std::vector<int> row_position_;
    Buffer<char> source_keys_, source_values_;
    Buffer<float> scratch_, logits_;
    std::vector<const char*> keys_, values_;
    std::vector<const float*> queries_;
    std::vector<const uint16_t*> masks_;
    std::vector<const float*> biases_;
    size_t bias_stride_ = 0;
    std::vector<float*> outputs_;
    std::vector<uint16_t> full_mask_;
    CausalMasks causal_;
    Sampler sampler_{model_.kernels};
    Buffer<float> drawn_hidden_, drawn_logits_;
    std::vector<std::pair<int32_t, float>> raised_;  // raised tokens of the row that is being drawn
    std::vector<AttentionCall::WantedHead> wanted_;  // requested heads of this layer
    std::vector<float*> scores_;
    std::vector<RowBest> best_;
    std::vector<float> best_values_;
    std::vector<int32_t> best_ids_;
};

}  // namespace transduce
