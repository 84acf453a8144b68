// Kernels of training, for CPUs with bfloat16 products.
#pragma once

#include <cstddef>
#include <cstdint>

namespace transduce {

constexpr int kPanelColumns = 64;

// The output layer with label-smoothed cross-entropy, and its gradients (Vaswani et al. 2017, section 5.4).
struct LossCall {
    const float* hidden;   // [rows, width]
    const float* weight;   // [vocabulary, width]
    const float* bias;     // [vocabulary]; null: none
    const int64_t* gold;   // [rows]; those that are `pad` have no loss
    int64_t rows, pad;
    int width, vocabulary;
    float smoothing;
    float* grad_hidden;    // null: no gradients
    float *grad_weight, *grad_bias;
};
struct Loss {
    double loss = 0, nll = 0;  // sums in nats
};

// ---- parts, compiled for an instruction set

struct LossSizes {
    int width, vocabulary;
    int padded_width() const { return (width + 31) / 32 * 32; }
    int width_panels() const { return (width + kPanelColumns - 1) / kPanelColumns; }
    int padded_vocabulary() const { return (vocabulary + kPanelColumns - 1) / kPanelColumns * kPanelColumns; }
    int panels() const { return padded_vocabulary() / kPanelColumns; }
};

// Rows [first, first + rows) of a chunk of `chunk_rows`; even numbers.
struct LossBlock {
    int first, rows, chunk_rows;
    const uint16_t* hidden;          // [rows, padded width]
    const int64_t* gold;             // [rows]; -1: none
    const uint16_t *columns, *rows_of_weight;  // packed weights
    const float* bias;
    float* logits;                   // [rows, padded vocabulary]
    float *largest, *sums;           // [16 rows], [rows]: the largest logits, the sums of exponentials
    uint16_t* exponentials;          // [rows, loss_columns]; null: no gradients
    uint16_t* interleaved;           // of the chunk: [panels][chunk_rows / 2][64][2]
    float* products;                 // [rows, width panels * 64]: exponentials times weights
};

struct TrainingKernels {
    int loss_columns;
    void (*round_row)(const float* from, int n, int width, uint16_t* to);
    void (*pack_panel)(const LossSizes& sizes, const float* weight, int panel, uint16_t* columns, uint16_t* rows, float* sum);
    void (*loss_block)(const LossSizes& sizes, const LossBlock& block);
    void (*weight_gradient)(const uint16_t* hidden, size_t stride, int width, const uint16_t* exponentials, int rows, float* grad, bool add);
    void (*unpack_gradient)(const LossSizes& sizes, const float* grad, int panel, const float* less, float* to);
};
#if defined(__x86_64__)
extern const TrainingKernels kBf16Kernels;
#endif
// Those of this CPU; null: none.
const TrainingKernels* training_kernels();

Loss smoothed_loss(const LossCall& call, int n_threads);

}  // namespace transduce
