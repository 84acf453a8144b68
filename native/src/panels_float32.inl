// The operands of products in training where these are of float32 numbers; product_bf16.inl has the same functions for bfloat16.
// Included after product_strided.inl.
//
// C [rows, 64] = A B. A: rows of numbers. B, packed: panels of 64 columns [rows][64].

namespace {

using transduce::kPanelColumns;
using Number = float;

struct Products {
    Products() {}  // not an unused variable
};

// C [rows, 64] = A [rows, depth] times a panel, added to C if `add`.
void multiply_panel(const float* a, size_t stride, int rows, const float* b, int depth, float* c, size_t c_stride, bool add) {
    constexpr int kDepth = 256;  // of 16 columns of a panel, or of all: they stay in the cache
    for (int k = 0; k < depth; k += kDepth)
        product_float32(a + k, stride, 1, rows, b + size_t(k) * kPanelColumns, kPanelColumns, depth - k < kDepth ? depth - k : kDepth, kPanelColumns, c,
                        c_stride, add || k);
}

// A row of n numbers, with zeros up to `width`.
void round_row(const float* from, int n, int width, float* to) {
    std::memcpy(to, from, size_t(n) * sizeof(float));
    std::memset(to + n, 0, size_t(width - n) * sizeof(float));
}

// Rows of at most 64 numbers as `padded` rows of a panel; those from `rows` on are zero.
void pack_rows(const float* from, size_t stride, int rows, int padded, int n, float* to) {
    for (int r = 0; r < padded; r++, to += kPanelColumns)
        round_row(from + size_t(r) * stride, r < rows ? (n < kPanelColumns ? n : kPanelColumns) : 0, kPanelColumns, to);
}

// Two rows of numbers in a panel, of which `to` is the first number in the first row.
inline void store_rows(float* to, Vec a, Vec b) { store(to, a), store(to + kPanelColumns, b); }
// The place of a number of two such rows.
inline size_t place_in_rows(int row, int column) { return size_t(row) * kPanelColumns + column; }

// Rows of `n` numbers become columns of a panel: `rows` of at most 64, the others zero. to: [width][64].
void pack_transposed(const float* from, size_t stride, int rows, int n, int width, float* to) {
    for (int k = 0; k < width; k += W)
        for (int c = 0; c < kPanelColumns; c += W) {
            Ints part[W];
            for (int i = 0; i < W; i++) part[i] = c + i < rows ? (Ints)load_part(from + size_t(c + i) * stride + k, n - k) : Ints{};
            transpose(part);
            for (int i = 0; i < W; i++) store(to + size_t(k + i) * kPanelColumns + c, (Vec)part[i]);
        }
}

// The left operand of a product A^T B over `all` rows of A, in parts: rows [first, first + padded) of `columns` numbers, of which `rows`
// are known and the others zero. Panels of 64 columns, [all][64].
void pack_left(const float* from, size_t stride, int rows, int padded, int columns, int64_t first, int64_t all, float* to) {
    for (int k = 0; k < columns; k += kPanelColumns) pack_rows(from + k, stride, rows, padded, columns - k, to + size_t(k) * all + first * kPanelColumns);
}

// C [columns, 64] = A^T B for columns of A from `column` on, of one panel, and `rows` rows from row `first` on, which b begins with.
void product_over_rows(const float* left, int64_t all, int column, int columns, int64_t first, const float* b, int rows, float* c, bool add) {
    const int in_panel = column % kPanelColumns;
    const float* a = left + size_t(column - in_panel) * all + first * kPanelColumns + in_panel;
    product_float32(a, 1, kPanelColumns, columns, b, kPanelColumns, rows, kPanelColumns, c, kPanelColumns, add);
}

}  // namespace
