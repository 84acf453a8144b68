// States of the recurrent units (SSRU) that may take the place of a decoder's self-attention.
#pragma once

#include <algorithm>
#include <vector>

namespace transduce {

// Of one sentence: one vector per hypothesis and layer. Unlike keys and values, states are copied when hypotheses are reordered.
class RecurrentStates {
public:
    // One hypothesis whose states are zeros.
    void start(int n_layers, size_t width) { width_ = width, row_ = n_layers * width, now_.assign(row_, 0.f); }
    float* at(int row, int layer) { return &now_[row * row_ + layer * width_]; }
    // From now on hypothesis i continues what was hypothesis parent(i).
    template <class Parent>
    void reorder(int n_rows, Parent parent) {
        next_.resize(n_rows * row_);
        for (int i = 0; i < n_rows; i++) std::copy_n(now_.begin() + parent(i) * row_, row_, next_.begin() + i * row_);
        now_.swap(next_);
    }

private:
    size_t width_ = 0, row_ = 0;
    std::vector<float> now_, next_;
};

}  // namespace transduce
