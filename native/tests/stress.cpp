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

// A model of random weights.
struct Model {
    explicit Model(int precision) {
        config = {};
        config.d_model = 32, config.d_ff = 48, config.n_heads = 2, config.n_kv_heads = 2, config.d_key = config.d_value = 16;
        config.n_encoder_layers = config.n_decoder_layers = 1;
        config.n_src = config.n_tgt = kTokens, config.max_positions = 1;
        config.guided_layer = 0, config.guided_head = 1;
        config.positions = precision == 2 ? 3 : 5, config.norm_eps = 1e-5f, config.embedding_scale = 1;
        config.pad = 0, config.unk = 1, config.bos = 2, config.eos = 3, config.start = 2, config.precision = precision, config.tied = 1;
        for (const std::string side : {"encoder", "decoder"}) {
            const std::string block = side + ".blocks.0.";
            const std::string embedding = side == "encoder" ? "src_embedding." : "tgt_embedding.";
            add(embedding + "table.weight", kTokens, 32);
            if (precision == 2) add(embedding + "positions.bias.weight", 32, 2);
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
        static std::vector<const Tensor*> all;  // models are made one after another
        all.clear();
        const auto read = [](int64_t tensor, int64_t first, int64_t n, float* rows) -> int32_t {
            const int64_t columns = all[tensor]->columns;
            std::copy_n(all[tensor]->data.data() + first * columns, n * columns, rows);
            return 1;
        };
        for (const auto& [name, tensor] : weights) tensors.push_back({name.c_str(), tensor.rows, tensor.columns}), all.push_back(&tensor);
        CHECK(transduce_model_new(&config, tensors.data(), int64_t(tensors.size()), read, &handle) == 0);
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
        for (int i = 0; i < beams[number % 5] * kLimit; i++) numbers.push_back(double(random()) / 4294967296.0);
    }
    void submit(transduce_client* client, int64_t ticket, double order, bool works) const {
        const int64_t offsets[] = {0, int64_t(ids.size())};
        const int32_t limit = kLimit;
        const transduce_sentences sentences{
            ids.data(), offsets, nullptr, nullptr, nullptr, nullptr, &limit, nullptr, nullptr, sampled ? numbers.data() : nullptr, 1,
        };
        CHECK(transduce_submit(client, options.data(), int64_t(options.size()), &sentences, ticket, order, works) == 0);
    }
    std::vector<int32_t> ids;
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
    CHECK(transduce_collect(client, &n_events, &n, &n_tokens, &n_weights) == 0);
    if (!n_events) std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, 1e-3)));
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
        Request(i).submit(client, i, 0, true);
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
            Request(requests[i]).submit(client, first + i, random() % 4, works);
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

// Memory and one call for a block of a decoder's stack: with attention to a memory, or with a recurrent unit in place of self-attention.
struct Block {
    static constexpr int kBatch = 15, kLength = 20, kWidth = 20, kInner = 48;

    Block(std::mt19937& random, bool is_bf16, bool is_recurrent) {
        std::normal_distribution<float> normal;
        const auto floats = [&](size_t n) {
            std::vector<float> found(n);
            for (float& x : found) x = 0.3f * normal(random);
            return found;
        };
        const auto add = [&](size_t n) { weights.push_back(floats(n)), grads.emplace_back(n); };
        const auto add_layer = [&](int inputs, int outputs) { add(size_t(inputs) * outputs), add(outputs); };
        const auto add_norm = [&] { add(kWidth), add(kWidth); };
        add_layer(kWidth, is_recurrent ? 2 * kWidth : 3 * kWidth);
        if (!is_recurrent) add_layer(kWidth, kWidth);
        add_norm();
        for (const int outputs : {kWidth, 2 * kWidth, kWidth}) add_layer(kWidth, outputs);
        add_norm();
        add_layer(kWidth, kInner), add_layer(kInner, kWidth), add_norm();
        for (size_t i = 0; i < weights.size(); i++) weight_pointers.push_back(weights[i].data()), grad_pointers.push_back(grads[i].data());
        x = floats(kBatch * kLength * kWidth), memory = floats(x.size()), grad_output = floats(x.size());
        output.resize(x.size()), grad_x.resize(x.size()), grad_memory.resize(x.size());
        call.batch = kBatch, call.positions = call.memory_positions = kLength, call.width = kWidth, call.n_blocks = 1, call.inner_width = kInner;
        call.heads = call.kv_heads = 2, call.key_width = call.value_width = kWidth / 2, call.is_bf16 = is_bf16, call.causal = 1, call.recurrent = is_recurrent;
        call.epsilon = 1e-5f, call.p = call.attention_p = call.activation_p = 0.1f, call.seed = random();
        call.weights = weight_pointers.data(), call.grads = grad_pointers.data(), call.x = x.data(), call.memory = memory.data();
        call.output = output.data(), call.grad_output = grad_output.data(), call.grad_x = grad_x.data(), call.grad_memory = grad_memory.data();
        int64_t bytes = 0;
        CHECK(transduce_stack_memory(&call, &bytes) == 0 && bytes > 0);
        kept.resize(bytes + 64);
        call.kept = kept.data() + 64 - reinterpret_cast<uintptr_t>(kept.data()) % 64;
    }
    Block(const Block&) = delete;

