// A Transformer (encoder-decoder or decoder-only) whose weights are packed for one precision and instruction set. It does not change, so that
// threads can share it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "transduce_native.h"

namespace transduce {

enum { kNoPositions, kLearned, kRotary, kT5, kAlibi, kSinusoidal, kSinusoidalHalves, kFairseq, kMarian };
constexpr int kBuckets = 32;  // number of buckets of T5's distances

struct AttentionWeights {
    PackedMatrix query;   // projection to queries and, in self-attention, to keys and values beside them
    PackedMatrix output;  // its bias is added by the norm that follows
};

struct Layer {
    AttentionWeights self, cross;  // cross: only in decoder layers
    PackedMatrix gate_value;       // projection of the recurrent unit that replaces `self`: gates, then values, each padded to the width
    PackedMatrix expand, contract;
    NormWeights self_norm, cross_norm, feed_forward_norm;
};

struct Stack {
    Buffer<float> embedding;  // [tokens, width]; empty: see Model::embedding
    Buffer<float> positions;  // learned: [max_positions, width]
    std::vector<float> score_biases;  // T5's: [kBuckets, heads]
    NormWeights embedding_norm, final_norm;
    std::vector<Layer> layers;
};

// A head of cross-attention.
struct Head {
    int layer, head;
};

struct Model {
    Model(const transduce_config& config, const transduce_tensor* tensors, int64_t n_tensors, transduce_read read);

    // Returns the embedding of a token: from the stack's table, else from the decoder's table, else unpacked from `logits` into `row`.
    const float* embedding(const Stack& stack, int token, float* row) const;

    transduce_config config;
    const Kernels& kernels;
    Precision precision;
    const ProductKernels& products;
    const AttentionKernels& attention;  // attention of the decoder; the encoder's is in float32
    int width;                   // d_model, padded
    int inner;                   // d_ff, padded; a gated network has twice as many inner columns
    HeadShape heads;             // head_width: the larger of d_key and d_value, padded to a multiple of 16: zeros change no score
    int query_width, key_width;  // widths of all heads together, with padding inside heads only
    std::vector<Head> guided;    // the head that was trained to align, if any
    int max_depth, max_columns;  // largest inputs and outputs of all products except the logits
    Stack encoder, decoder;
    PackedMatrix memory;  // keys and values of all decoder layers' cross-attention, from the encoder's output
    PackedMatrix logits;
    // Screening, for greedy search without scores: int8 products with error bounds find the few tokens that may be the best, and float32
    // products with rows of `output` decide among these tokens. The result does not change, and only a quarter of the bytes is read.
    // `screened_rows`: the largest number of rows for which screening is faster; 0: never.
    int screened_rows = 0;
    PackedMatrix screen;
    Buffer<float> output_rows;  // [tokens, width]; empty: the decoder's embedding is used
    const float* output(int token) const { return (output_rows.size() ? output_rows : decoder.embedding).data() + size_t(token) * width; }
};

}  // namespace transduce
