// Training kernels, for operands in float32 or, if the CPU has bfloat16 products, in bfloat16 (uint16_t).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace transduce {

constexpr int kPanelColumns = 64;
constexpr int kRowStep = 32;   // number of rows that products that sum over rows take at a time
constexpr int kMostRows = 96;  // maximum number of rows that a thread takes at once
constexpr int kPieceRows = 128;  // number of rows in a piece of work without products
constexpr int kPackedRows = 256;  // number of rows of a layer's input that are packed together in float32: see panels_float32.inl

// Number of rows that a thread takes at once: smaller if there are few rows, so that all threads have work. It does not depend on the number of
// threads, so that results do not depend on it either.
inline int rows_at_once(int64_t rows) { return rows <= 2 * kMostRows ? kRowStep : kMostRows; }

// The output layer with label-smoothed cross-entropy, and its gradients (Vaswani et al. 2017, section 5.4).
struct LossCall {
    const float* hidden;   // [rows, width]
    const float* weight;   // [vocabulary, width]
    const float* bias;     // [vocabulary]; null: none
    const int64_t* gold;   // [rows]; a row whose target is `pad` has no loss
    int64_t rows, pad;
    int width, vocabulary;
    float smoothing;
    float *grad_hidden, *grad_weight, *grad_bias;  // grad_weight: null without gradients
};
struct Loss {
    double loss = 0, nll = 0;  // sums in nats
};

// ---- parts of the computation that are compiled once for each instruction set

struct LossSizes {
    int width, vocabulary;
    int padded_width() const { return (width + 31) / 32 * 32; }
    int width_panels() const { return (width + kPanelColumns - 1) / kPanelColumns; }
    int padded_vocabulary() const { return (vocabulary + kPanelColumns - 1) / kPanelColumns * kPanelColumns; }
    int panels() const { return padded_vocabulary() / kPanelColumns; }
};

// The computation of the loss for a block: rows [first, first + rows) of a chunk of `chunk_rows` rows. All three numbers are even.
template <class Number>
struct LossBlock {
    int first, rows, chunk_rows;
    const Number* hidden;            // [rows, padded width]
    const int64_t* gold;             // [rows]; -1: none
    const Number *columns, *rows_of_weight;  // the weight, packed by columns and by rows
    const float* bias;
    float* logits;                   // [rows, padded vocabulary], or [rows, 64] if the kernels do not keep logits
    float* largest;                  // [16 rows]; the first `rows` are inputs, bounds of the logits
    float* sums;                     // [16 rows]; the first `rows` are results, the sums of exponentials
    float* gold_logits;              // [rows]
    Number* exponentials;            // [rows, loss_columns]; null: no gradients
    Number* panels;                  // panels of the chunk's exponentials
    float* products;                 // [rows, width panels * 64]: exponentials times weights
};

// Dropout with a given seed. The seed and the index of an element decide whether the element is dropped.
struct Dropout {
    uint32_t below;  // elements whose 32 random bits are below this are dropped; 0: no dropout
    float scale;     // factor of the elements that are kept
    uint64_t seed;
};
inline Dropout dropout_of(float p, uint64_t seed) { return {uint32_t(std::llround(double(p) * 4294967296.0)), 1 / (1 - p), seed}; }

// Attention of all heads of some sequences. The numbers of a head at a position are contiguous. A tensor's three strides, in numbers, are along
// sequences, heads and positions. The output is contiguous: [batch, positions, heads, width].
template <class Number>
struct HeadsCall {
    int64_t batch;
    int heads, kv_heads, queries, keys, width, value_width;
    bool causal;               // whether later keys are hidden from a query; there must be as many keys as queries
    float scale;
    Dropout dropout;           // dropout on attention weights
    const Number *query, *key, *value;
    int64_t query_strides[3], key_strides[3], value_strides[3];
    const float* bias;         // is added to scores; contiguous along keys; null: none
    int64_t bias_strides[3];   // 0: the bias is broadcast along this axis
    Number* output;            // forward pass; null in the backward pass
    const Number* grad_output; // backward pass
    int64_t grad_strides[3];
    Number *grad_query, *grad_key, *grad_value;
    int64_t grad_query_strides[3], grad_key_strides[3], grad_value_strides[3];

    int block() const { return queries < 64 ? queries : 64; }  // number of queries that are computed at a time
};

// Computes the output or, if `output` is null, the gradients.
template <class Number>
void attend(const HeadsCall<Number>& call, int n_threads);

// An embedding layer, dropout(table[ids] * scale + positions), in float32. Row r is at position r % length.
struct EmbeddingCall {
    int64_t rows, length;
    int width, vocabulary;
    const int64_t* ids;          // [rows]
    const float *table, *positions;  // table: [vocabulary, width]; positions: [length, width], or null
    float scale;
    Dropout dropout;
    float* output;
    const float* grad_output;    // backward pass
    float *grad_table, *grad_positions;  // null: not computed
    bool adds;                   // whether the gradient is added to grad_table instead of replacing its values
};

