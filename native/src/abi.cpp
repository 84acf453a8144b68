// The C interface of decoding: checks the arguments and calls the engine.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "abi.h"
#include "queue.h"
#include "scorer.h"
#include "transduce_native.h"

struct transduce_model {
    transduce::Model model;
    transduce::Scorer scorer{model};
};
struct transduce_queue {
    std::shared_ptr<transduce::Queue> queue;
    const transduce_config& config;
};
struct transduce_client {
    transduce::Client client;
    const transduce_config& config;
};

using namespace transduce::abi;

namespace {

thread_local std::string last_error;

constexpr int32_t kMaxLimit = 1'000'000;
constexpr int64_t kMostSteps = 1 << 24;
constexpr double kForever = 1e9;  // seconds

struct Option {
    const char* name;
    double least, most;
    void (*set)(transduce::Request&, double);
};

const Option kOptions[] = {
    {"beam", 1, 512, [](transduce::Request& r, double value) { r.options.beam = int(value); }},
    {"n_best", 1, 512, [](transduce::Request& r, double value) { r.options.n_best = int(value); }},
    {"length_penalty", 0, 10, [](transduce::Request& r, double value) { r.options.length_penalty = float(value); }},
    {"no_repeat_ngram", 0, kMaxLimit, [](transduce::Request& r, double value) { r.options.no_repeat_ngram = int(value); }},
    {"scores", 0, 1, [](transduce::Request& r, double value) { r.options.scores = value != 0; }},
    {"stream", 0, 1, [](transduce::Request& r, double value) { r.stream = value != 0; }},
    {"sample", 0, 1, [](transduce::Request& r, double value) { r.options.sampled = value != 0; }},
    {"temperature", 0, FLT_MAX, [](transduce::Request& r, double value) { r.sampling.temperature = float(value); }},
    {"top_k", 0, INT32_MAX, [](transduce::Request& r, double value) { r.sampling.top_k = int(value); }},
    {"top_p", 0, 1, [](transduce::Request& r, double value) { r.sampling.top_p = value; }},
};

// A request with these options. A beam and samples need scores; samples have a row each.
transduce::Request with_options(const transduce_option* options, int64_t n) {
    transduce::Request request;
    for (int64_t i = 0; i < n; i++) {
        const char* name = options[i].name;
        require(name, "options: a name must not be null");
        const Option* found = std::find_if(std::begin(kOptions), std::end(kOptions), [=](const Option& o) { return !std::strcmp(o.name, name); });
        if (found == std::end(kOptions)) throw std::invalid_argument(std::string(name) + ": no such option");
        if (!(found->least <= options[i].value && options[i].value <= found->most))
            throw std::invalid_argument(std::string(name) + ": out of range");
        found->set(request, options[i].value);
    }
    transduce::SearchOptions& search = request.options;
    if (search.sampled) search.beam = search.n_best, search.length_penalty = 1;
    require(search.n_best <= search.beam, "n_best: must be from 1 to beam");
    search.scores |= search.beam > 1 || search.sampled;
    return request;
}

// Item i of a concatenation of arrays; item i begins at offsets[i].
std::vector<int32_t> part(const int32_t* ids, const int64_t* offsets, int64_t i, int64_t least, int64_t most) {
    require(offsets[0] == 0 && offsets[i] >= 0 && offsets[i + 1] >= offsets[i], "offsets: must start with 0 and must not fall");
    require(least <= offsets[i + 1] - offsets[i] && offsets[i + 1] - offsets[i] <= most,
            "offsets: a sentence must have from 1 to 65536 tokens, a prefix at most its limit");
    return std::vector<int32_t>(ids + offsets[i], ids + offsets[i + 1]);
}

transduce::Spelling spelling_of(const transduce_config& config, const transduce_spelling* steps, const int64_t* offsets, int64_t i) {
    require(offsets[0] == 0 && offsets[i] >= 0 && offsets[i + 1] >= offsets[i] && offsets[i + 1] - offsets[i] <= kMostSteps,
            "spelling_offsets: must start with 0 and must not fall, and a sentence must have at most 2^24 steps");
    transduce::Spelling spelling;
    for (int64_t k = offsets[i]; k < offsets[i + 1]; k++) {
        const transduce_spelling& step = steps[k];
        require(0 <= step.state && step.state < step.next, "spellings: a state must not be negative, and must lead to a higher one");
        require(0 <= step.token && step.token < config.n_tgt && step.token != config.pad && step.token != config.bos,
                "spellings: must be tokens of the target vocabulary, without padding and start");
        require(spelling.empty() || std::pair(spelling.back().state, spelling.back().token) < std::pair(step.state, step.token),
                "spellings: must be ordered by state and token");
        spelling.push_back(step);
    }
    return spelling;
}

std::shared_ptr<transduce::Request> request_of(const transduce::Request& options, const transduce_config& config,
                                               const transduce_sentences& s, int64_t i) {
    auto request = std::make_shared<transduce::Request>(options);
    const int32_t limit = request->limit = s.limits[i];
    require(1 <= limit && limit <= kMaxLimit, "limits: must be from 1 to 1000000");
    request->ids = part(s.ids, s.offsets, i, 1, kMaxSource);
    if (s.prefixes) request->prefix = part(s.prefixes, s.prefix_offsets, i, 0, limit);
    if (s.unscored) request->n_unscored = s.unscored[i];
    require(0 <= request->n_unscored && request->n_unscored <= int64_t(request->prefix.size()), "unscored: must be from 0 to the length of the prefix");
    const int64_t length = int64_t(request->ids.size());
    const int64_t n_positions = config.decoder_only ? length + limit - 1 : std::max<int64_t>(length, limit);
    require(config.positions != transduce::kLearned || n_positions <= config.max_positions, "a sentence or a limit is longer than the learned positions");
    for (const int32_t id : request->ids)
        require(0 <= id && id < config.n_src && (config.decoder_only || id != config.pad),
                "ids: must be tokens of the source vocabulary, without padding in a source");
    for (const int32_t id : request->prefix)
        require(0 <= id && id < config.n_tgt && id != config.pad && id != config.bos && id != config.eos,
                "prefixes: must be tokens of the target vocabulary, without padding, start and end");
    if (s.spellings) request->spelling = spelling_of(config, s.spellings, s.spelling_offsets, i);
    if (s.copies) request->copies = s.copies[i];
    request->options.scores |= request->copies != 0;
    require(!request->copies || config.placeholder >= 0, "copies: the vocabulary has no placeholders");
    return request;
}

// Stores the random numbers of a request's samples in it; returns a pointer to the remaining numbers.
const double* take_numbers(transduce::Request& request, const double* numbers) {
    request.numbers.assign(numbers, numbers + size_t(request.options.n_best) * request.limit);
    for (const double number : request.numbers) require(0 <= number && number < 1, "numbers: must be of [0, 1)");
    return numbers + request.numbers.size();
}

transduce::Time time_after(double seconds) {
    require(!std::isnan(seconds), "seconds: must be a number");
    if (seconds >= kForever) return transduce::Time::max();
    return transduce::Clock::now() + std::chrono::microseconds(int64_t(std::max(seconds, 0.0) * 1e6));
}

// Checks the lengths and the ids of the items of a concatenation.
void check_items(const int32_t* ids, const int64_t* offsets, int64_t n, int64_t most, int32_t n_ids) {
    require(ids && offsets && offsets[0] == 0, "ids and offsets must not be null, and offsets must start with 0");
    for (int64_t i = 0; i < n; i++) {
        require(offsets[i] < offsets[i + 1] && offsets[i + 1] - offsets[i] <= most, "offsets: a sentence is empty or too long");
        for (int64_t k = offsets[i]; k < offsets[i + 1]; k++) require(0 <= ids[k] && ids[k] < n_ids, "ids: must be tokens of the vocabulary");
    }
}

void check(const transduce_config& config, const transduce_pairs& p) {
    const int64_t most = config.positions == transduce::kLearned ? std::min(config.max_positions, kMaxSource) : kMaxSource;
    require(p.n >= 0 && p.n <= INT32_MAX, "n: must be from 0 to 2^31 - 1");
    require(!p.sources == (config.decoder_only || p.n == 0), "sources: needed by a model with an encoder, and by no other");
    if (p.n) check_items(p.inputs, p.offsets, p.n, most, config.n_tgt);
    if (p.sources) check_items(p.sources, p.source_offsets, p.n, most, config.n_src);
    for (int64_t k = 0; p.sources && k < p.source_offsets[p.n]; k++) require(p.sources[k] != config.pad, "ids: must be without padding in a source");
    require(p.n == 0 || p.tokens, "tokens must not be null");
    for (int64_t k = 0; p.n && k < p.offsets[p.n]; k++)
        require(-1 <= p.tokens[k] && p.tokens[k] < config.n_tgt && p.tokens[k] != config.pad, "tokens: must be of the vocabulary, without padding, or -1");
}

std::vector<transduce::Head> heads_of(const transduce_config& config, const int32_t* heads, int32_t n) {
    require(n >= 0 && n <= 1 << 20 && (n == 0 || (heads && !config.decoder_only)), "heads: must not be null, and need an encoder");
    std::vector<transduce::Head> found;
    for (int32_t i = 0; i < n; i++) {
        found.push_back({heads[2 * i], heads[2 * i + 1]});
        require(0 <= found[i].layer && found[i].layer < config.n_decoder_layers, "heads: there is no such layer");
        require(0 <= found[i].head && found[i].head < config.n_heads, "heads: there is no such head");
    }
    return found;
}

}  // namespace

