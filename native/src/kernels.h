// The functions that are compiled once for each instruction set, and access to the functions for this CPU.
#pragma once

#include <cstdint>

#include "cpu.h"
#include "product.h"

namespace transduce {

enum class NormKind { layer, rms };
enum class Activation { relu, gelu, gelu_tanh, silu };

struct NormWeights {
    NormKind kind = NormKind::layer;
    int width = 0;  // without padding
    float epsilon = 0;
    Buffer<float> gain, bias;  // padded with zeros
};

// The numbers of heads and their width. head_width: padded to a multiple of 16.
struct HeadShape {
    int heads = 0, kv_heads = 0, head_width = 0;
    int key_width() const { return kv_heads * head_width; }
};

// The arguments of an attention kernel: all heads of a few queries that share keys and values.
//
// Keys and values are stored in blocks of kBlockKeys. Keys: [4 groups][key_width / 4][4 keys][4 numbers], so that a vector
// register has four numbers of each of several keys, and the scores of four heads are computed side by side. Values:
// [kBlockKeys][key_width]. In int8, a number is q * scale; scales [heads / 4][kBlockKeys][4 heads] follow the numbers.
// Queries are already scaled by log2(e) / sqrt(d_key), biases by log2(e): softmax uses 2^x.
constexpr int kBlockKeys = 16;
constexpr float kLog2E = 1.4426950408889634f;
struct AttentionCall {
    HeadShape heads;
    int n_blocks = 0;
    const char* const* keys = nullptr;  // the keys of each block
    const char* const* values = nullptr;
    int n_queries = 0;
    const float* const* queries = nullptr;
    const uint16_t* const* masks = nullptr;  // for each query, a number per block, with a bit for each key that the query attends to
    const float* const* biases = nullptr;    // for each query, the biases of its scores: [heads / 4][keys][4 heads]; null: none
    size_t bias_stride = 0;                  // number of floats from the biases of four heads to the biases of the next four heads
    float* const* outputs = nullptr;
    float* scratch = nullptr;  // attention_scratch(n_blocks, n_queries) floats
    // A head whose scores for the first n_scores keys are stored: the scores of query q are written to scores[q] + place.
    struct WantedHead {
        int head;
        size_t place;
    };
    const WantedHead* wanted = nullptr;
    int n_wanted = 0, n_scores = 0;
    float* const* scores = nullptr;
};
inline size_t attention_scratch(int n_blocks, int n_queries) {
    return size_t(n_queries) * n_blocks * kBlockKeys * 4 + size_t(n_blocks) * kBlockKeys;
}

// Attention over keys and values of one type.
struct AttentionKernels {
    size_t (*bytes)(const HeadShape& heads);  // size in bytes of the keys of a block, equal to the size of its values; a multiple of 64
    void (*attend)(const AttentionCall& call);
    // Writes a key and a value as number `at` (below kBlockKeys) of a block.
    void (*store)(const HeadShape& heads, char* keys, char* values, int at, const float* key, const float* value);
};

// The result so far of a search through the columns of a row of logits: the `k` best tokens, and the sum of exponentials.
struct RowBest {
    int k = 0, n = 0;          // n: number of tokens found so far, at most k
    float* values = nullptr;   // logits of the best tokens, best first
    int32_t* ids = nullptr;    // their ids
    float forced = 0;          // the logit of the row's forced token
    float shift = 0;           // `sum` is the sum of 2^((logit - shift) * log2 e)
    alignas(64) float sum[16] = {};
    bool started = false;
};

// A search with int8 products for the best column (token) of a row of logits: the columns that may still be the best.
//
// With w' and x' as the int8 forms of w and x, |w x - w' x'| <= |w - w'| |x| + |w'| |x - x'|. This bounds each logit from above and below.
// A column may be the best if its upper bound reaches the largest lower bound.
struct Screen {
    static constexpr int kMost = 256;
    float norm = 0, error = 0;  // norms of x and of x - x'
    float lower = 2 * kNever;   // largest lower bound
    int n = 0;                  // number of columns that may be the best; above kMost, the search has failed
    float upper[kMost];
    int32_t ids[kMost];
};

constexpr int kGroupColumns = kPad;  // number of columns that sampling skips or adds up together

struct Kernels {
    ProductKernels float32, int8, bf16x3;  // a null `multiply`: this precision is not available
    int max_queries;                       // maximum number of queries of an attention call
    int screened_rows;                     // maximum number of rows for which screening is faster in float32 models, see Model

    // Writes the norm of x + pending (or of x, if `pending` is null) to `out`, which may be x. `keep`: also adds `pending` to x.
    void (*norm)(const NormWeights& w, float* x, size_t stride, int rows, const float* pending, bool keep, float* out);
    // Applies an activation in place; gated: x[0:width] = activate(x[0:width]) * x[width:2 width].
    void (*activate)(Activation kind, bool gated, float* x, size_t stride, int rows, int width);
    // out = scale * embedding + position; a null position is zero.
    void (*embed)(const float* embedding, float scale, const float* position, int width, float* out);
    // Rotates the planes (i, i + half) of each head by angles [half].
    void (*rotate)(float* x, int heads, int head_width, int half, const float* cos, const float* sin);
    // A step of a recurrent unit. `gate_value`: `width` logits of gates, then `width` values. f = sigmoid(gate),
    // state = f * state + (1 - f) * value, x += max(state, 0).
    void (*recur)(const float* gate_value, float* state, int width, float* x);
    AttentionKernels attention_float32, attention_int8;
    // Takes the next `n` logits of a row, of the columns from `first` on, into its result. `scores`: also sums their exponentials. Columns in
    // `banned` count in the sum but are never chosen. Changes `logits`.
    void (*take_logits)(RowBest& row, float* logits, int n, int first, const int32_t* banned, int n_banned, bool scores);
    // start_screen begins a search for a row of activations x whose int8 form has this scale. take_bounds takes the int8 logits of columns
    // [first, first + n); `error`, `norm`: norms of the quantization errors and of the int8 forms of these columns of the weights. drop removes
    // columns that can no longer be the best.
    void (*start_screen)(Screen& screen, const float* x, int width, float scale);
    void (*take_bounds)(Screen& screen, const float* logits, int n, int first, const float* error, const float* norm);
    void (*drop)(Screen& screen);
    // Computes sum + a b in the order of the float32 products, so that the result has the same bits as they have.
    float (*dot)(float sum, const float* a, const float* b, int n);
    // group_maxima computes the largest logit of each group of kGroupColumns columns. weigh computes weights e^(scale (logit - largest)), and the
    // sum of the weights of each group.
    void (*group_maxima)(const float* logits, int n, float* maxima);
    void (*weigh)(const float* logits, int n, float scale, float largest, float* weights, float* sums);
    // Call this at the end of a thread's work.
    void (*release)();
};

// Returns log(sum of e^logit) over all columns that `take_logits` has taken into a row's result.
float log_sum_exp(const RowBest& row);

// The kernels for an instruction set, which must be available.
const Kernels& kernels_for(Isa isa);

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvxVnniKernels, kAvx512Kernels, kVnniKernels, kAmxKernels;
#elif defined(__aarch64__)
extern const Kernels kNeonDotKernels, kNeonI8mmKernels;
#endif

}  // namespace transduce
