// The tokens that the output of a sentence may consist of, with their columns of the output matrix side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "model.h"

namespace transduce {

class Shortlist {
public:
    // Copies the columns of these tokens, in ascending order, in the model's precision; no tokens: the whole vocabulary.
    void start(const Model& model, const std::vector<int32_t>& ids);

    bool empty() const { return ids_.empty(); }
    const PackedMatrix& logits() const { return logits_; }
    // Where a token is in the list; -1 stays -1. It must be in the list.
    int32_t place(int32_t token) const;
    // The token at a place; those of columns that are only padding have no meaning.
    int32_t token(int32_t place) const { return place < int32_t(ids_.size()) ? ids_[place] : 0; }

private:
    std::vector<int32_t> ids_;
    PackedMatrix logits_;
};

}  // namespace transduce
