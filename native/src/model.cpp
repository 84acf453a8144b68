#include "model.h"
#include "search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

namespace transduce {
namespace {

using Error = std::invalid_argument;
constexpr int kMostInner = 1 << 16;  // numbers of a row inside a sub-layer

void check(bool fine, const char* name, int64_t value, const char* allowed) {
    if (!fine) throw Error(std::string(name) + " = " + std::to_string(value) + ": " + allowed);
}

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
    check(least <= value && value <= most, name, value, ("must be from " + std::to_string(least) + " to " + std::to_string(most)).c_str());
}

transduce_config checked(const transduce_config& c) {
    const std::pair<const char*, int> switches[] = {{"pre_norm", c.pre_norm},         {"norm", c.norm},   {"embedding_norm", c.embedding_norm},
                                                    {"gated", c.gated},               {"tied", c.tied},   {"tied_inputs", c.tied_inputs},
                                                    {"decoder_only", c.decoder_only}, {"recurrent", c.recurrent}};
    for (const auto& [name, value] : switches) check_range(name, value, 0, 1);
    check_range("d_model", c.d_model, 1, 1 << 14);
    check_range("d_ff", c.d_ff, 1, kMostInner);
    check_range("n_heads", c.n_heads, 1, c.d_model);
    check_range("n_kv_heads", c.n_kv_heads, 1, c.n_heads);
    check(c.n_heads % c.n_kv_heads == 0, "n_kv_heads", c.n_kv_heads, "must divide n_heads");
    check_range("d_key", c.d_key, 1, kMostInner / c.n_heads);
    check_range("d_value", c.d_value, 1, kMostInner / c.n_heads);
    check_range("n_encoder_layers", c.n_encoder_layers, 0, 1024);
    check_range("n_decoder_layers", c.n_decoder_layers, 1, 1024);
    check_range("n_src", c.n_src, 1, 1 << 24);
    check_range("n_tgt", c.n_tgt, 1, 1 << 24);
    const std::pair<const char*, int> tokens[] = {{"pad", c.pad}, {"unk", c.unk}, {"bos", c.bos}, {"eos", c.eos}, {"start", c.start}};
    for (const auto& [name, id] : tokens) check_range(name, id, 0, c.n_tgt - 1);
    check_range("max_positions", c.max_positions, 1, 1 << 24);
    check_range("positions", c.positions, kNoPositions, kMarian);
    check(c.positions != kRotary || c.d_key % 2 == 0, "positions", c.positions, "rotary ones need an even d_key");
    check_range("activation", c.activation, 0, 3);
    check(c.norm_eps > 0 && std::isfinite(c.norm_eps), "norm_eps", 0, "must be positive");
    check(std::isfinite(c.embedding_scale), "embedding_scale", 0, "must be finite");
    check_range("placeholder", c.placeholder, -1, c.n_tgt - kPlaceholders);
    check_range("precision", c.precision, 0, 2);
    check(!c.tied_inputs || c.n_src == c.n_tgt, "n_src", c.n_src, "must be n_tgt if the inputs share an embedding");
    check(!c.recurrent || !c.decoder_only, "recurrent", c.recurrent, "must be 0 in a model without an encoder");
    check_range("guided_layer", c.guided_layer, -1, c.decoder_only ? -1 : c.n_decoder_layers - 1);
    check_range("guided_head", c.guided_head, c.guided_layer < 0 ? -1 : 0, c.guided_layer < 0 ? -1 : c.n_heads - 1);
    check(!c.decoder_only || c.n_src == c.n_tgt, "n_src", c.n_src, "must be n_tgt in a model without an encoder");
    return c;
}

// Finds tensors by name, checks their shapes, and reads them.
class Weights {
public:
    Weights(const transduce_tensor* tensors, int64_t n, transduce_read read) : tensors_(tensors), read_(read) {
        for (int64_t i = 0; i < n; i++) {
            if (!tensors[i].name) throw Error("a tensor without a name");
            by_name_[tensors[i].name] = &tensors[i];
        }
    }
    const transduce_tensor* find(const std::string& name, int64_t rows, int64_t columns, bool needed = false) const {
        const auto found = by_name_.find(name);
        if (found == by_name_.end()) return needed ? throw Error(name + " is missing") : nullptr;
        const transduce_tensor& t = *found->second;
        used_.insert(&t);
        if (t.rows != rows || t.columns != columns) {
            throw Error(name + " is [" + std::to_string(t.rows) + ", " + std::to_string(t.columns) + "], expected [" + std::to_string(rows) +
                        ", " + std::to_string(columns) + "]");
        }
        return &t;
    }
    // Some rows of a tensor, one after another, until the next call; zeros of one that is missing.
    const std::vector<float>& read(const transduce_tensor* tensor, int64_t first, int64_t n, int64_t columns) const {
        rows_.resize(size_t(n * columns));
        if (!tensor) std::fill(rows_.begin(), rows_.end(), 0.f);
        else if (!read_(tensor - tensors_, first, n, rows_.data())) throw std::runtime_error(std::string(tensor->name) + " cannot be read");
        return rows_;
    }

