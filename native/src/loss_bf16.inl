// The output layer with cross-entropy, in parts that training_loss.cpp divides among threads. Included after product_bf16.inl.
//
// Of a row with logits l, largest logit m and z = sum e^(l - m), the gradient of the logits is e^(l - m) / z - (1 - s) onehot - s / V. The
// products take E = e^(l - m) with zero in the place of the gold token; that token and the constant are added afterwards in float32.

namespace {

using transduce::LossBlock;
using transduce::LossSizes;

constexpr int kLossColumns = 512;  // of the vocabulary, whose exponentials are multiplied at once

// A panel of the weights: as columns, as rows, and their sum.
void pack_panel(const LossSizes& s, const float* weight, int panel, Bf16* columns, Bf16* rows, float* sum) {
    const int first = panel * kPanelColumns, n = s.vocabulary - first < kPanelColumns ? s.vocabulary - first : kPanelColumns;
    weight += size_t(first) * s.width;
    pack_transposed(weight, s.width, n, s.width, s.padded_width(), columns);
    for (int k = 0; k < s.width; k += W) {
        Vec total = zero();
        for (int i = 0; i < n; i++) total = total + load_part(weight + size_t(i) * s.width + k, s.width - k);
        store(sum + k, total);
    }
    for (int part = 0; part < s.width_panels(); part++) {
        Bf16* to = rows + (size_t(part) * s.padded_vocabulary() + first) * kPanelColumns;
        const int k = part * kPanelColumns;
        for (int i = 0; i < kPanelColumns; i += 2, to += 2 * kPanelColumns) {
            const float* row = weight + size_t(i) * s.width + k;
            interleave_rows(row, i + 1 < n ? row + s.width : nullptr, i < n ? s.width - k : 0, to);
        }
    }
}

// Logits [rows, padded vocabulary] of a block, and the largest of each row.
void block_logits(const LossSizes& s, const LossBlock& b) {
    const size_t stride = s.padded_vocabulary();
    for (int r = 0; r < b.rows * W; r += W) store(b.largest + r, splat(-HUGE_VALF));
    for (int v = 0; v < s.padded_vocabulary(); v += kPanelColumns) {
        product_bf16(b.hidden, s.padded_width(), b.rows, b.columns + size_t(v) * s.padded_width(), s.padded_width() / 2, b.logits + v, stride, false);
        for (int r = 0; r < b.rows; r++) {
            float* logits = b.logits + r * stride + v;
            Vec most = load(b.largest + r * W);
            for (int c = 0; c < kPanelColumns; c += W) {
                const int left = s.vocabulary - v - c;
                Vec x = b.bias ? load(logits + c) + load_part(b.bias + v + c, left > 0 ? left : 0) : load(logits + c);
                if (left < W) x = _mm512_mask_mov_ps(splat(-1e30f), __mmask16(left > 0 ? (1u << left) - 1 : 0), x);
                if (b.bias || left < W) store(logits + c, x);
                most = max(most, x);
            }
            store(b.largest + r * W, most);
        }
    }
}

// Rows r and r + 1 of the exponentials of columns [first, last): rounded, as rows and interleaved, and their sums.
void exponentials(const LossSizes& s, const LossBlock& b, int r, int first, int last, Vec* sums) {
    const size_t stride = s.padded_vocabulary();
    const Vec scale = splat(kLog2E);
    Vec shift[2];
    for (int i = 0; i < 2; i++) shift[i] = splat(max_of(load(b.largest + (r + i) * W)) * -kLog2E);
    for (int v = first; v < last; v += W) {
        Vec e[2];
        for (int i = 0; i < 2; i++) {
            e[i] = exp2(fma(load(b.logits + (r + i) * stride + v), scale, shift[i]));
            sums[i] = sums[i] + e[i];
            if (b.exponentials) store_bf16(b.exponentials + size_t(r + i) * kLossColumns + (v - first), e[i]);
        }
        const size_t panel = size_t(v / kPanelColumns) * b.chunk_rows * kPanelColumns;
        if (b.exponentials) _mm512_storeu_si512(b.interleaved + panel + (size_t(b.first / 2 + r / 2) * kPanelColumns + v % kPanelColumns) * 2, interleaved(e[0], e[1]));
    }
}

void remove_gold(const LossBlock& b, int r, int first, int last) {
    const int64_t gold = b.gold[r];
    if (gold < first || gold >= last) return;
    b.exponentials[size_t(r) * kLossColumns + (gold - first)] = 0;
    const size_t panel = size_t(gold / kPanelColumns) * b.chunk_rows * kPanelColumns;
    b.interleaved[panel + (size_t((b.first + r) / 2) * kPanelColumns + gold % kPanelColumns) * 2 + (b.first + r) % 2] = 0;
}

// A block of rows: normalizers, exponentials, and the products of these with the weights.
void loss_block(const LossSizes& s, const LossBlock& b) {
    const Products products;
    block_logits(s, b);
    for (int r = 0; r < b.rows; r++) b.sums[r] = 0;
    for (int first = 0; first < s.padded_vocabulary(); first += kLossColumns) {
        const int last = first + kLossColumns < s.padded_vocabulary() ? first + kLossColumns : s.padded_vocabulary();
        for (int r = 0; r < b.rows; r += 2) {
            Vec sums[2] = {zero(), zero()};
            exponentials(s, b, r, first, last, sums);
            for (int i = 0; i < 2; i++) b.sums[r + i] += sum_of(sums[i]);
        }
        if (!b.exponentials) continue;
        for (int r = 0; r < b.rows; r++) remove_gold(b, r, first, last);
        for (int part = 0; part < s.width_panels(); part++) {
            const Bf16* rows = b.rows_of_weight + (size_t(part) * s.padded_vocabulary() + first) * kPanelColumns;
            product_bf16(b.exponentials, kLossColumns, b.rows, rows, (last - first) / 2, b.products + part * kPanelColumns,
                         s.width_panels() * kPanelColumns, first > 0);
        }
    }
    for (int r = 0; r < b.rows; r++) b.largest[r] = max_of(load(b.largest + r * W));
}

// grad [width + 1, 64] of a panel, transposed, += hidden [width + 1, rows] times the exponentials.
void weight_gradient(const Bf16* hidden, size_t stride, int width, const Bf16* exponentials, int rows, float* grad, bool add) {
    const Products products;
    product_bf16(hidden, stride, width, exponentials, rows / 2, grad, kPanelColumns, add);
}

// Of a panel: rows of the gradient of the weights, minus `less` [width].
void unpack_gradient(const LossSizes& s, const float* grad, int panel, const float* less, float* to) {
    const int first = panel * kPanelColumns, n = s.vocabulary - first < kPanelColumns ? s.vocabulary - first : kPanelColumns;
    for (int k = 0; k < s.width; k += W) {
        const int known = s.width - k < W ? s.width - k : W;
        const Vec constant = load_part(less + k, known);
        for (int c = 0; c < n; c += W) {
            __m512i part[W];
            for (int i = 0; i < W; i++) part[i] = i < known ? _mm512_loadu_si512(grad + size_t(k + i) * kPanelColumns + c) : _mm512_setzero_si512();
            transpose(part);
            for (int i = 0; i < W && c + i < n; i++)
                _mm512_mask_storeu_ps(to + size_t(first + c + i) * s.width + k, __mmask16((1u << known) - 1), (Vec)part[i] - constant);
        }
    }
}

}  // namespace