    void compute(int n_threads, std::vector<double>& found) {
        CHECK(transduce_stack(&call, n_threads) == 0 && transduce_stack_backward(&call, n_threads) == 0);
        for (const auto* numbers : {&output, &grad_x, &grad_memory}) found.insert(found.end(), numbers->begin(), numbers->end());
        for (const auto& grad : grads) found.insert(found.end(), grad.begin(), grad.end());
    }

    transduce_stack_call call{};
    std::vector<std::vector<float>> weights, grads;
    std::vector<const float*> weight_pointers;
    std::vector<float*> grad_pointers;
    std::vector<float> x, memory, output, grad_output, grad_x, grad_memory;
    std::vector<char> kept;
};

// Computes the same update again and again, with other numbers of threads, beside other threads that do so.
void train(int seed, bool is_bf16) {
    constexpr int kRows = Block::kBatch * Block::kLength, kWidth = Block::kWidth, kVocabulary = 70;
    std::mt19937 random(seed);
    Block attention(random, is_bf16, false), recurrent(random, is_bf16, true);
    std::vector<int64_t> gold(kRows);
    for (int64_t& id : gold) id = random() % kVocabulary;
    std::vector<float> table(kVocabulary * kWidth), grad_hidden(kRows * kWidth), grad_table(table.size()), embedded(kRows * kWidth), grad_rows(table.size());
    for (float& x : table) x = float(random() % 256) / 256;
    transduce_loss_call loss{};
    loss.hidden = attention.output.data(), loss.weight = table.data(), loss.gold = gold.data(), loss.rows = kRows, loss.pad = -1;
    loss.width = kWidth, loss.vocabulary = kVocabulary, loss.is_bf16 = is_bf16, loss.smoothing = 0.1f;
    loss.grad_hidden = grad_hidden.data(), loss.grad_weight = grad_table.data();
    float sum, nll;
    loss.loss = &sum, loss.nll = &nll;
    transduce_embedding_call embedding{};
    embedding.rows = kRows, embedding.length = Block::kLength, embedding.width = kWidth, embedding.vocabulary = kVocabulary, embedding.ids = gold.data();
    embedding.table = table.data(), embedding.scale = 2, embedding.p = 0.1f, embedding.seed = seed, embedding.output = embedded.data();
    embedding.grad_output = grad_hidden.data(), embedding.grad_table = grad_rows.data();
    const auto update = [&](int n_threads) {
        std::vector<double> found;
        attention.compute(n_threads, found), recurrent.compute(n_threads, found);
        CHECK(transduce_loss(&loss, n_threads) == 0 && transduce_embedding(&embedding, n_threads) == 0 && transduce_embedding_backward(&embedding, n_threads) == 0);
        found.push_back(sum), found.push_back(nll);
        for (const auto* numbers : {&grad_hidden, &grad_table, &embedded, &grad_rows}) found.insert(found.end(), numbers->begin(), numbers->end());
        return found;
    };
    const std::vector<double> expected = update(1);
    for (int i = 0; i < kRounds; i++) CHECK(update(1 + i % 4) == expected);
}

void run(int precision) {
    const Model model(precision);
    transduce_queue* queue;
    CHECK(transduce_queue_new(model.handle, 2, &queue) == 0);
    const std::vector<Result> alone = results_alone(queue);
    std::vector<std::thread> servers, users;
    for (int i = 0; i < 2; i++) servers.emplace_back([&] { CHECK(transduce_serve(queue) == 0); });
    for (int i = 0; i < kClients; i++) users.emplace_back(use, queue, std::cref(alone), 10 * precision + i);
    for (int i = 0; i < 2; i++) users.emplace_back(score, model.handle);
    for (std::thread& thread : users) thread.join();
    // Closing ends what is open, while threads decode and submit.
    transduce_client* client;
    CHECK(transduce_client_new(queue, &client) == 0);
    for (int i = 0; i < kRequests; i++) Request(i).submit(client, i, 0, false);
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
    for (int i = 0; transduce_can_train() && i < kClients; i++) trainers.emplace_back(train, i, i % transduce_can_train() != 0);
    for (std::thread& thread : trainers) thread.join();
    CHECK(n_done > kClients * kRounds);
    std::printf("%s: %d sentences of %d were done, each with its own result\n", transduce_isa(), n_done.load(), 3 * kClients * kRounds * kSentences);
}
