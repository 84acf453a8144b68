// The stack of an encoder or a decoder of a Transformer, and its gradients: the kernels of training, layer after layer.
#pragma once

#include <cstdint>

#include "transduce_native.h"

namespace transduce {

// Bytes that the forward pass keeps for the backward pass.
int64_t stack_memory(const transduce_stack_call& call);
void stack(const transduce_stack_call& call, int n_threads);
void stack_backward(const transduce_stack_call& call, int n_threads);

}  // namespace transduce
