// All kernels of training for the instruction set that the including file is compiled for.

#include <algorithm>

#include "training.h"
#include "vec.h"

#if defined(__AMX_BF16__)
#include "tiles.inl"
#endif
#if defined(__AVX512BF16__)
#include "product_bf16.inl"
#else
#include "product_strided.inl"
#include "panels_float32.inl"
#endif

#include "activations.inl"
#include "dropout.inl"
#include "embedding_training.inl"
#include "attention_training.inl"
#include "linear_training.inl"
#include "block_training.inl"
#include "loss_training.inl"
#include "norm_training.inl"
#include "optimizer_training.inl"
#include "muon_training.inl"

namespace {

constexpr transduce::TrainingKernels<Number> kTraining = {
    kKeepsLogits, kLossColumns, kGradientRows, kGradientColumns, kGradientStep,
    round_row, square_of, pack_panel, loss_block, transpose_rows, weight_gradient, unpack_gradient, attend_groups,
    pack_weight_columns, pack_weight_rows, linear_rows, linear_rows_backward, weight_rows_gradient,
    residual_rows, residual_rows_backward, dropout_rows_backward, embedding_rows, embedding_gradient, position_gradient, gate_rows, rotate_rows,
    recur_columns, muon_step,
    adam_numbers, sum_of_squares,
};

}  // namespace
