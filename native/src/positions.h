// Positional schemes: vectors that are added to embeddings, angles by which queries and keys are rotated, or biases of attention scores.
#pragma once

#include <vector>

#include "model.h"

namespace transduce {

// Vectors, angles and biases are computed when they are first needed.
class Positions {
public:
    explicit Positions(const Model& model, const Stack& stack);
    const float* added(int position);  // the vector that is added to the embedding; null: none
    const float* cosines(int position);  // of the angles of all planes
    const float* sines(int position) { return cosines(position) + half_; }
    int half() const { return half_; }  // number of planes of a head that are rotated
    // The biases of a query for keys from position 0 on, in the layout of AttentionCall; null: none. The positions of query and keys must be
    // reserved.
    const float* biases(int query) const { return reach_ ? &biases_[size_t(reach_ - query) * 4] : nullptr; }
    size_t bias_stride() const { return size_t(reach_) * 8; }
    // Computes the biases for all positions below n. This changes the addresses of biases.
    void reserve_biases(int n);

private:
    const float* row(int position);
    void compute(int position, float* row) const;
    float bias(int head, int distance) const;
    const Model& model_;
    const Stack& stack_;
    int half_ = 0, stride_ = 0;
    std::vector<float> rows_;
    int reach_ = 0;  // distances from -reach to reach - 1 are known
    std::vector<float> biases_;
};

}  // namespace transduce
