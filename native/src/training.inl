// All kernels of training for the instruction set that the including file is compiled for.

#include <algorithm>

#include "training.h"
#include "vec.h"

#include "product_bf16.inl"

#include "activations.inl"
#include "dropout.inl"
#include "attention_training.inl"
#include "linear_bf16.inl"
#include "loss_bf16.inl"
#include "norm_training.inl"
#include "orthogonalize.inl"

namespace {

constexpr transduce::TrainingKernels kTraining = {
    kLossColumns, round_row, pack_panel, loss_block, weight_gradient, unpack_gradient, attend_group, attend_group_backward,
    pack_columns, pack_rows, linear_rows, linear_rows_backward, weight_rows_gradient,
    residual_rows, residual_rows_backward, dropout_rows_backward, orthogonalize_matrix,
};

}  // namespace
