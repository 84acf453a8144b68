// The output layer with cross-entropy, in parts that training_loss.cpp divides among threads. Included after product_bf16.inl or
// panels_float32.inl.
//
// For a row with logits l, largest logit m and z = sum e^(l - m), the gradient of the logits is e^(l - m) / z - (1 - s) onehot - s / V. The
// products use E = e^(l - m) with zero at the gold token. The terms of the gold token and of the constant s / V are added afterwards, in float32.

namespace {

using LossBlock = transduce::LossBlock<Number>;
using transduce::LossSizes;

constexpr int kLossColumns = 512;  // columns of the vocabulary whose exponentials are multiplied at once

float square_of(const float* x, int n) {
    Vec sum = zero();
    for (int k = 0; k < n; k += W) sum = fma(load_part(x + k, n - k), load_part(x + k, n - k), sum);
    return sum_of(sum);
}

// Packs the weights of a panel of tokens as columns and as rows, and sums them over tokens. Returns the largest squared norm of a token's weights.
float pack_panel(const LossSizes& s, const float* weight, int panel, Number* columns, Number* rows, float* sum) {
    const int first = panel * kPanelColumns, n = s.vocabulary - first < kPanelColumns ? s.vocabulary - first : kPanelColumns;
    weight += size_t(first) * s.width;
    pack_transposed(weight, s.width, n, s.width, s.padded_width(), columns);
    for (int k = 0; k < s.width; k += W) {
        Vec total = zero();
        for (int i = 0; i < n; i++) total = total + load_part(weight + size_t(i) * s.width + k, s.width - k);
        store(sum + k, total);
    }
    for (int part = 0; part < s.width_panels(); part++) {
        const int k = part * kPanelColumns;
        pack_rows(weight + k, s.width, n, kPanelColumns, s.width - k, rows + (size_t(part) * s.padded_vocabulary() + first) * kPanelColumns);
    }
    float most = 0;
    for (int i = 0; i < n; i++) most = std::max(most, square_of(weight + size_t(i) * s.width, s.width));
    return most;
}

// Computes the logits [rows, 64] of a block for the panel whose first column is v.
void panel_logits(const LossSizes& s, const LossBlock& b, int v, float* logits, size_t stride) {
    multiply_panel(b.hidden, s.padded_width(), b.rows, b.columns + size_t(v) * s.padded_width(), s.padded_width(), logits, stride, false);
    if (!b.bias && s.vocabulary - v >= kPanelColumns) return;
    for (int r = 0; r < b.rows; r++, logits += stride)
        for (int c = 0; c < kPanelColumns; c += W) {
            const int left = s.vocabulary - v - c;
            const Vec x = b.bias ? load(logits + c) + load_part(b.bias + v + c, left) : load(logits + c);
            store(logits + c, first_lanes(x, left, splat(-1e30f)));
        }
}

// Finds the largest logit of each row. Keeps all logits [rows, padded vocabulary] if kKeepsLogits.
void find_largest(const LossSizes& s, const LossBlock& b) {
    const size_t stride = kKeepsLogits ? s.padded_vocabulary() : kPanelColumns;
    for (int r = 0; r < b.rows * W; r += W) store(b.largest + r, splat(-HUGE_VALF));
    for (int v = 0; v < s.padded_vocabulary(); v += kPanelColumns) {
        float* logits = b.logits + (kKeepsLogits ? v : 0);
        panel_logits(s, b, v, logits, stride);
        for (int r = 0; r < b.rows; r++, logits += stride) {
            Vec most = load(b.largest + r * W);
            for (int c = 0; c < kPanelColumns; c += W) most = max(most, load(logits + c));
            store(b.largest + r * W, most);
        }
    }
    for (int r = 0; r < b.rows; r++) b.largest[r] = max_of(load(b.largest + r * W));
}

// The address, in the panels of the chunk, of the exponential of an even row r and a column; for row r + 1 see place_in_rows.
Number* place(const LossBlock& b, int r, int column) {
    const size_t panel = size_t(column / kPanelColumns) * b.chunk_rows * kPanelColumns;
    return b.panels + panel + size_t(b.first + r) * kPanelColumns + place_in_rows(0, column % kPanelColumns);
}

// Computes the exponentials of the panel whose first column is v, rounded, as rows (`to`) and in panels; adds them to the rows' sums.
void exponentials(const LossBlock& b, int v, const float* logits, size_t stride, Number* to) {
    const Vec scale = splat(kLog2E);
    Number* panel = to ? place(b, 0, v) : nullptr;
    for (int r = 0; r < b.rows; r += 2, logits += 2 * stride) {
        const Vec largest[2] = {splat(b.largest[r]), splat(b.largest[r + 1])};
        Vec sums[2] = {load(b.sums + r * W), load(b.sums + (r + 1) * W)};
        for (int c = 0; c < kPanelColumns; c += W) {
            Vec e[2];
            for (int i = 0; i < 2; i++) {
                e[i] = exp2((load(logits + i * stride + c) - largest[i]) * scale);
                sums[i] = sums[i] + e[i];
            }
            if (to) store_rows(to + c, to + kLossColumns + c, panel + place_in_rows(0, c), e[0], e[1]);
        }
        for (int i = 0; i < 2; i++) store(b.sums + (r + i) * W, sums[i]);
        if (to) to += 2 * kLossColumns, panel += 2 * kPanelColumns;
    }
}

void remove_gold(const LossBlock& b, int r, int first, int last) {
    const int64_t gold = b.gold[r];
    if (gold < first || gold >= last) return;
    b.exponentials[size_t(r) * kLossColumns + (gold - first)] = 0;
    place(b, r - r % 2, int(gold))[place_in_rows(r % 2, 0)] = 0;
}

constexpr float kLeast = 0x1p-60f;  // sums below this lose precision: exponentials are at least 2^-126

// Computes the normalizers, the exponentials, and the products of the exponentials with the weights. If `checks`, stops and returns false if the
// sums over the first columns are too small.
bool weigh_tokens(const LossSizes& s, const LossBlock& b, bool checks) {
    const size_t stride = kKeepsLogits ? s.padded_vocabulary() : kPanelColumns;
    for (int r = 0; r < b.rows * W; r += W) store(b.sums + r, zero());
    for (int first = 0; first < s.padded_vocabulary(); first += kLossColumns) {
        const int last = first + kLossColumns < s.padded_vocabulary() ? first + kLossColumns : s.padded_vocabulary();
        for (int v = first; v < last; v += kPanelColumns) {
            float* logits = b.logits + (kKeepsLogits ? v : 0);
            if (!kKeepsLogits) panel_logits(s, b, v, logits, stride);
            for (int r = 0; r < b.rows; r++)
                if (b.gold[r] >= v && b.gold[r] < v + kPanelColumns) b.gold_logits[r] = logits[r * stride + (b.gold[r] - v)];
            exponentials(b, v, logits, stride, b.exponentials ? b.exponentials + (v - first) : nullptr);
        }
        for (int r = 0; checks && r < b.rows; r++)
            if (!(sum_of(load(b.sums + r * W)) >= kLeast)) return false;
        checks = false;
        if (!b.exponentials) continue;
        for (int r = 0; r < b.rows; r++) remove_gold(b, r, first, last);
        for (int part = 0; part < s.width_panels(); part++) {
            const Number* rows = b.rows_of_weight + (size_t(part) * s.padded_vocabulary() + first) * kPanelColumns;
            multiply_panel(b.exponentials, kLossColumns, b.rows, rows, last - first, b.products + part * kPanelColumns, s.width_panels() * kPanelColumns,
                    first > 0);
        }
    }
    for (int r = 0; r < b.rows; r++) b.sums[r] = sum_of(load(b.sums + r * W));
    return true;
}

// Computes a block of rows. In bfloat16, exponentials are e^(logit - bound), with an upper bound of the row's logits, so that each logit is used
// once, while it is in the cache. Only if the bound is far too high, the largest logit is found first and used instead.
void loss_block(const LossSizes& s, const LossBlock& b) {
    const Products products;
    if (!kKeepsLogits && weigh_tokens(s, b, true)) return;
    find_largest(s, b);
    weigh_tokens(s, b, false);
}

void transpose_rows(const float* const* from, const float* factors, int rows, int width, size_t stride, Number* to) {
    for (int r = 0; r < rows; r += W)
        for (int k = 0; k < width; k += W) {
            Ints part[W];
            for (int i = 0; i < W; i++) part[i] = from[r + i] ? (Ints)(load_part(from[r + i] + k, width - k) * splat(factors[r + i])) : Ints{};
            transpose(part);
            for (int i = 0; i < W && k + i < width; i++) store(to + (k + i) * stride + r, (Vec)part[i]);
        }
    round_row(factors, rows, rows, to + width * stride);
}

// grad [width + 1, 64] of a panel, transposed, += hidden [width + 1, rows] times the exponentials.
void weight_gradient(const Number* hidden, size_t stride, int width, const Number* exponentials, int rows, float* grad, bool add) {
    const Products products;
    multiply_panel(hidden, stride, width, exponentials, rows, grad, kPanelColumns, add);
}

// Writes the rows of the gradient of the weights of a panel, minus `less` [width].
void unpack_gradient(const LossSizes& s, const float* grad, int panel, const float* less, float* to) {
    const int first = panel * kPanelColumns, n = s.vocabulary - first < kPanelColumns ? s.vocabulary - first : kPanelColumns;
    for (int k = 0; k < s.width; k += W) {
        const int known = s.width - k < W ? s.width - k : W;
        const Vec constant = load_part(less + k, known);
        for (int c = 0; c < n; c += W) {
            Ints part[W];
            for (int i = 0; i < W; i++) part[i] = i < known ? (Ints)load(grad + size_t(k + i) * kPanelColumns + c) : Ints{};
            transpose(part);
            for (int i = 0; i < W && c + i < n; i++) store_part(to + size_t(first + c + i) * s.width + k, known, (Vec)part[i] - constant);
        }
    }
}

}  // namespace
