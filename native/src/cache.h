// The decoding state of sentences: blocks of keys and values, which never move, or states of recurrent units.
#pragma once

#include <algorithm>
#include <vector>

#include "buffer.h"
#include "kernels.h"

namespace transduce {

// Allocates blocks. A block has room for kBlockKeys keys and values of every decoder layer: keys and values of layer 0, then of layer 1, etc.
class BlockPool {
public:
    // `part`: size in bytes of the keys of one layer in a block, equal to the size of its values.
    BlockPool(int n_layers, size_t part) : part_(part), block_(part * 2 * n_layers) {}

    char* take() {
        if (free_.empty()) grow();
        char* block = free_.back();
        free_.pop_back();
        return block;
    }
    // Frees blocks for other sentences, and empties the list.
    void put_back(std::vector<char*>& blocks) {
        free_.insert(free_.end(), blocks.begin(), blocks.end());
        blocks.clear();
    }
    char* keys(char* block, int layer) const { return block + part_ * 2 * layer; }
    char* values(char* block, int layer) const { return keys(block, layer) + part_; }

private:
    void grow() {
        const size_t n = std::max<size_t>(1, (size_t(4) << 20) / block_);  // 4 MB at once
        slabs_.emplace_back(block_ * n);
        n_blocks_ += n;
        free_.reserve(n_blocks_);
        for (size_t i = n; i-- > 0;) free_.push_back(slabs_.back().data() + i * block_);
    }
    size_t part_, block_, n_blocks_ = 0;
    std::vector<Buffer<char>> slabs_;
    std::vector<char*> free_;
};

// Makes a mask with a one bit for each of n keys.
inline void fill_mask(std::vector<uint16_t>& mask, int n) {
    mask.assign((n + kBlockKeys - 1) / kBlockKeys, 0xffff);
    if (n % kBlockKeys) mask.back() = uint16_t((1 << n % kBlockKeys) - 1);
}

// Records which keys belong to which hypothesis of a sentence. The keys and values of every token have a place (an index) in the sentence's
// blocks. A hypothesis is the set of its tokens' places, stored as a bit mask. If two hypotheses continue the same hypothesis, its mask is
// copied; keys and values are not. Places that no hypothesis uses any more are reused.
class Ancestors {
public:
    // Starts with one hypothesis of `n_known` tokens, whose places are 0, 1, and so on.
    void start(int n_known = 0) {
        n_rows_ = 1;
        if (masks_.empty()) masks_.resize(1);
        fill_mask(masks_[0], n_known);
        n_blocks_ = int(masks_[0].size());
    }
    int n_blocks() const { return n_blocks_; }
    const uint16_t* mask(int row) const { return masks_[row].data(); }

    // Gives every hypothesis a place for its next token.
    void add_tokens(std::vector<int>& places) {
        used_.assign(n_blocks_, 0);
        for (int r = 0; r < n_rows_; r++)
            for (int b = 0; b < n_blocks_; b++) used_[b] |= masks_[r][b];
        places.resize(n_rows_);
        int block = 0;
        for (int r = 0; r < n_rows_; r++) {
            while (block < n_blocks_ && used_[block] == 0xffff) block++;
            if (block == n_blocks_) used_.push_back(0), n_blocks_++;
            const int bit = __builtin_ctz(~unsigned(used_[block]));
            used_[block] |= uint16_t(1 << bit);
            places[r] = block * kBlockKeys + bit;
            masks_[r].resize(block + 1 > int(masks_[r].size()) ? block + 1 : masks_[r].size());
            masks_[r][block] |= uint16_t(1 << bit);
        }
        for (int r = 0; r < n_rows_; r++) masks_[r].resize(n_blocks_);
    }
    // Replaces all hypotheses by `n_rows` hypotheses; hypothesis i continues the earlier hypothesis parent(i).
    template <class Parent>
    void reorder(int n_rows, Parent parent) {
        if (int(next_.size()) < n_rows) next_.resize(n_rows);
        for (int i = 0; i < n_rows; i++) next_[i] = masks_[parent(i)];
        masks_.swap(next_);
        n_rows_ = n_rows;
    }

private:
    int n_blocks_ = 0, n_rows_ = 1;
    std::vector<std::vector<uint16_t>> masks_, next_;
    std::vector<uint16_t> used_;
};

// Causal masks: a token attends to itself and to all earlier tokens, in up to `n_blocks` blocks.
//
// A mask consists of ones for full blocks, the bits of one partly visible block, and zeros. All places with the same remainder modulo
// kBlockKeys share one array (strip) of this form; their masks begin at different offsets in it.
class CausalMasks {
public:
    void reserve(int n_blocks) {
        if (n_blocks <= n_blocks_) return;
        n_blocks_ = n_blocks;
        strips_.assign(size_t(2 * n_blocks) * kBlockKeys, 0);
        for (int bits = 0; bits < kBlockKeys; bits++) {
            uint16_t* strip = &strips_[size_t(2 * n_blocks) * bits];
            std::fill_n(strip, n_blocks, uint16_t(0xffff));
            strip[n_blocks] = uint16_t((2u << bits) - 1);
        }
    }
    // Returns the mask of the token in a place; it is valid until `reserve` is called.
    const uint16_t* mask(int place) const {
        return &strips_[size_t(2 * n_blocks_) * (place % kBlockKeys) + n_blocks_ - place / kBlockKeys];
    }

private:
    int n_blocks_ = 0;
    std::vector<uint16_t> strips_;
};

// The states of recurrent units (SSRU) of one sentence: one vector per hypothesis and layer. Unlike keys and values, states are copied when
// hypotheses are reordered.
class RecurrentStates {
public:
    // Starts with one hypothesis, whose states are zeros.
    void start(int n_layers, size_t width) { width_ = width, row_ = n_layers * width, now_.assign(row_, 0.f); }
    float* at(int row, int layer) { return &now_[row * row_ + layer * width_]; }
    // Replaces all hypotheses by `n_rows` hypotheses; hypothesis i continues the earlier hypothesis parent(i).
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
