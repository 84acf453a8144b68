// Positions: vectors that are added to embeddings, or angles by which queries and keys are rotated.
#pragma once

#include <vector>

#include "model.h"

namespace transduce {

// Computed when they are first needed.
class Positions {
public:
    explicit Positions(const Model& model, const Stack& stack);
    const float* added(int position);  // to the embedding; null: nothing
    const float* cosines(int position);
    const float* sines(int position) { return cosines(position) + half_; }
    int half() const { return half_; }  // planes of a head that are rotated; 0: none

private:
    const float* row(int position);
    void compute(int position, float* row) const;
    const Model& model_;
    const Stack& stack_;
    int half_ = 0, stride_ = 0;
    std::vector<float> rows_;
};

}  // namespace transduce
