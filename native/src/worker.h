// The sentences that one thread decodes at a time, with their hypotheses and their memory.
//
// All live hypotheses of all its sentences advance by one token per step, whatever their options. A sentence's result depends on
// the sentence, the model and the options only.
#pragma once

#include <memory>
#include <vector>

#include "model.h"
#include "network.h"
#include "request.h"

namespace transduce {

class Worker {
public:
    struct Slot {
        std::shared_ptr<Request> request;
        Search search;
        Sentence state;
        bool done = false;             // the search has ended: its results are final
        std::vector<int32_t> certain;  // tokens of a streaming request that became certain in this step
        int n_certain = 0;             // number of all certain tokens
        bool attended = false;         // whether the attention of the guided head is kept with the tokens
        std::vector<float> attention;  // attention of this step: [rows, source]
    };

    explicit Worker(const Model& model) : model_(model), start_{model.config.start} {}

    bool empty() const { return active_.empty(); }
    size_t n_sentences() const { return active_.size(); }
    int n_rows() const { return int(tokens_.size()); }  // rows of the last step
    // Whether there is room for several sentences, of which `first` is the first. Encoding several sentences at once is cheaper.
    bool wants_more(const Request& first) const;
    // Whether the request has a smaller `order` than a sentence that is being decoded.
    bool passes(const Request& request) const;
    // Whether there is room for this sentence.
    bool fits(const Request& request) const;
    void add(std::shared_ptr<Request> request);

    // Advances all sentences by one token. After an exception, call `give_up`.
    void step();
    // Calls `look` with each slot, then removes the sentences that have ended.
    template <class Look>
    void after_step(Look look) {
        size_t kept = 0;
        for (Slot* slot : active_) {
            look(*slot);
            slot->request->ended ? release(*slot) : void(active_[kept++] = slot);
        }
        active_.resize(kept);
        n_started_ = kept;
        if (!kept) load_ = 0;  // remove rounding errors
    }
    // Calls `look` with each slot, then removes all sentences and frees all memory.
    template <class Look>
    void give_up(Look look) {
        for (Slot* slot : active_) look(*slot);
        active_.clear(), free_.clear(), slots_.clear(), tokens_.clear();
        network_.reset();
        n_started_ = 0, load_ = 0;
    }

private:
    double share_of(const Request& request) const;
    bool holds_up(const Request& request) const;
    void release(Slot& slot);
    void start_new();
    void gather_rows();
    bool extend(Slot& slot, const RowBest* best);
    void draw_samples();
    bool extend_samples(Slot& slot, const Draw* draws, const RowBest* best);

    const Model& model_;
    const std::vector<int32_t> start_;  // the prompt of a model with an encoder
    std::unique_ptr<Network> network_;
    std::vector<std::unique_ptr<Slot>> slots_;
    std::vector<Slot*> free_, active_;
    size_t n_started_ = 0;  // number of sentences that have started: the first sentences of active_
    double load_ = 0;       // share of the worker's room that is used
    std::vector<Source> sources_;
    std::vector<Sentence*> states_;
    std::vector<int32_t> tokens_, forced_;  // for each row
    std::vector<std::vector<int32_t>> banned_;  // for each row, see Search::banned_tokens
    bool any_forced_ = false, any_banned_ = false;
    std::vector<BestWanted> wanted_;
    std::vector<Continuation> continuations_;
    std::vector<Draw> draws_;
};

}  // namespace transduce
