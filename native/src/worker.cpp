#include "worker.h"

#include <algorithm>
#include <cmath>

namespace transduce {
namespace {

// Rows that a thread decodes at once: enough to use each weight often, few enough for the caches to hold their keys and values.
// Measured with d_model 128 and 512.
int best_rows(const Model& model, int beam) {
    const bool large = model.width >= 256;  // weights that do not fit into the L2 cache
    int rows = 96;
    if (model.precision == Precision::bf16x3) rows = large ? 192 : 64;
    if (model.precision == Precision::int8) rows = large ? 128 : 64;
    return beam == 1 ? rows : std::max(rows, 120);
}

constexpr double kRefill = 1.0 / 6;  // the fraction that must be free before sentences are added
constexpr double kCrowded = 2;       // the most load with sentences that pass others
constexpr size_t kLong = 512;        // tokens of a source; while a longer one is encoded, others wait for too long
constexpr double kRounding = 1e-9;
constexpr double kMostWeights = 1 << 24;  // most attention weights kept with the tokens of a search: 64 MiB

// The number of best continuations that each row needs. Samples need none, except for the logit of a forced token.
int n_best_tokens(const SearchOptions& options, const Model& model, bool forced) {
    if (options.sampled) return forced;
    return options.beam == 1 ? 1 : std::min(2 * options.beam, model.config.n_tgt);
}

bool same_wish(const BestWanted& part, int k, bool scores) { return part.k == k && part.scores == scores; }

}  // namespace

// The fraction of a thread's rows that a sentence takes.
double Worker::share_of(const Request& request) const {
    const int beam = request.options.beam;
    return 1.0 / std::max(1, best_rows(model_, beam) / beam);
}

bool Worker::passes(const Request& request) const {
    return std::any_of(active_.begin(), active_.end(), [&](const Slot* slot) { return request.order < slot->request->order; });
}

// Whether the source is long to encode and would delay a short sentence that is being decoded and precedes it.
bool Worker::holds_up(const Request& request) const {
    return request.ids.size() > kLong && std::any_of(active_.begin(), active_.end(), [&](const Slot* slot) {
        return slot->request->ids.size() <= kLong && slot->request->order < request.order;
    });
}

bool Worker::wants_more(const Request& first) const { return active_.empty() || load_ <= 1 - kRefill + kRounding || passes(first); }

bool Worker::fits(const Request& request) const {
    if (active_.empty()) return true;
    if (holds_up(request)) return false;
    return load_ + share_of(request) <= (passes(request) ? kCrowded : 1) + kRounding;
}

void Worker::add(std::shared_ptr<Request> request) {
    if (free_.empty()) {
        slots_.push_back(std::make_unique<Slot>());
        free_.push_back(slots_.back().get());
    }
    Slot& slot = *free_.back();
    active_.push_back(&slot);
    free_.pop_back();
    slot.request = std::move(request);
    slot.done = false, slot.certain.clear(), slot.n_certain = 0;
    load_ += share_of(*slot.request);
}

void Worker::release(Slot& slot) {
    network_->forget(slot.state);
    load_ -= share_of(*slot.request);
    slot.request.reset();
    free_.push_back(&slot);
}

void Worker::start_new() {
    sources_.clear(), states_.clear();
    for (size_t i = n_started_; i < active_.size(); i++) {
        Slot& slot = *active_[i];
        const Request& request = *slot.request;
        const bool prompt = model_.config.decoder_only;  // the last token of a prompt is read in the first step
        slot.search.start(request.options, request.limit, prompt ? request.ids : start_, request.prefix, request.spelling, request.copies, request.n_unscored);
        slot.attended = !model_.guided.empty() && double(request.options.beam) * request.limit * request.ids.size() <= kMostWeights;
        sources_.push_back({request.ids.data(), int(request.ids.size()) - prompt});
        states_.push_back(&slot.state);
    }
    network_->start(sources_.data(), states_.data(), int(sources_.size()));
    // Make rows that need equal results from the vocabulary adjacent.
    std::stable_sort(active_.begin(), active_.end(), [](const Slot* a, const Slot* b) {
        const SearchOptions &x = a->request->options, &y = b->request->options;
        return x.beam != y.beam ? x.beam < y.beam : x.scores < y.scores;
    });
}

// Fills in the rows of this step.
void Worker::gather_rows() {
    states_.clear(), tokens_.clear(), forced_.clear(), wanted_.clear(), banned_.clear();
    any_forced_ = any_banned_ = false;
    for (Slot* slot : active_) {
        const Search& search = slot->search;
        const SearchOptions& options = slot->request->options;
        const int rows = search.n_live();
        const int32_t forced = search.forced_token();
        const int k = n_best_tokens(options, model_, forced >= 0);
        if (slot->attended) slot->attention.resize(size_t(rows) * slot->state.n_source);
        slot->state.weights = slot->attended ? slot->attention.data() : nullptr;
        states_.push_back(&slot->state);
        for (int r = 0; r < rows; r++) {
            const int32_t wanted = forced < 0 && search.missing(r) ? options.eos : forced;
            any_forced_ |= wanted >= 0;
            tokens_.push_back(search.last_token(r)), forced_.push_back(wanted), banned_.emplace_back();
            search.banned_tokens(r, network_->never(), banned_.back());
            any_banned_ |= !banned_.back().empty();
        }
        if (wanted_.empty() || !same_wish(wanted_.back(), k, options.scores)) wanted_.push_back({0, k, options.scores});
        wanted_.back().rows += rows;
    }
}

void Worker::step() {
    if (!network_) network_ = std::make_unique<Network>(model_);
    if (n_started_ < active_.size()) start_new();
    gather_rows();
    network_->step(states_.data(), int(states_.size()), tokens_);
    network_->ban(any_banned_ ? banned_.data() : nullptr);
    const RowBest* best = network_->best_tokens(wanted_, any_forced_ ? forced_.data() : nullptr);
    draw_samples();
    const Draw* draws = draws_.data();
    for (Slot* slot : active_) {
        if (slot->attended) slot->search.take_attention(slot->attention.data(), slot->state.n_source);
        const int rows = slot->search.n_live();
        const int n_draws = slot->request->options.sampled ? slot->search.n_draws() : 0;
        slot->done = n_draws ? extend_samples(*slot, draws, best) : extend(*slot, best);
        best += rows, draws += n_draws;
        if (!slot->request->stream || slot->done) continue;
        slot->certain = slot->search.certain_tokens(slot->n_certain);
        slot->n_certain += int(slot->certain.size());
    }
}

// Extends the hypotheses of a sentence by the best of their continuations; true when it is done.
bool Worker::extend(Slot& slot, const RowBest* best) {
    const SearchOptions& options = slot.request->options;
    const int rows = slot.search.n_live();
    const int32_t forced = slot.search.forced_token();
    bool added = false;
    continuations_.clear();
    for (int r = 0; r < rows; r++) {
        const float before = slot.search.log_prob(r), total = options.scores ? log_sum_exp(best[r]) : 0;
        const auto add = [&](float logit, int32_t token) {
            continuations_.push_back({options.scores ? before + (logit - total) : 0, r, token});
        };
        if (forced >= 0) {
            add(best[r].forced, forced);
            continue;
        }
        const uint64_t missing = slot.search.missing(r);
        const float least = best[r].forced + kMisplaced;  // least log-probability of a missing placeholder
        for (int i = 0; i < best[r].n; i++) {
            if (!(best[r].values[i] > kNever / 2)) break;  // padding, or a token that is never chosen
            if (!count_of(missing, best[r].ids[i], options.placeholder) || !(best[r].values[i] < least)) add(best[r].values[i], best[r].ids[i]);
        }
        for (int i = 0; missing && i < kPlaceholders; i++) {
            const int32_t id = options.placeholder + i;
            const auto likely = [&, r](int k) { return best[r].ids[k] == id && !(best[r].values[k] < least); };
            bool known = false;
            for (int k = 0; k < best[r].n; k++) known |= likely(k);
            if ((missing >> 8 * i & 255) && !known) add(least, id), added = true;
        }
    }
    const size_t n = std::min(continuations_.size(), size_t(n_best_tokens(options, model_, forced >= 0)));
    if (rows > 1 || added) {
        std::partial_sort(continuations_.begin(), continuations_.begin() + n, continuations_.end(), [](const auto& a, const auto& b) {
            if (a.log_prob != b.log_prob) return a.log_prob > b.log_prob;
            return a.parent != b.parent ? a.parent < b.parent : a.token < b.token;
        });
    }
    if (slot.search.extend(continuations_.data(), int(n))) return true;
    if (options.beam > 1) slot.state.reorder(slot.search.n_live(), [&](int r) { return slot.search.parent(r); });
    return false;
}

void Worker::draw_samples() {
    draws_.clear();
    int row = 0;
    for (const Slot* slot : active_) {
        const Search& search = slot->search;
        const Request& request = *slot->request;
        for (int i = 0; request.options.sampled && i < search.n_draws(); i++) {
            const double number = request.numbers[size_t(search.draw_sample(i)) * request.limit + search.length()];
            draws_.push_back({row + search.draw_row(i), &request.sampling, number, search.missing(search.draw_row(i))});
        }
        row += search.n_live();
    }
    network_->draw(draws_);
}

// If a token is forced, the drawn token is not used; later tokens still get the same random numbers.
bool Worker::extend_samples(Slot& slot, const Draw* draws, const RowBest* best) {
    const int32_t forced = slot.search.forced_token();
    continuations_.clear();
    for (int i = 0; i < slot.search.n_draws(); i++) {
        const int row = slot.search.draw_row(i);
        const int32_t drawn = draws[i].token < 0 ? model_.config.eos : draws[i].token;
        const float log_prob = forced < 0 ? draws[i].log_prob : best[row].forced - log_sum_exp(best[row]);
        continuations_.push_back({slot.search.log_prob(row) + log_prob, row, forced < 0 ? drawn : forced});
    }
    if (slot.search.extend_samples(continuations_.data())) return true;
    slot.state.reorder(slot.search.n_live(), [&](int r) { return slot.search.parent(r); });
    return false;
}

}  // namespace transduce
