// Threads that submit, cancel, decode, collect and close at the same time, and threads that train, through the C interface, for
// ThreadSanitizer: `make -C native tsan`. Every sentence must end once, and every result must be that of the sentence alone.

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "transduce_native.h"

namespace {

constexpr int kTokens = 40, kClients = 3, kRounds = 30, kSentences = 6, kLimit = 12;

[[noreturn]] void fail(int line, const char* what) {
    std::fprintf(stderr, "stress.cpp:%d: %s is false; %s\n", line, what, transduce_last_error());
    std::abort();
}
#define CHECK(fine) ((fine) ? void() : fail(__LINE__, #fine))

template <class Call>
transduce_step step(int32_t (*function)(const Call*, int32_t), const Call* call) {
    return {reinterpret_cast<int32_t (*)(const void*, int32_t)>(function), call};
}

// A model of random weights.
struct Model {
    explicit Model(int precision) {
        config = {};
        config.d_model = 32, config.d_ff = 48, config.n_heads = 2, config.n_kv_heads = 2;
        config.n_encoder_layers = config.n_decoder_layers = 1;
        config.n_src = config.n_tgt = kTokens, config.max_positions = 1;
        config.guided_layer = 0, config.guided_head = 1;
        config.positions = 1, config.norm_eps = 1e-5f, config.embedding_scale = 1;
        config.pad = 0, config.bos = 2, config.eos = 3, config.precision = precision, config.tied = 1;
        for (const std::string side : {"encoder", "decoder"}) {
            const std::string block = side + ".blocks.0.";
            add((side == "encoder" ? "src" : "tgt") + std::string("_embedding.table.weight"), kTokens, 32);
            add_linear(block + "self_attention.query_key_value", 96);
            add_linear(block + "self_attention.output", 32);
            add(block + "self_attention_residual.norm.weight", 1, 32);
            add_linear(block + "feed_forward.expand", 48);
            add(block + "feed_forward.contract.weight", 32, 48);
            add(block + "feed_forward_residual.norm.weight", 1, 32);
        }
        add_linear("decoder.blocks.0.cross_attention.query", 32);
        add_linear("decoder.blocks.0.cross_attention.key_value", 64);
        add_linear("decoder.blocks.0.cross_attention.output", 32);
        add("decoder.blocks.0.cross_attention_residual.norm.weight", 1, 32);
        std::vector<transduce_tensor> tensors;
        for (const auto& [name, tensor] : weights) tensors.push_back({name.c_str(), tensor.data.data(), tensor.rows, tensor.columns});
        CHECK(transduce_model_new(&config, tensors.data(), int64_t(tensors.size()), &handle) == 0);
    }
    ~Model() { transduce_model_free(handle); }
    Model(const Model&) = delete;

    void add(const std::string& name, int rows, int columns) {
        std::normal_distribution<float> normal(0, rows == 1 ? 1 : 0.5f);
        Tensor& tensor = weights[name] = {{}, rows, columns};
        for (int i = 0; i < rows * columns; i++) tensor.data.push_back(normal(random));
    }
    void add_linear(const std::string& name, int outputs) { add(name + ".weight", outputs, 32); }

