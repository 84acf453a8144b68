// Computes a whole stack of Transformer blocks in training, and its gradients, with the kernels of training.h.
#pragma once

#include <cstdint>

#include "transduce_native.h"

namespace transduce {

// The size in bytes of the memory `kept`, in which the forward pass saves values for the backward pass.
int64_t stack_memory(const transduce_stack_call& call);
void stack(const transduce_stack_call& call, int n_threads);
void stack_backward(const transduce_stack_call& call, int n_threads);

}  // namespace transduce