constexpr int kEmbeddingShares = 32;  // number of parts of the vocabulary, each a piece of work

void embedding(const EmbeddingCall& call, int n_threads);
void embedding_backward(const EmbeddingCall& call, int n_threads);

// A residual connection x + dropout(update), and its norm, which is LayerNorm or, if `rms`, RMSNorm. Rows have `width` numbers.
template <class Number>
struct ResidualCall {
    int64_t rows;
    int width;
    const float* x;              // null: zeros
    const Number* update;        // null: none
    const float *gain, *shift;   // a null shift is zero
    float epsilon;
    bool rms;
    Dropout dropout;
    float* sum;                  // x + dropout(update); null: not stored, as without an update
    float* statistics;           // [rows, 2]: mean and 1 / deviation; null: no norm
    float* output;               // the result of the norm; null: not stored
    Number* rounded;             // the result of the norm, rounded to Number; null: not stored
    const float *grad_output, *normed;  // backward pass; `normed` is the input of the norm
    const Number* grad_rounded;  // one of grad_rounded and grad_output may be null
    const float* grad_kept;      // gradient of uses of x other than the norm; null: none
    float* grad_x;               // null without a norm, because it then equals grad_output
    Number* grad_update;
    float *grad_gain, *grad_shift;
    bool adds = false;           // whether gradients are added to grad_gain and grad_shift
};

template <class Number>
void residual(const ResidualCall<Number>& call, int n_threads);
template <class Number>
void residual_backward(const ResidualCall<Number>& call, int n_threads);

// A linear layer, x weight^T + bias, which may be followed by an activation and dropout.
template <class Number>
struct LinearCall {
    int64_t rows;
    int inputs, outputs;
    const void* x;               // [rows, inputs]
    bool x_is_number, grad_is_number;  // whether x and its gradient, and grad_output, have the type Number; false: float32
    const float *weight, *bias;  // weight: [outputs, inputs]; bias: [outputs], or null
    bool activates;
    Activation activation;
    Dropout dropout;             // after the activation
    Number* output;              // [rows, outputs]
    Number* slope;               // [rows, outputs]: the derivative of the activation; null: not stored, as for ReLU, where `output` shows it
    const void* grad_output;     // backward pass
    void* grad_x;                // has the type of x; null: not computed
    float *grad_weight, *grad_bias;  // grad_bias: null without a bias
    bool adds;                   // whether the gradient is added to grad_x
    bool adds_weights = false;   // whether gradients are added to grad_weight and grad_bias
    int64_t padded_rows = 0;     // padded rows of the left operand of the gradient of the weights, in bfloat16 also of the right operand
    int padded_outputs = 0;

    // Number of columns of packed inputs.
    int64_t padded_inputs() const { return round_up(inputs, kPanelColumns); }
};

// A range of rows of the packed operands of the gradient of the weights.
template <class Number>
struct OperandRows {
    int64_t first, rows;
    const Number *left, *right;  // operands of all rows
};

template <class Number>
void linear(const LinearCall<Number>& call, int n_threads);
template <class Number>
void linear_backward(const LinearCall<Number>& call, int n_threads);

// The gate of a feed-forward network, dropout(activation(gate) * value), or its gradient. A row of `hidden` [rows, 2 width] contains the gates,
// then the values.
template <class Number>
struct GateCall {
    int width;
    Activation activation;
    Dropout dropout;
    const Number* hidden;
    Number* output;              // [rows, width]; null in the backward pass
    const Number* grad_output;
    Number* grad_hidden;
};

// Rotary positions: rotates the planes (i, i + width / 2) of each head, in place. The heads are at the beginning of rows of `row` numbers.
template <class Number>
struct RotateCall {
    int positions, heads, width, row;
    const float *cos, *sin;      // [positions, width / 2]
    float direction;             // 1, or -1 in the backward pass
    Number* numbers;
};

constexpr int kRecurrentColumns = 64;  // number of columns that a thread takes at once

// The simpler simple recurrent unit, or its gradient: relu(c_t) with c_t = f_t c_t-1 + (1 - f_t) v_t and f = sigmoid(gates). A row of `hidden`
// [sequences, positions, 2 width] contains the gates, then the values v.
template <class Number>
struct RecurrentCall {
    int positions, width;
    const Number* hidden;
    Number* output;              // [sequences, positions, width]; null in the backward pass
    const Number* grad_output;
    Number* grad_hidden;
};

// A matrix that Muon changes, and the running mean of its gradient: weight becomes weight_kept * weight - rate * (orthogonalized update). The
// update is orthogonalized approximately: each step replaces X by a X + (b G + c G G) X with G = X X^T.
struct MuonMatrix {
    float* weight;
    const float* grad;
    float* mean;
    int rows, columns;
    float rate, weight_kept, momentum;
};

struct MuonCall {
    float scale;            // factor of the gradients
    float coefficients[3];  // a, b and c of the Newton-Schulz steps
    int steps;
};