    // Throws if a tensor was not used: then the weights belong to another model.
    void check_all_used() const {
        for (const auto& [name, tensor] : by_name_)
            if (!used_.count(tensor)) throw Error(name + " is not part of the model");
    }

private:
    const transduce_tensor* tensors_;
    transduce_read read_;
    std::map<std::string, const transduce_tensor*> by_name_;
    mutable std::set<const transduce_tensor*> used_;
    mutable std::vector<float> rows_;
};

// The padding of the outputs or inputs of a matrix: `n` parts (such as heads) of `used` numbers, each padded to `width`.
struct Parts {
    int n, used, width;
    int total() const { return n * used; }
    int padded() const { return n * width; }
};

class Loader {
public:
    Loader(const Model& model, const Weights& weights)
        : m_(model), c_(model.config), weights_(weights), stream_{1, c_.d_model, c_.d_model}, query_{c_.n_heads, c_.d_key, model.heads.head_width},
          key_{c_.n_kv_heads, c_.d_key, model.heads.head_width}, value_{c_.n_kv_heads, c_.d_value, model.heads.head_width},
          output_{c_.n_heads, c_.d_value, model.heads.head_width},
          // Softmax is computed with powers of 2.
          query_scale_(kLog2E / std::sqrt(float(c_.d_key))) {}

    PackedMatrix pack_matrix(const DenseMatrix& dense) const { return pack(dense, m_.precision, m_.products.panel); }

    NormWeights norm(const std::string& name) const {
        NormWeights norm;
        norm.kind = c_.norm ? NormKind::rms : NormKind::layer;
        norm.width = c_.d_model, norm.epsilon = c_.norm_eps;
        norm.gain.reset(m_.width), norm.bias.reset(m_.width);
        std::copy_n(weights_.read(weights_.find(name + ".weight", 1, c_.d_model, true), 0, 1, c_.d_model).data(), c_.d_model, norm.gain.data());
        std::copy_n(weights_.read(weights_.find(name + ".bias", 1, c_.d_model), 0, 1, c_.d_model).data(), c_.d_model, norm.bias.data());
        return norm;
    }

    Buffer<float> table(const std::string& name, int n_rows) const {
        DenseMatrix dense(n_rows, c_.d_model);
        place(dense, name, n_rows, 0, {1, n_rows, n_rows}, stream_);  // before memory is allocated for its size
        Buffer<float> table(size_t(dense.columns) * m_.width), biases(dense.columns);
        dense.sources[0](0, n_rows, table.data(), biases.data());
        return table;
    }