int transduce::abi::fail(int code, const char* reason) noexcept {
    try {
        last_error = reason;
    } catch (...) {
        last_error.clear();
    }
    return code;
}

extern "C" {

int32_t transduce_abi_version(void) { return TRANSDUCE_ABI_VERSION; }

const char* transduce_last_error(void) { return last_error.c_str(); }

const char* transduce_isa(void) {
    const char* name = nullptr;
    guarded([&] { name = transduce::name_of(transduce::chosen_isa()); });
    return name;
}

int32_t transduce_model_new(const transduce_config* config, const transduce_tensor* tensors, int64_t n_tensors, transduce_read read,
                            transduce_model** model) {
    return guarded([&] {
        require(config && model && read && (tensors || n_tensors == 0) && n_tensors >= 0, "config, tensors, read and model must not be null");
        *model = new transduce_model{{*config, tensors, n_tensors, read}};
    });
}

void transduce_model_free(transduce_model* model) { delete model; }

int32_t transduce_queue_new(transduce_model* model, int32_t n_workers, transduce_queue** queue) {
    return guarded([&] {
        require(model && queue, "model and queue must not be null");
        require(1 <= n_workers && n_workers <= kMaxThreads, "n_workers: must be from 1 to 1024");
        *queue = new transduce_queue{std::make_shared<transduce::Queue>(model->model, n_workers), model->model.config};
    });
}

void transduce_queue_close(transduce_queue* queue) {
    if (queue) queue->queue->close();
}

void transduce_queue_free(transduce_queue* queue) {
    if (queue) queue->queue->close_and_wait();
    delete queue;
}

int32_t transduce_queue_load(transduce_queue* queue, transduce_load* load) {
    return guarded([&] {
        require(queue && load, "queue and load must not be null");
        *load = queue->queue->load();
    });
}

int32_t transduce_client_new(transduce_queue* queue, transduce_client** client) {
    return guarded([&] {
        require(queue && client, "queue and client must not be null");
        auto made = std::unique_ptr<transduce_client>(new transduce_client{transduce::Client(queue->queue), queue->config});
        queue->queue->join(made->client);
        *client = made.release();
    });
}

int32_t transduce_client_fd(transduce_client* client, int32_t* fd) {
    return guarded([&] {
        require(client && fd, "client and fd must not be null");
        *fd = client->client.queue->fd(client->client);
    });
}

void transduce_client_close(transduce_client* client) {
    if (client) client->client.queue->close(client->client);
}

void transduce_client_free(transduce_client* client) {
    if (client) client->client.queue->leave(client->client);
    delete client;
}

int32_t transduce_submit(transduce_client* client, const transduce_option* options, int64_t n_options,
                         const transduce_sentences* sentences, int64_t first_ticket, double order, int32_t works) {
    return guarded([&] {
        require(client && (options || n_options == 0) && sentences, "client, options and sentences must not be null");
        require(0 <= first_ticket && first_ticket <= INT64_MAX - INT32_MAX, "first_ticket: must be from 0 to 2^63 - 2^31");
        transduce::Request asked = with_options(options, n_options);
        asked.options.eos = client->config.eos, asked.options.n_tokens = client->config.n_tgt;
        require(!std::isnan(order), "order: must be a number");
        const bool sampled = asked.options.sampled;
        const transduce_sentences& s = *sentences;
        asked.options.placeholder = client->config.placeholder;
        require(s.n >= 0 && s.n <= INT32_MAX, "n: must be from 0 to 2^31 - 1");
        require(s.n == 0 || (s.ids && s.offsets && s.limits), "ids, offsets and limits must not be null");
        require(!s.prefixes == !s.prefix_offsets, "prefixes and prefix_offsets: both or none");
        require(!s.spellings == !s.spelling_offsets, "spellings and spelling_offsets: both or none");
        require(s.n == 0 || !s.numbers == !sampled, "numbers: needed by sampling, and by nothing else");
        const double* numbers = s.numbers;
        std::vector<std::shared_ptr<transduce::Request>> requests;
        for (int64_t i = 0; i < s.n; i++) {
            requests.push_back(request_of(asked, client->config, s, i));
            requests.back()->ticket = first_ticket + i;
            if (sampled) numbers = take_numbers(*requests.back(), numbers);
        }
        client->client.queue->submit(client->client, std::move(requests), order, works == 1);
    });
}

int32_t transduce_cancel(transduce_client* client, int64_t ticket) {
    return guarded([&] {
        require(client, "client must not be null");
        client->client.queue->cancel(client->client, ticket);
    });
}

int32_t transduce_work(transduce_client* client, double seconds, int64_t* n_open) {
    return guarded([&] {
        require(client && n_open, "client and n_open must not be null");
        *n_open = client->client.queue->work(&client->client, time_after(seconds));
    });
}

int32_t transduce_serve(transduce_queue* queue) {
    return guarded([&] {
        require(queue, "queue must not be null");
        const std::shared_ptr<transduce::Queue> kept = queue->queue;
        kept->work(nullptr, transduce::Time::max());
    });
}

int32_t transduce_collect(transduce_client* client, int64_t* n_events, int64_t* n_hypotheses, int64_t* n_tokens, int64_t* n_weights) {
    return guarded([&] {
        require(client && n_events && n_hypotheses && n_tokens && n_weights, "client and numbers must not be null");
        client->client.queue->collect(client->client);
        *n_events = int64_t(client->client.collected.size()), *n_hypotheses = *n_tokens = *n_weights = 0;
        for (const transduce::Event& event : client->client.collected)
            for (const transduce::Finished& found : event.hypotheses)
                *n_hypotheses += 1, *n_tokens += int64_t(found.ids.size()), *n_weights += int64_t(found.attention.size());
    });
}

int32_t transduce_results(transduce_client* client, int64_t* tickets, int32_t* outcomes, int32_t* counts, int32_t* lengths,
                          float* log_probs, float* scores, int8_t* finished, int32_t* widths, int32_t* tokens, float* weights) {
    return guarded([&] {
        require(client && tickets && outcomes && counts && lengths && log_probs && scores && finished && widths && tokens && weights,
                "client and results must not be null");
        for (const transduce::Event& event : client->client.collected) {
            *tickets++ = event.ticket, *outcomes++ = int32_t(event.outcome), *counts++ = int32_t(event.hypotheses.size());
            for (const transduce::Finished& found : event.hypotheses) {
                *lengths++ = int32_t(found.ids.size());
                *log_probs++ = found.log_prob, *scores++ = found.score, *finished++ = found.finished;
                *widths++ = found.ids.empty() ? 0 : int32_t(found.attention.size() / found.ids.size());
                tokens = std::copy(found.ids.begin(), found.ids.end(), tokens);
                weights = std::copy(found.attention.begin(), found.attention.end(), weights);
            }
        }
        client->client.collected.clear();
    });
}

int32_t transduce_score(transduce_model* model, const transduce_pairs* pairs, float* log_probs, const int32_t* heads, int32_t n_heads,
                        float* weights) {
    return guarded([&] {
        require(model && pairs && log_probs, "model, pairs and log_probs must not be null");
        check(model->model.config, *pairs);
        const std::vector<transduce::Head> wanted = heads_of(model->model.config, heads, n_heads);
        require(wanted.empty() == !weights, "weights: must be null if and only if there are no heads");
        model->scorer.score(*pairs, log_probs, wanted, weights);
    });
}

}  // extern "C"
