#include "engine.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "network.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace transduce {
namespace {

// Denormal numbers, which do not matter here, cost a hundred cycles each: they count as zero while this lives.
class FlushDenormals {
public:
#if defined(__SSE2__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }

private:
    unsigned before_;
#endif
};

// Rows that a thread decodes at once: enough to use each weight often, few enough for the caches to hold their keys and values.
// Measured with d_model 128 and 512.
int best_rows(const Model& model, int beam) {
    const bool large = model.width >= 256;  // weights that do not fit into the L2 cache
    int rows = 96;
    if (model.precision == Precision::bf16x3) rows = large ? 192 : 64;
    if (model.precision == Precision::int8) rows = large ? 128 : 64;
    return beam == 1 ? rows : std::max(rows, 120);
}

constexpr int kTokensAtOnce = 256;  // source tokens that are encoded together

}  // namespace

// One thread's sentences in progress.
class Worker {
public:
    explicit Worker(const Model& model) : model_(model), network_(model) {}

    void run(Job& job) {
        job_ = &job;
        const int slots = std::max(1, best_rows(model_, job.options.beam) / job.options.beam);
        const int refill = std::max(1, slots / 6);  // encoding a few sentences at once is cheaper
        bool more = true;
        while (!job.cancelled.load(std::memory_order_relaxed)) {
            const int free = slots - int(active_.size());
            if (more && (active_.empty() || free >= refill)) more = admit(free);
            if (active_.empty()) break;
            step();
        }
        for (Slot* slot : active_) release(*slot);
        active_.clear();
    }

private:
    struct Slot {
        int64_t sentence;
        Search search;
        Sentence state;
    };

    // Takes up to `most` sentences from the job; false if it has none left.
    bool admit(int most) {
        job_->take(most, kTokensAtOnce, taken_);
        sources_.clear(), states_.clear();
        for (const int64_t i : taken_) {
            if (free_.empty()) {
                slots_.push_back(std::make_unique<Slot>());
                free_.push_back(slots_.back().get());
            }
            Slot& slot = *free_.back();
            free_.pop_back();
            slot.sentence = i;
            const int32_t* ids = &job_->ids[job_->offsets[i]];
            const bool prompt = model_.config.decoder_only;  // the last token of a prompt is read in the first step
            slot.search.start(job_->options, job_->limits[i], prompt ? ids[job_->length(i) - 1] : model_.config.bos);
            active_.push_back(&slot);
            sources_.push_back({ids, job_->length(i) - prompt});
            states_.push_back(&slot.state);
        }
        if (taken_.empty()) return false;
        network_.start(sources_.data(), states_.data(), int(taken_.size()));
        return true;
    }

    void step() {
        states_.clear(), tokens_.clear();
        for (Slot* slot : active_) {
            states_.push_back(&slot->state);
            for (int r = 0; r < slot->search.n_live(); r++) tokens_.push_back(slot->search.last_token(r));
        }
        const int beam = job_->options.beam, k = std::min(beam == 1 ? 1 : 2 * beam, model_.config.n_tgt);
        const bool scores = job_->options.scores || beam > 1;
        network_.step(states_.data(), int(states_.size()), tokens_);
        const int rows = int(tokens_.size());
        const RowBest* best = model_.screened && !scores ? network_.best_tokens_screened(rows) : network_.best_tokens(rows, k, scores);
        size_t kept = 0;
        for (Slot* slot : active_) {
            const int live = slot->search.n_live();
            if (extend(*slot, best, k, scores)) {
                job_->results[slot->sentence] = slot->search.results();
                release(*slot);
            } else {
                active_[kept++] = slot;
            }
            best += live;
        }
        active_.resize(kept);
    }

    // Extends the hypotheses of a sentence by the best of their continuations; true when it is done.
    bool extend(Slot& slot, const RowBest* best, int k, bool scores) {
        const int rows = slot.search.n_live();
        continuations_.clear();
        for (int r = 0; r < rows; r++) {
            const float before = slot.search.log_prob(r), total = scores ? log_sum_exp(best[r]) : 0;
            for (int i = 0; i < best[r].n; i++) {
                const float logit = best[r].values[i];
                if (!(logit > kNever / 2)) break;  // padding, or a token that is never chosen
                continuations_.push_back({scores ? before + (logit - total) : 0, r, best[r].ids[i]});
            }
        }
        const size_t n = std::min(continuations_.size(), size_t(k));
        if (rows > 1) {
            std::partial_sort(continuations_.begin(), continuations_.begin() + n, continuations_.end(), [](const auto& a, const auto& b) {
                if (a.log_prob != b.log_prob) return a.log_prob > b.log_prob;
                return a.parent != b.parent ? a.parent < b.parent : a.token < b.token;
            });
        }
        if (slot.search.extend(continuations_.data(), int(n))) return true;
        if (job_->options.beam > 1) slot.state.reorder(slot.search.n_live(), [&](int r) { return slot.search.parent(r); });
        return false;
    }

    void release(Slot& slot) {
        network_.forget(slot.state);
        free_.push_back(&slot);
    }

    const Model& model_;
    Network network_;
    Job* job_ = nullptr;
    std::vector<std::unique_ptr<Slot>> slots_;
    std::vector<Slot*> free_, active_;
    std::vector<int64_t> taken_;
    std::vector<Source> sources_;
    std::vector<Sentence*> states_;
    std::vector<int32_t> tokens_;
    std::vector<Continuation> continuations_;
};

WorkerPool::WorkerPool() = default;
WorkerPool::~WorkerPool() = default;

std::unique_ptr<Worker> WorkerPool::take(const Model& model) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!workers_.empty()) {
            std::unique_ptr<Worker> worker = std::move(workers_.back());
            workers_.pop_back();
            return worker;
        }
    }
    return std::make_unique<Worker>(model);
}

void WorkerPool::put_back(std::unique_ptr<Worker> worker) {
    const std::lock_guard<std::mutex> lock(mutex_);
    workers_.push_back(std::move(worker));
}

void Job::plan() {
    order_.resize(limits.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [this](int64_t a, int64_t b) { return length(a) > length(b); });
    results.resize(limits.size());
}

void Job::take(int most, int tokens, std::vector<int64_t>& sentences) {
    sentences.clear();
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t left = int64_t(order_.size() - next_), share = (left + n_threads - 1) / n_threads;  // each thread gets some
    int taken = 0;
    while (next_ < order_.size() && int64_t(sentences.size()) < std::min<int64_t>(most, share)) {
        const int n = length(order_[next_]);
        if (taken && taken + n > tokens) break;
        taken += n;
        sentences.push_back(order_[next_++]);
    }
}

void Job::run() {
    const FlushDenormals flush;
    std::unique_ptr<Worker> worker = pool->take(*model);
    worker->run(*this);
    model->kernels.release();
    pool->put_back(std::move(worker));
}

}  // namespace transduce