    // Places outputs [from, from + outputs.total()) of a matrix with `n_rows` rows in `dense`, from column `to` on.
    void place(DenseMatrix& dense, const std::string& name, int n_rows, int from, Parts outputs, Parts inputs, int to = 0, float scale = 1) const {
        const transduce_tensor* weight = weights_.find(name + ".weight", n_rows, inputs.total(), true);
        dense.sources.push_back([=, &weights = weights_, bias = weights_.read(weights_.find(name + ".bias", 1, n_rows), 0, 1, n_rows)](
                                    int first, int last, float* rows, float* biases) {
            for (int column = std::max(first, to), n; column < std::min(last, to + outputs.padded()); column += n) {
                const int at = (column - to) % outputs.width, row = from + (column - to) / outputs.width * outputs.used + at;
                n = std::min({last - column, kPad, (at < outputs.used ? outputs.used : outputs.width) - at});
                if (at >= outputs.used) continue;
                for (int i = 0; i < n; i++) biases[column - first + i] = bias[row + i] * scale;
                const float* value = weights.read(weight, row, n, inputs.total()).data();
                for (int i = 0; i < n * inputs.n; i++, value += inputs.used) {
                    float* out = rows + size_t(column - first + i / inputs.n) * round_up(inputs.padded(), kPad) + i % inputs.n * inputs.width;
                    for (int k = 0; k < inputs.used; k++) out[k] = value[k] * scale;
                }
            }
        });
    }

    PackedMatrix matrix(const std::string& name, Parts outputs, Parts inputs) const {
        DenseMatrix dense(outputs.padded(), inputs.padded());
        place(dense, name, outputs.total(), 0, outputs, inputs);
        return pack_matrix(dense);
    }

    AttentionWeights self_attention(const std::string& name) const {
        const int n_query = query_.total(), n_key = key_.total(), n_rows = n_query + n_key + value_.total();
        const std::string projection = name + ".query_key_value";
        DenseMatrix dense(m_.query_width + 2 * m_.key_width, c_.d_model);
        place(dense, projection, n_rows, 0, query_, stream_, 0, query_scale_);
        place(dense, projection, n_rows, n_query, key_, stream_, m_.query_width);
        place(dense, projection, n_rows, n_query + n_key, value_, stream_, m_.query_width + m_.key_width);
        return {pack_matrix(dense), matrix(name + ".output", stream_, output_)};
    }

    AttentionWeights cross_attention(const std::string& name) const {
        DenseMatrix dense(m_.query_width, c_.d_model);
        place(dense, name + ".query", query_.total(), 0, query_, stream_, 0, query_scale_);
        return {pack_matrix(dense), matrix(name + ".output", stream_, output_)};
    }

    PackedMatrix memory_projection() const {
        DenseMatrix dense(2 * m_.key_width * c_.n_decoder_layers, c_.d_model);
        const int n_key = key_.total(), n_rows = n_key + value_.total();
        for (int l = 0; l < c_.n_decoder_layers; l++) {
            const std::string name = "decoder.blocks." + std::to_string(l) + ".cross_attention.key_value";
            place(dense, name, n_rows, 0, key_, stream_, 2 * l * m_.key_width);
            place(dense, name, n_rows, n_key, value_, stream_, (2 * l + 1) * m_.key_width);
        }
        return pack_matrix(dense);
    }

    DenseMatrix logits() const {
        DenseMatrix dense(c_.n_tgt, c_.d_model);
        place(dense, output_name(), c_.n_tgt, 0, {1, c_.n_tgt, c_.n_tgt}, stream_);
        dense.sources.push_back([n = c_.n_tgt, bias = weights_.read(weights_.find("output_bias", 1, c_.n_tgt), 0, 1, c_.n_tgt)](
                                    int first, int last, float*, float* biases) {
            for (int i = first; i < last; i++) biases[i - first] = i < n ? bias[i] : kNever;
        });
        return dense;
    }

    Buffer<float> output_rows() const { return c_.tied ? Buffer<float>() : table(output_name(), c_.n_tgt); }

