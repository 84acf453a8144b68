#include "network.h"
#include "search.h"

#include <algorithm>
#include <cmath>

namespace transduce {
namespace {

constexpr int kLogitColumns = 512;  // logits of a row that are computed and searched at once, in the L2 cache
constexpr size_t kLogitStride = row_stride(kLogitColumns);
constexpr int kReadAtOnce = 512;    // tokens of a prompt
constexpr int kLogitsAtOnce = 1 << 19;  // logits in memory at once when tokens are drawn: 2 MB

// The softmax, in place, of scores that are already multiplied by log2(e).
void normalize(float* scores, int n) {
    const float largest = *std::max_element(scores, scores + n);
    double sum = 0;
    for (int k = 0; k < n; k++) sum += double(scores[k] = std::exp2(scores[k] - largest));
    for (int k = 0; k < n; k++) scores[k] = float(double(scores[k]) / sum);
}

}  // namespace

// ---- parts of layers

Network::Network(const Model& model)
    : model_(model), kernels_(model.kernels), multiplier_(model.products, model.max_depth),
      screen_multiplier_(model.kernels.int8, model.screened_rows ? model.width : 1),
      pool_(model.config.n_decoder_layers, model.attention.bytes(model.heads)), source_positions_(model, model.encoder),
      target_positions_(model, model.decoder), width_(model.width), heads_stride_(row_stride(model.query_width)),
      wide_stride_(row_stride(model.max_columns)), memory_stride_(row_stride(model.memory.columns)),
      never_{model.config.pad, model.config.unk, model.config.bos} {
    for (int i = 0; model.config.placeholder >= 0 && i < kPlaceholders; i++) never_.push_back(model.config.placeholder + i);
}

void Network::reserve_rows(int rows) {
    if (rows <= capacity_) return;
    capacity_ = int(round_up(rows, 64));
    const size_t all = size_t(capacity_) + kSpareRows;
    x_.reset(all * width_), normed_.reset(all * width_), heads_.reset(all * heads_stride_), wide_.reset(all * wide_stride_);
}

void Network::embed(const Stack& stack, Positions& positions, int row, int token, int position) {
    row_position_[row] = position;
    float* x = x_.data() + row * width_;
    kernels_.embed(model_.embedding(stack, token, x), model_.config.embedding_scale, positions.added(position), int(width_), x);
}

// The input of a sub-layer: x or, with pre-norm, its norm.
const float* Network::before_sublayer(const NormWeights& norm, int rows) {
    if (!model_.config.pre_norm) return x_.data();
    kernels_.norm(norm, x_.data(), width_, rows, pending_, pending_ != nullptr, normed_.data());
    pending_ = nullptr;
    return normed_.data();
}

// x already contains the sub-layer's output, without the bias of its last product.
void Network::after_sublayer(const PackedMatrix& last, const NormWeights& norm, int rows) {
    pending_ = last.bias.data();
    if (model_.config.pre_norm) return;  // the next norm adds it
    kernels_.norm(norm, x_.data(), width_, rows, pending_, false, x_.data());
    pending_ = nullptr;
}

const float* Network::after_stack(const Stack& stack, int rows) { return before_sublayer(stack.final_norm, rows); }

void Network::project_and_rotate(const Layer& layer, int rows, Positions& positions) {
    const float* input = before_sublayer(layer.self_norm, rows);
    multiplier_.multiply(layer.self.query, input, width_, rows, wide_.data(), wide_stride_);
    if (!positions.half()) return;
    for (int r = 0; r < rows; r++) {  // queries and keys are side by side
        kernels_.rotate(wide_.data() + r * wide_stride_, model_.heads.heads + model_.heads.kv_heads, model_.heads.head_width,
                        positions.half(), positions.cosines(row_position_[r]), positions.sines(row_position_[r]));
    }
}

void Network::feed_forward(const Layer& layer, int rows) {
    const float* input = before_sublayer(layer.feed_forward_norm, rows);
    multiplier_.multiply(layer.expand, input, width_, rows, wide_.data(), wide_stride_);
    kernels_.activate(Activation(model_.config.activation), model_.config.gated, wide_.data(), wide_stride_, rows, model_.inner);
    multiplier_.multiply(layer.contract, wide_.data(), wide_stride_, rows, x_.data(), width_, x_.data(), width_);
    after_sublayer(layer.contract, layer.feed_forward_norm, rows);
}

// ---- attention

// Attention of the queries in rows [first_row, first_row + n_rows) of `wide_` over keys_ and values_, with masks_ and biases_ for each row.
// `recorded`: the sentence that the rows belong to, if the weights of some heads are stored in it.
void Network::attend(const AttentionKernels& kernels, int first_row, int n_rows, int n_blocks, const Sentence* recorded) {
    queries_.resize(n_rows), outputs_.resize(n_rows);
    for (int r = 0; r < n_rows; r++) {
        queries_[r] = wide_.data() + (first_row + r) * wide_stride_;
        outputs_[r] = heads_.data() + (first_row + r) * heads_stride_;
    }
    scratch_.reserve(attention_scratch(n_blocks, kernels_.max_queries));
    AttentionCall call;
    call.heads = model_.heads, call.keys = keys_.data(), call.values = values_.data(), call.scratch = scratch_.data(), call.bias_stride = bias_stride_;
    if (recorded) {
        scores_.resize(n_rows);
        for (int r = 0; r < n_rows; r++) scores_[r] = recorded->weights + size_t(r) * recorded->n_source;
        call.wanted = wanted_.data(), call.n_wanted = int(wanted_.size()), call.n_scores = recorded->n_source;
    }
    for (int r = 0; r < n_rows; r += call.n_queries) {
        call.n_queries = std::min(kernels_.max_queries, n_rows - r);
        call.queries = &queries_[r], call.masks = &masks_[r], call.biases = &biases_[r], call.outputs = &outputs_[r];
        if (recorded) call.scores = &scores_[r];
        const auto is_seen = [&](int block) {
            return std::any_of(call.masks, call.masks + call.n_queries, [=](const uint16_t* mask) { return mask[block]; });
        };
        for (call.n_blocks = n_blocks; call.n_blocks > 1 && !is_seen(call.n_blocks - 1);) call.n_blocks--;
        kernels.attend(call);
    }
}

// The encoder's self-attention; sentence i has rows starts[i] to starts[i + 1].
void Network::attend_within(const std::vector<int>& starts) {
    const AttentionKernels& kernels = kernels_.attention_float32;
    const size_t block = kernels.bytes(model_.heads);
    bias_stride_ = source_positions_.bias_stride();
    for (size_t i = 0; i + 1 < starts.size(); i++) {
        const int first = starts[i], n = starts[i + 1] - first, n_blocks = (n + kBlockKeys - 1) / kBlockKeys;
        source_keys_.reserve(n_blocks * block), source_values_.reserve(n_blocks * block);
        keys_.resize(n_blocks), values_.resize(n_blocks);
        for (int b = 0; b < n_blocks; b++) keys_[b] = source_keys_.data() + b * block, values_[b] = source_values_.data() + b * block;
        for (int k = 0; k < n; k++) {
            const float* key = wide_.data() + (first + k) * wide_stride_ + model_.query_width;
            kernels.store(model_.heads, source_keys_.data() + k / kBlockKeys * block, source_values_.data() + k / kBlockKeys * block,
                          k % kBlockKeys, key, key + model_.key_width);
        }
        fill_mask(full_mask_, n);
        masks_.assign(n, full_mask_.data()), biases_.resize(n);
        for (int k = 0; k < n; k++) biases_[k] = source_positions_.biases(k);
        attend(kernels, first, n, n_blocks);
    }
}

// Points keys_ and values_ to the keys and values of a layer in these blocks.
void Network::point_at(const std::vector<char*>& blocks, int layer) {
    keys_.clear(), values_.clear();
    for (char* block : blocks) keys_.push_back(pool_.keys(block, layer)), values_.push_back(pool_.values(block, layer));
}

void Network::attend_to_history(Sentence* const* sentences, int n, int layer) {
    for (int i = 0, row = 0; i < n; i++) {
        Sentence& s = *sentences[i];
        const int rows = int(s.places.size());
        for (int r = 0; r < rows; r++) {
            const float* key = wide_.data() + (row + r) * wide_stride_ + model_.query_width;
            char* block = s.blocks[s.places[r] / kBlockKeys];
            model_.attention.store(model_.heads, pool_.keys(block, layer), pool_.values(block, layer), s.places[r] % kBlockKeys, key,
                                   key + model_.key_width);
        }
        point_at(s.blocks, layer);
        masks_ = s.masks, biases_ = s.biases, bias_stride_ = s.bias_stride;
        attend(model_.attention, row, rows, int(s.blocks.size()));
        row += rows;
    }
}

// The recurrent unit that replaces self-attention: one step of each hypothesis, or several steps of a single one. Adds the output to x.
void Network::recur(Sentence* const* sentences, int n, int layer, int rows) {
    const Layer& l = model_.decoder.layers[layer];
    multiplier_.multiply(l.gate_value, before_sublayer(l.self_norm, rows), width_, rows, wide_.data(), wide_stride_);
    for (int i = 0, row = 0; i < n; i++)
        for (int r = 0, last = sentences[i]->n_rows - 1; r < int(sentences[i]->places.size()); r++, row++) {
            float* state = sentences[i]->states.at(std::min(r, last), layer);
            kernels_.recur(wide_.data() + row * wide_stride_, state, int(width_), x_.data() + row * width_);
        }
}

void Network::attend_to_memory(Sentence* const* sentences, int n, int layer, const std::vector<Head>& heads) {
    for (int i = 0, row = 0; i < n; i++) {
        const Sentence& s = *sentences[i];
        const int rows = int(s.places.size());
        point_at(s.memory_blocks, layer);
        masks_.assign(rows, s.memory_mask.data()), biases_.assign(rows, nullptr);
        wanted_.clear();
        for (size_t i = 0; s.weights && i < heads.size(); i++)
            if (heads[i].layer == layer) wanted_.push_back({heads[i].head, i * rows * s.n_source});
        attend(model_.attention, row, rows, int(s.memory_blocks.size()), wanted_.empty() ? nullptr : &s);
        for (const AttentionCall::WantedHead& wanted : wanted_)
            for (int r = 0; r < rows; r++) normalize(s.weights + wanted.place + size_t(r) * s.n_source, s.n_source);
        row += rows;
    }
}

// ---- encoder, decoder, logits

void Network::encode(const Source* sources, Sentence* const* sentences, int n) {
    std::vector<int> starts(1, 0);
    for (int i = 0; i < n; i++) starts.push_back(starts.back() + sources[i].n);
    const int rows = starts.back();
    reserve_rows(rows);
    row_position_.resize(rows);
    for (int i = 0, row = 0; i < n; i++) {
        source_positions_.reserve_biases(int(round_up(sources[i].n, kBlockKeys)));
        for (int k = 0; k < sources[i].n; k++) embed(model_.encoder, source_positions_, row++, sources[i].ids[k], k);
    }
    if (model_.config.embedding_norm) kernels_.norm(model_.encoder.embedding_norm, x_.data(), width_, rows, nullptr, false, x_.data());
    pending_ = nullptr;
    for (const Layer& layer : model_.encoder.layers) {
        project_and_rotate(layer, rows, source_positions_);
        attend_within(starts);
        multiplier_.multiply(layer.self.output, heads_.data(), heads_stride_, rows, x_.data(), width_, x_.data(), width_);
        after_sublayer(layer.self.output, layer.self_norm, rows);
        feed_forward(layer, rows);
    }
    const float* encoded = after_stack(model_.encoder, rows);
    memory_.reserve((size_t(rows) + kSpareRows) * memory_stride_);
    multiplier_.multiply(model_.memory, encoded, width_, rows, memory_.data(), memory_stride_);
    for (int i = 0; i < n; i++) {
        Sentence& s = *sentences[i];
        const int length = sources[i].n;
        fill_mask(s.memory_mask, length);
        for (size_t b = 0; b < s.memory_mask.size(); b++) s.memory_blocks.push_back(pool_.take());
        for (int k = 0; k < length; k++) {
            char* block = s.memory_blocks[k / kBlockKeys];
            const float* row = memory_.data() + (starts[i] + k) * memory_stride_;
            for (int l = 0; l < model_.config.n_decoder_layers; l++, row += 2 * model_.key_width) {
                model_.attention.store(model_.heads, pool_.keys(block, l), pool_.values(block, l), k % kBlockKeys, row,
                                       row + model_.key_width);
            }
        }
    }
}

void Network::start(const Source* sources, Sentence* const* sentences, int n) {
    for (int i = 0; i < n; i++) {
        Sentence& s = *sentences[i];
        s.ancestors.start();
        if (model_.config.recurrent) s.states.start(model_.config.n_decoder_layers, width_);
        s.positions.clear(), s.position = 0, s.n_rows = 1, s.n_source = sources[i].n;
    }
    if (!model_.config.decoder_only) return encode(sources, sentences, n);
    std::vector<Source> parts(n);
    for (int from = 0, left = 1; left; from += kReadAtOnce) {
        left = 0;
        for (int i = 0; i < n; i++) {
            const int rest = std::max(0, sources[i].n - from);
            parts[i] = {sources[i].ids + (rest ? from : 0), std::min(rest, kReadAtOnce)};
            left |= rest > kReadAtOnce;
        }
        read(parts.data(), sentences, n);
    }
}

void Network::read(const Source* targets, Sentence* const* sentences, int n, const std::vector<Head>& heads) {
    int rows = 0, n_blocks = 0;
    for (int i = 0; i < n; i++) {
        rows += targets[i].n;
        n_blocks = std::max(n_blocks, (sentences[i]->position + targets[i].n + kBlockKeys - 1) / kBlockKeys);
    }
    reserve_rows(rows);
    row_position_.resize(rows);
    causal_.reserve(n_blocks);
    target_positions_.reserve_biases(n_blocks * kBlockKeys);
    for (int i = 0, row = 0; i < n; i++) {
        Sentence& s = *sentences[i];
        s.places.resize(targets[i].n), s.masks.resize(targets[i].n), s.biases.resize(targets[i].n);
        s.positions.resize(s.position + targets[i].n), s.bias_stride = target_positions_.bias_stride();
        for (int k = 0; k < targets[i].n; k++, s.position++) {
            s.places[k] = s.positions[s.position] = s.position, s.masks[k] = causal_.mask(s.position);
            s.biases[k] = target_positions_.biases(s.position);
            if (s.position % kBlockKeys == 0) s.blocks.push_back(pool_.take());
            embed(model_.decoder, target_positions_, row++, targets[i].ids[k], s.position);
        }
        s.ancestors.start(s.position);
    }
    decode(sentences, n, rows, heads);
}

// The next tokens of all hypotheses have the same position.
void Network::set_biases(Sentence& s) {
    const size_t n = size_t(s.ancestors.n_blocks()) * kBlockKeys;
    s.positions.resize(n);
    for (const int place : s.places) s.positions[place] = s.position;
    target_positions_.reserve_biases(s.position + 1);
    const float* biases = target_positions_.biases(s.position);
    s.biases.assign(s.n_rows, nullptr);
    if (!biases) return;
    const int quads = (model_.config.n_heads + 3) / 4;
    s.bias_stride = 4 * n, s.place_biases.resize(quads * s.bias_stride);
    for (int quad = 0; quad < quads; quad++)
        for (size_t place = 0; place < n; place++)
            std::copy_n(biases + quad * target_positions_.bias_stride() + 4 * s.positions[place], 4, &s.place_biases[quad * s.bias_stride + 4 * place]);
    s.biases.assign(s.n_rows, s.place_biases.data());
}

void Network::step(Sentence* const* sentences, int n, const std::vector<int32_t>& tokens) {
    const int rows = int(tokens.size());
    reserve_rows(rows);
    row_position_.resize(rows);
    for (int i = 0, row = 0; i < n; i++) {
        Sentence& s = *sentences[i];
        if (!model_.config.recurrent) s.ancestors.add_tokens(s.places), set_biases(s);
        while (int(s.blocks.size()) < s.ancestors.n_blocks()) s.blocks.push_back(pool_.take());
        s.places.resize(s.n_rows), s.masks.resize(s.n_rows);
        for (int r = 0; r < s.n_rows; r++, row++) {
            s.masks[r] = s.ancestors.mask(r);
            embed(model_.decoder, target_positions_, row, tokens[row], s.position);
        }
        s.position++;
    }
    decode(sentences, n, rows, model_.guided);
}

// Embedded rows through the decoder.
void Network::decode(Sentence* const* sentences, int n, int rows, const std::vector<Head>& heads) {
    if (model_.config.embedding_norm) kernels_.norm(model_.decoder.embedding_norm, x_.data(), width_, rows, nullptr, false, x_.data());
    pending_ = nullptr;
    for (int l = 0; l < model_.config.n_decoder_layers; l++) {
        const Layer& layer = model_.decoder.layers[l];
        if (model_.config.recurrent) {
            recur(sentences, n, l, rows);
        } else {
            project_and_rotate(layer, rows, target_positions_);
            attend_to_history(sentences, n, l);
            multiplier_.multiply(layer.self.output, heads_.data(), heads_stride_, rows, x_.data(), width_, x_.data(), width_);
        }
        after_sublayer(layer.self.output, layer.self_norm, rows);
        if (!model_.config.decoder_only) {
            const float* input = before_sublayer(layer.cross_norm, rows);
            multiplier_.multiply(layer.cross.query, input, width_, rows, wide_.data(), wide_stride_);
            attend_to_memory(sentences, n, l, heads);
            multiplier_.multiply(layer.cross.output, heads_.data(), heads_stride_, rows, x_.data(), width_, x_.data(), width_);
            after_sublayer(layer.cross.output, layer.cross_norm, rows);
        }
        feed_forward(layer, rows);
    }
    hidden_ = after_stack(model_.decoder, rows);
}

void Network::start_best(const std::vector<BestWanted>& parts) {
    size_t rows = 0, places = 0;
    for (const BestWanted& part : parts) rows += part.rows, places += size_t(part.rows) * part.k;
    best_.assign(rows, RowBest());
    best_values_.resize(places), best_ids_.resize(places);
    RowBest* row = best_.data();
    size_t at = 0;
    for (const BestWanted& part : parts)
        for (int r = 0; r < part.rows; r++, row++, at += part.k) row->k = part.k, row->values = best_values_.data() + at, row->ids = best_ids_.data() + at;
    logits_.reserve(size_t(kRowsAtOnce + kSpareRows) * kLogitStride);
}

// The bias of padding columns is kNever, which hides them unless the hidden states are not finite.
void Network::hide_padding(const PackedMatrix& matrix, float* logits, int column, int last) {
    for (int i = std::max(column, matrix.outputs); i < last; i++) logits[i - column] = kNever;
}

// Tokens that a row must not choose.
const std::vector<int32_t>& Network::banned(int row) const {
    return banned_ && !banned_[row].empty() ? banned_[row] : never_;
}

// Finds the best tokens of rows [first, first + rows), at most kRowsAtOnce, with exact products over the whole vocabulary.
void Network::take_exact(int first, int rows, bool scores) {
    const PackedMatrix& matrix = model_.logits;
    multiplier_.convert(matrix, hidden_ + first * width_, width_, rows);
    for (int column = 0; column < matrix.columns; column += kLogitColumns) {
        const int last = std::min(matrix.columns, column + kLogitColumns);
        multiplier_.columns(matrix, column, last, logits_.data(), kLogitStride);
        for (int r = 0; r < rows; r++) {
            float* logits = logits_.data() + r * kLogitStride;
            hide_padding(matrix, logits, column, last);
            const int32_t forced = forced_ ? forced_[first + r] : -1;
            if (forced >= column && forced < last) best_[first + r].forced = logits[forced - column];
            const std::vector<int32_t>& never = banned(first + r);
            kernels_.take_logits(best_[first + r], logits, last - column, column, never.data(), int(never.size()), scores);
        }
    }
}

// Finds the best token of each row by int8 bounds (see `Screen`), without scores.
void Network::take_screened(int first, int rows) {
    screens_.resize(std::max(screens_.size(), size_t(rows)));
    const float* hidden = hidden_ + first * width_;
    screen_multiplier_.convert(model_.screen, hidden, width_, rows);
    for (int r = 0; r < rows; r++) kernels_.start_screen(screens_[r], hidden + r * width_, int(width_), screen_multiplier_.scales()[r]);
    for (int column = 0; column < model_.screen.columns; column += kLogitColumns) {
        const int last = std::min(model_.screen.columns, column + kLogitColumns);
        screen_multiplier_.columns(model_.screen, column, last, logits_.data(), kLogitStride);
        for (int r = 0; r < rows; r++) {
            float* logits = logits_.data() + r * kLogitStride;
            for (const int32_t id : banned(first + r))
                if (id >= column && id < last) logits[id - column] = 2 * kNever;
            kernels_.take_bounds(screens_[r], logits, last - column, column, model_.screen.error.data() + column,
                                 model_.screen.norm.data() + column);
        }
    }
    for (int r = 0; r < rows; r++) decide(screens_[r], first + r);
}

const RowBest* Network::best_tokens(const std::vector<BestWanted>& parts, const int32_t* forced) {
    start_best(parts);
    forced_ = forced;
    int first = 0;
    for (const BestWanted& part : parts) {
        for (const int end = first + part.rows; first < end;) {
            const int rows = std::min(kRowsAtOnce, end - first);
            const bool screened = rows <= model_.screened_rows && !part.scores;
            if (part.k) screened ? take_screened(first, rows) : take_exact(first, rows, part.scores);
            first += rows;
        }
    }
    return best_.data();
}

void Network::decide(Screen& screen, int row) {
    if (screen.n > Screen::kMost) return take_exact(row, 1, false);
    kernels_.drop(screen);
    RowBest& best = best_[row];
    for (int i = 0; i < screen.n; i++) {
        const int32_t id = screen.ids[i];
        if (id >= model_.config.n_tgt) continue;  // padding; found if the hidden state is not finite
        const float value = screen.n == 1 ? 0 : kernels_.dot(model_.logits.bias[id], hidden_ + row * width_, model_.output(id), int(width_));
        if (best.n && !(value > best.values[0])) continue;
        best.n = 1, best.values[0] = value, best.ids[0] = id;
    }
}

// Computes and keeps the logits of a few rows at a time.
void Network::draw(std::vector<Draw>& draws) {
    const int columns = model_.logits.columns, most = std::clamp(kLogitsAtOnce / columns, 1, 64);
    drawn_hidden_.reserve((size_t(most) + kSpareRows) * width_), drawn_logits_.reserve((size_t(most) + kSpareRows) * columns);
    for (size_t first = 0; first < draws.size(); first += most) {
        const int n = int(std::min<size_t>(most, draws.size() - first));
        for (int i = 0; i < n; i++) std::copy_n(hidden_ + draws[first + i].row * width_, width_, drawn_hidden_.data() + i * width_);
        multiplier_.convert(model_.logits, drawn_hidden_.data(), width_, n);
        multiplier_.columns(model_.logits, 0, columns, drawn_logits_.data(), columns);
        for (int i = 0; i < n; i++) {
            Draw& draw = draws[first + i];
            float* logits = drawn_logits_.data() + size_t(i) * columns;
            hide_padding(model_.logits, logits, 0, columns);
            raised_.clear();
            for (int32_t id = model_.config.placeholder, last = id + kPlaceholders; draw.missing && id < last; id++)
                if (count_of(draw.missing, id, model_.config.placeholder)) raised_.emplace_back(id, logits[model_.config.eos] + kMisplaced);
            draw.token =
                sampler_.draw(logits, model_.config.n_tgt, columns, banned(draw.row), raised_, *draw.sampling, draw.number, draw.log_prob);
        }
    }
}

void Network::forget(Sentence& sentence) {
    pool_.put_back(sentence.memory_blocks);
    pool_.put_back(sentence.blocks);
}

}  // namespace transduce