    struct Tensor {
        std::vector<float> data;
        int64_t rows, columns;
    };
    std::mt19937 random{7};
    transduce_config config;
    std::map<std::string, Tensor> weights;
    transduce_model* handle = nullptr;
};

// What may be asked, by its number: sentence and options.
struct Request {
    explicit Request(int number) {
        std::mt19937 random(number);
        for (int i = 0, n = 1 + number % 9; i < n; i++) ids.push_back(4 + int(random() % (kTokens - 4)));
        const int beams[] = {1, 1, 3, 5, 2};
        const double n_best = beams[number % 5], scores = number % 5 != 1, sample = number % 5 == 4, ngram = number % 3;
        options = {{"beam", n_best}, {"n_best", n_best}, {"length_penalty", 0.6}, {"no_repeat_ngram", ngram},
                   {"scores", scores}, {"stream", double(number % 2)}, {"sample", sample}};
        sampled = number % 5 == 4;
        for (int id = 1; number % 5 == 2 && id < kTokens; id += 2) allowed.push_back(id);
        for (int i = 0; i < beams[number % 5] * kLimit; i++) numbers.push_back(double(random()) / 4294967296.0);
    }
    void submit(transduce_client* client, int64_t ticket, double seconds, bool works) const {
        const int64_t offsets[] = {0, int64_t(ids.size())}, allowed_offsets[] = {0, int64_t(allowed.size())};
        const int32_t limit = kLimit;
        const transduce_sentences sentences{
            ids.data(), offsets, nullptr, nullptr, allowed.empty() ? nullptr : allowed.data(), allowed.empty() ? nullptr : allowed_offsets,
            &limit, sampled ? numbers.data() : nullptr, 1,
        };
        CHECK(transduce_submit(client, options.data(), int64_t(options.size()), &sentences, ticket, seconds, works) == 0);
    }
    std::vector<int32_t> ids, allowed;
    std::vector<double> numbers;
    std::vector<transduce_option> options;
    bool sampled = false;
};
constexpr int kRequests = 25;

// The tokens, scores and attention of a sentence that is done.
struct Result {
    std::vector<int32_t> tokens;
    std::vector<float> scores, weights;
    bool operator==(const Result& other) const {
        return tokens == other.tokens && scores == other.scores && weights == other.weights;
    }
};

// Takes what has come; gives each sentence that has ended to `look`, with its outcome. Returns how many.
template <class Look>
int collect(transduce_client* client, double seconds, Look look) {
    int64_t n_events, n, n_tokens, n_weights;
    CHECK(transduce_collect(client, seconds, &n_events, &n, &n_tokens, &n_weights) == 0);
    std::vector<int64_t> tickets(n_events + 1);
    std::vector<int32_t> outcomes(n_events + 1), counts(n_events + 1), lengths(n + 1), widths(n + 1), tokens(n_tokens + 1);
    std::vector<float> log_probs(n + 1), scores(n + 1), weights(n_weights + 1);
    std::vector<int8_t> finished(n + 1);
    CHECK(transduce_results(client, tickets.data(), outcomes.data(), counts.data(), lengths.data(), log_probs.data(), scores.data(),
                            finished.data(), widths.data(), tokens.data(), weights.data()) == 0);
    int ended = 0, hypothesis = 0, token = 0, weight = 0;
    for (int i = 0; i < n_events; i++) {
        Result result;
        for (int k = 0; k < counts[i]; k++, hypothesis++) {
            result.scores.push_back(scores[hypothesis]);
            for (int t = 0; t < lengths[hypothesis]; t++) result.tokens.push_back(tokens[token++]);
            for (int w = 0; w < lengths[hypothesis] * widths[hypothesis]; w++) result.weights.push_back(weights[weight++]);
        }
        if (outcomes[i] == TRANSDUCE_TOKENS) continue;
        look(tickets[i], outcomes[i], result);
        ended++;
    }
    return ended;
}

std::vector<Result> results_alone(transduce_queue* queue) {
    std::vector<Result> found(kRequests);
    transduce_client* client;
    CHECK(transduce_client_new(queue, &client) == 0);
    for (int i = 0; i < kRequests; i++) {
        Request(i).submit(client, i, HUGE_VAL, true);
        int64_t n_open;
        CHECK(transduce_work(client, HUGE_VAL, &n_open) == 0 && n_open == 0);
        CHECK(collect(client, 0, [&](int64_t, int outcome, const Result& one) { found[i] = one, CHECK(outcome == TRANSDUCE_DONE); }) == 1);
    }
    transduce_client_free(client);
    return found;
}

std::atomic<int> n_done{0};

// A client whose thread decodes (if it `works`) or waits, and one more thread that cancels. Every other one waits as event loops do.
void use(transduce_queue* queue, const std::vector<Result>& alone, int seed) {
    std::mt19937 random(seed);
    transduce_client* client;
    CHECK(transduce_client_new(queue, &client) == 0);
    pollfd watched{-1, POLLIN, 0};
    if (seed % 2) CHECK(transduce_client_fd(client, &watched.fd) == 0);
    for (int round = 0; round < kRounds; round++) {
        const bool works = random() % 2;
        const int64_t first = round * kSentences;
        int requests[kSentences], ended = 0;
        for (int i = 0; i < kSentences; i++) {
            requests[i] = int(random() % kRequests);
            Request(requests[i]).submit(client, first + i, random() % 4 ? HUGE_VAL : 0.002, works);
        }
        std::thread other([&, ticket = first + int64_t(random() % kSentences)] {
            CHECK(transduce_cancel(client, ticket) == 0);
            transduce_load load;
            CHECK(transduce_queue_load(queue, &load) == 0 && load.n_waiting <= load.n_open);
            if (round + 1 == kRounds) transduce_client_close(client);
        });
        int64_t n_open = works;
        while (works && n_open) CHECK(transduce_work(client, 0.001, &n_open) == 0);
        while (ended < kSentences) {
            if (seed % 2) CHECK(poll(&watched, 1, 60000) == 1);
            ended += collect(client, seed % 2 ? 0 : 10, [&](int64_t ticket, int outcome, const Result& one) {
                if (outcome == TRANSDUCE_DONE) n_done++, CHECK(one == alone[requests[ticket - first]]);
            });
        }
        CHECK(ended == kSentences);
        other.join();
    }
    transduce_client_free(client);
}

// Scores the same pairs again and again beside the threads that translate.
void score(transduce_model* model) {
    const int32_t sources[] = {5, 6, 7, 3, 9, 3}, inputs[] = {2, 8, 9, 2, 11}, tokens[] = {8, 9, 3, 11, 3};
    const int64_t source_offsets[] = {0, 4, 6}, offsets[] = {0, 3, 5};
    const transduce_pairs pairs{sources, source_offsets, inputs, tokens, offsets, 2};
    std::vector<float> first(5), again(5);
    CHECK(transduce_score(model, &pairs, first.data(), nullptr, 0, nullptr) == 0);
    for (int i = 0; i < kRounds; i++) {
        CHECK(transduce_score(model, &pairs, again.data(), nullptr, 0, nullptr) == 0);
        CHECK(first == again);
    }
}

// Computes the same update again and again, with other numbers of threads, beside other threads that do so.
template <class Number>
void train(int seed) {
    constexpr bool kIsBf16 = sizeof(Number) == 2;
    constexpr int kRows = 300, kInputs = 40, kOutputs = 70, kHeads = 2, kLength = 20, kWidth = 10;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto floats = [&](size_t n) {
        std::vector<float> found(n);
        for (float& x : found) x = normal(random);
        return found;
    };
    const auto numbers = [&](size_t n) {
        std::vector<Number> found(n);
        for (Number& x : found) x = kIsBf16 ? Number(16000 + random() % 256) : Number(random() % 256) / 512;  // 0.125 to 0.5; 0 to 0.5
        return found;
    };
    const std::vector<float> x = floats(kRows * kInputs), weight = floats(kOutputs * kInputs), bias = floats(kOutputs);
    const std::vector<Number> heads = numbers(kRows * kHeads * kWidth), grad = numbers(kRows * kOutputs);
    std::vector<int64_t> gold(kRows);
    for (int64_t& id : gold) id = random() % kOutputs;
    std::vector<Number> output(kRows * kOutputs), attended(heads.size());
    std::vector<float> grad_x(x.size()), grad_weight(weight.size()), grad_bias(bias.size());
    std::vector<std::vector<Number>> grad_heads(3, std::vector<Number>(heads.size()));
    transduce_linear_call linear{};
    linear.rows = kRows, linear.inputs = kInputs, linear.outputs = kOutputs, linear.is_bf16 = linear.grad_is_bf16 = kIsBf16;
    linear.p = 0.1f, linear.seed = seed, linear.x = x.data(), linear.weight = weight.data(), linear.bias = bias.data();
    linear.output = output.data(), linear.grad_output = grad.data();
    linear.grad_x = grad_x.data(), linear.grad_weight = grad_weight.data(), linear.grad_bias = grad_bias.data();
    transduce_heads_call attention{};
    attention.batch = kRows / kLength, attention.heads = attention.kv_heads = kHeads, attention.queries = attention.keys = kLength;
    attention.width = attention.value_width = kWidth, attention.causal = 1, attention.is_bf16 = kIsBf16, attention.scale = 0.3f, attention.p = 0.1f;
    attention.query = attention.key = attention.value = attention.grad_output = heads.data(), attention.output = attended.data();
    attention.grad_query = grad_heads[0].data(), attention.grad_key = grad_heads[1].data(), attention.grad_value = grad_heads[2].data();
    for (int64_t* strides : {attention.query_strides, attention.key_strides, attention.value_strides, attention.grad_strides,
                             attention.grad_query_strides, attention.grad_key_strides, attention.grad_value_strides})
        strides[0] = kLength * kHeads * kWidth, strides[1] = kWidth, strides[2] = kHeads * kWidth;
    std::vector<float> grad_hidden(x.size()), grad_table(weight.size());
    transduce_loss_call loss{};
    loss.hidden = x.data(), loss.weight = weight.data(), loss.gold = gold.data(), loss.rows = kRows, loss.pad = -1;
    loss.width = kInputs, loss.vocabulary = kOutputs, loss.is_bf16 = kIsBf16, loss.smoothing = 0.1f, loss.grad_hidden = grad_hidden.data(), loss.grad_weight = grad_table.data();
    float sum, nll;
    loss.loss = &sum, loss.nll = &nll;
    // A sub-layer of each kind: attention with pre-norm, feed-forward with post-norm.
    constexpr int kRead = kInputs / 2, kHidden = kHeads * kWidth * 3;
    const std::vector<float> first = floats(kHidden * kRead), second = floats(kHidden * kRead), gain = floats(kRead), grad_output = floats(kRows * kRead);
    std::vector<float> result(kRows * kRead), total(kRows * kRead), statistics(2 * kRows), grad_read(kRows * kRead);
    std::vector<float> grad_first(first.size()), grad_second(second.size()), grad_gain(kRead);
    std::vector<Number> normed(kRows * kRead), hidden(kRows * kHidden), inner(kRows * kHidden);
    transduce_sublayer_call attend{};
    attend.batch = kRows / kLength, attend.positions = attend.keys = kLength, attend.width = kRead, attend.is_bf16 = kIsBf16, attend.pre_norm = 1;
    attend.epsilon = 1e-5f, attend.p = attend.inner_p = 0.1f, attend.seed = seed, attend.inner_seed = seed + 1, attend.activation = -1;
    attend.gain = gain.data(), attend.grad_gain = grad_gain.data(), attend.x = x.data(), attend.grad_output = grad_output.data();
    attend.output = result.data(), attend.sum = total.data(), attend.normed = normed.data(), attend.statistics = statistics.data();
    attend.hidden = hidden.data(), attend.inner = inner.data(), attend.grad_x = grad_read.data();
    attend.first = {first.data(), nullptr, grad_first.data(), nullptr, kRead, kHidden};
    attend.second = {second.data(), nullptr, grad_second.data(), nullptr, kHeads * kWidth, kRead};
    attend.heads = attend.kv_heads = kHeads, attend.key_width = attend.value_width = kWidth, attend.causal = 1;
    transduce_sublayer_call transform = attend;
    transform.pre_norm = transform.heads = transform.activation = 0, transform.second.inputs = kHidden;
    const std::vector<transduce_step> steps = {
        step(transduce_linear, &linear), step(transduce_linear_backward, &linear), step(transduce_attend, &attention),
        step(transduce_attend_backward, &attention), step(transduce_loss, &loss), step(transduce_sublayer, &attend),
        step(transduce_sublayer_backward, &attend)};
    const std::vector<transduce_step> more = {step(transduce_sublayer, &transform), step(transduce_sublayer_backward, &transform)};
    const auto update = [&](int n_threads) {
        int64_t left = -1;
        std::fill(grad_second.begin(), grad_second.end(), 0.0f);  // one of the sub-layers writes a part of it
        for (const transduce_step& one : steps) CHECK(transduce_run(&one, 1, n_threads, 2, &left) == 0 && left <= 2);
        CHECK(transduce_run(nullptr, 0, n_threads, 0, &left) == 0 && left == 0);
        std::vector<double> found{sum, nll};
        const auto add_sublayer = [&] {
            for (const auto* numbers : {&result, &grad_read, &grad_first, &grad_second, &grad_gain}) found.insert(found.end(), numbers->begin(), numbers->end());
        };
        add_sublayer();
        for (const transduce_step& one : more) CHECK(transduce_run(&one, 1, n_threads, 2, &left) == 0 && left <= 2);
        CHECK(transduce_run(nullptr, 0, n_threads, 0, &left) == 0 && left == 0);
        add_sublayer();
        for (const auto* numbers : {&grad_x, &grad_weight, &grad_bias, &grad_hidden, &grad_table}) found.insert(found.end(), numbers->begin(), numbers->end());
        for (const auto* numbers : {&output, &attended, &grad_heads[0], &grad_heads[1], &grad_heads[2]}) found.insert(found.end(), numbers->begin(), numbers->end());
        return found;
    };
    const std::vector<double> expected = update(1);
    for (int i = 0; i < kRounds; i++) CHECK(update(1 + i % 4) == expected);
}

void run(int precision) {
    const Model model(precision);
    transduce_queue* queue;
    CHECK(transduce_queue_new(model.handle, 2, 0.01, &queue) == 0);
    const std::vector<Result> alone = results_alone(queue);
    std::vector<std::thread> servers, users;
    for (int i = 0; i < 2; i++) servers.emplace_back([&] { CHECK(transduce_serve(queue) == 0); });
    for (int i = 0; i < kClients; i++) users.emplace_back(use, queue, std::cref(alone), 10 * precision + i);
    for (int i = 0; i < 2; i++) users.emplace_back(score, model.handle);
    for (std::thread& thread : users) thread.join();
    // Closing ends what is open, while threads decode and submit.
    transduce_client* client;
    CHECK(transduce_client_new(queue, &client) == 0);
    for (int i = 0; i < kRequests; i++) Request(i).submit(client, i, HUGE_VAL, false);
    transduce_queue_close(queue);
    int ended = 0;
    while (ended < kRequests) ended += collect(client, 10, [](int64_t, int, const Result&) {});
    for (std::thread& thread : servers) thread.join();
    transduce_queue_free(queue);
    transduce_client_free(client);
}

}  // namespace

int main() {
    for (int precision = 0; precision < 3; precision++) run(precision);
    std::vector<std::thread> trainers;
    for (int i = 0; transduce_can_train() && i < kClients; i++) trainers.emplace_back(i % transduce_can_train() ? train<uint16_t> : train<float>, i);
    for (std::thread& thread : trainers) thread.join();
    CHECK(n_done > kClients * kRounds);
    std::printf("%s: %d sentences of %d were done, each with its own result\n", transduce_isa(), n_done.load(), 3 * kClients * kRounds * kSentences);
}