    void load(Stack& stack, bool decoder) const {
        const std::string side = decoder ? "tgt_embedding" : "src_embedding", name = decoder ? "decoder" : "encoder";
        if (!(decoder ? c_.tied && m_.precision == Precision::int8 : c_.tied_inputs)) stack.embedding = table(side + ".table", decoder ? c_.n_tgt : c_.n_src);
        if (c_.positions == kLearned) stack.positions = table(side + ".positions.embedding", c_.max_positions);
        const std::string biases = side + ".positions.bias.weight";
        if (c_.positions == kT5) stack.score_biases = weights_.read(weights_.find(biases, kBuckets, c_.n_heads, true), 0, kBuckets, c_.n_heads);
        if (c_.embedding_norm) stack.embedding_norm = norm(side + ".norm");
        if (c_.pre_norm) stack.final_norm = norm(name + ".norm");
        for (int i = 0; i < (decoder ? c_.n_decoder_layers : c_.n_encoder_layers); i++) {
            const std::string block = name + ".blocks." + std::to_string(i);
            Layer layer;
            if (decoder && c_.recurrent) layer.gate_value = matrix(block + ".self_attention.gate_value", {2, c_.d_model, m_.width}, stream_);
            else layer.self = self_attention(block + ".self_attention");
            layer.self_norm = norm(block + ".self_attention_residual.norm");
            if (decoder && !c_.decoder_only) {
                layer.cross = cross_attention(block + ".cross_attention");
                layer.cross_norm = norm(block + ".cross_attention_residual.norm");
            }
            const Parts inner{c_.gated ? 2 : 1, c_.d_ff, m_.inner};  // gated: the values come after all (padded) gates
            layer.expand = matrix(block + ".feed_forward.expand", inner, stream_);
            layer.contract = matrix(block + ".feed_forward.contract", stream_, {1, c_.d_ff, c_.d_ff});
            layer.feed_forward_norm = norm(block + ".feed_forward_residual.norm");
            stack.layers.push_back(std::move(layer));
        }
    }

private:
    const char* output_name() const { return c_.tied ? "tgt_embedding.table" : "output_embedding"; }

    const Model& m_;
    const transduce_config& c_;
    const Weights& weights_;
    Parts stream_, query_, key_, value_, output_;
    float query_scale_;
};

Precision precision_of(const transduce_config& config, const Kernels& kernels) {
    if (config.precision == 2) return Precision::int8;
    return config.precision == 1 && kernels.bf16x3.multiply ? Precision::bf16x3 : Precision::float32;
}

const ProductKernels& products_of(Precision precision, const Kernels& kernels) {
    if (precision == Precision::int8) return kernels.int8;
    return precision == Precision::bf16x3 ? kernels.bf16x3 : kernels.float32;
}

}  // namespace

Model::Model(const transduce_config& given, const transduce_tensor* tensors, int64_t n_tensors, transduce_read read)
    : config(checked(given)), kernels(kernels_for(chosen_isa())), precision(precision_of(config, kernels)),
      products(products_of(precision, kernels)),
      attention(precision == Precision::int8 ? kernels.attention_int8 : kernels.attention_float32) {
    width = int(round_up(config.d_model, kPad));
    inner = int(round_up(config.d_ff, kPad));
    heads = {config.n_heads, config.n_kv_heads, int(round_up(std::max(config.d_key, config.d_value), 16))};
    if (config.guided_layer >= 0) guided.push_back({config.guided_layer, config.guided_head});
    query_width = heads.heads * heads.head_width, key_width = heads.key_width();
    const Weights weights(tensors, n_tensors, read);
    const Loader loader(*this, weights);
    loader.load(decoder, true);
    if (!config.decoder_only) loader.load(encoder, false), memory = loader.memory_projection();
    const DenseMatrix dense = loader.logits();
    weights.check_all_used();
    logits = loader.pack_matrix(dense);
    screened_rows = precision == Precision::int8 ? 0 : kernels.screened_rows;
    if (screened_rows) screen = pack(dense, Precision::int8, kernels.int8.panel, true), output_rows = loader.output_rows();
    max_depth = int(round_up(std::max({width, inner, query_width}), kPad));
    max_columns = std::max({int(round_up(query_width + 2 * key_width, kPad)), config.gated ? 2 * inner : inner, config.recurrent ? 2 * width : width});
}

const float* Model::embedding(const Stack& stack, int token, float* row) const {
    const Buffer<float>& table = stack.embedding.size() ? stack.embedding : decoder.embedding;
    if (table.size()) return table.data() + size_t(token) * width;
    unpack(logits, products.panel, token, row);
    return row;
}

}  // namespace transduce