// Products are in bfloat16 if the CPU has instructions for them.
void muon(const MuonMatrix* matrices, int64_t n, const MuonCall& call, int n_threads);

// A tensor that Adam changes, the moments of its gradient, and the number of updates that have changed it.
struct AdamTensor {
    float* weight;
    const float* grad;
    float *mean, *square;  // running means of the gradient and of its square
    float* step;
    int64_t n;
};

struct AdamOptions {
    double lr, beta1, beta2, epsilon, weight_decay, scale;  // `scale`: factor of the gradients
};

// Factors of one update of a tensor, with the corrections of the moments' bias.
struct AdamFactors {
    float beta1, beta2, weight_kept, rate, root, epsilon, scale;
};

void adam(const AdamTensor* tensors, int64_t n, const AdamOptions& options, int n_threads);

// Computes the Euclidean norm of all numbers of `n` tensors together.
double norm(const float* const* tensors, const int64_t* sizes, int64_t n, int n_threads);

template <class Number>
struct TrainingKernels {
    bool keeps_logits;
    int loss_columns;
    int gradient_rows, gradient_columns;  // size of the block of a layer's weight gradient that is computed at once; halved if there is little work
    int gradient_step;           // size of the smallest block
    void (*round_row)(const float* from, int n, int width, Number* to);
    float (*square_of)(const float* x, int n);
    float (*pack_panel)(const LossSizes& sizes, const float* weight, int panel, Number* columns, Number* rows, float* sum);
    void (*loss_block)(const LossSizes& sizes, const LossBlock<Number>& block);
    // Writes each row times its factor as a column of `to` [width + 1, stride], whose last row gets the factors. Rows that are null count as zeros.
    // `rows` is a multiple of 32.
    void (*transpose_rows)(const float* const* from, const float* factors, int rows, int width, size_t stride, Number* to);
    void (*weight_gradient)(const Number* hidden, size_t stride, int width, const Number* exponentials, int rows, float* grad, bool add);
    void (*unpack_gradient)(const LossSizes& sizes, const float* grad, int panel, const float* less, float* to);
    // Attention of groups [first, last) of heads that share keys and values. `memory`: see scratch_size in training_rows.cpp.
    void (*attend_groups)(const HeadsCall<Number>& call, int64_t first, int64_t last, float* memory);
    void (*pack_weight_columns)(const LinearCall<Number>& call, int panel, Number* to);
    void (*pack_weight_rows)(const LinearCall<Number>& call, int first, Number* to);
    void (*linear_rows)(const LinearCall<Number>& call, int64_t first, int rows, const Number* columns, Number* rounded, float* product);
    void (*linear_rows_backward)(const LinearCall<Number>& call, int64_t first, int rows, int padded, const Number* weight_rows, Number* left,
                                 Number* right, float* grad_bias, Number* rounded, float* product);
    void (*weight_rows_gradient)(const LinearCall<Number>& call, const OperandRows<Number>& operands, int first, int rows, int column, int columns,
                                 float* product, float* grad_weight);
    // Compute rows [first, last). The backward pass adds to the gradients of gain and shift, [padded width].
    void (*residual_rows)(const ResidualCall<Number>& call, int64_t first, int64_t last);
    void (*residual_rows_backward)(const ResidualCall<Number>& call, int64_t first, int64_t last, float* grad_gain, float* grad_shift);
    void (*dropout_rows_backward)(const ResidualCall<Number>& call, int64_t first, int64_t last);
    void (*embedding_rows)(const EmbeddingCall& call, int64_t first, int64_t last);
    void (*embedding_gradient)(const EmbeddingCall& call, int rest);
    void (*position_gradient)(const EmbeddingCall& call, int64_t position);
    void (*gate_rows)(const GateCall<Number>& call, int64_t first, int64_t last);
    void (*rotate_rows)(const RotateCall<Number>& call, int64_t first, int64_t last);
    void (*recur_columns)(const RecurrentCall<Number>& call, int64_t sequence, int first, float* states);
    void (*muon_step)(const MuonCall& call, const MuonMatrix& matrix, float* memory);
    void (*adam_numbers)(const AdamTensor& tensor, const AdamFactors& factors, int64_t first, int64_t last);
    double (*sum_of_squares)(const float* numbers, int64_t n);
};
#if defined(__x86_64__)
extern const TrainingKernels<uint16_t> kBf16Kernels, kAmxBf16Kernels;
extern const TrainingKernels<float> kAvx2TrainingKernels, kAvx512TrainingKernels;
#endif
// Returns the training kernels for this CPU; null if there are none.
template <class Number>
const TrainingKernels<Number>* training_kernels();
template <>
const TrainingKernels<uint16_t>* training_kernels();
template <>
const TrainingKernels<float>* training_kernels();

// Calls `work` with a value of the type of the numbers: uint16_t for bfloat16, or float.
template <class Work>
void with_numbers(bool is_bf16, Work work) {
    if (is_bf16) work(uint16_t());
    else work(float());
}

template <class Number>
Loss smoothed_loss(const LossCall& call, int n_threads);

}  // namespace transduce
