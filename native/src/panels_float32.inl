// The operands of float32 products in training; product_bf16.inl has the same functions for bfloat16.
// Included after product_strided.inl.
//
// C [rows, 64] = A B. A: rows of numbers. B, packed: panels of 64 columns [rows][64].

namespace {

using transduce::kPackedRows, transduce::kPanelColumns;
using Number = float;

constexpr bool kKeepsLogits = true;
constexpr int kColumnsAtOnce = kMostVecs * W;  // columns that a product keeps in registers

struct Products {
    Products() {}  // avoids a warning of an unused variable
};

// C [rows, 64] = A [rows, depth] times a panel, added to C if `add`.
void multiply_panel(const float* a, size_t stride, int rows, const float* b, int depth, float* c, size_t c_stride, bool add) {
    constexpr int kDepth = 256;
    constexpr bool kCopies = kColumnsAtOnce < kPanelColumns;
    alignas(64) float some[kCopies ? kDepth * kColumnsAtOnce : 1];
    for (int k = 0; k < depth; k += kDepth) {
        const int n = depth - k < kDepth ? depth - k : kDepth;
        for (int at = 0; at < kPanelColumns; at += kColumnsAtOnce) {
            const float* part = b + size_t(k) * kPanelColumns + at;
            // A panel's rows, 256 bytes apart, evict one another from the L1 cache. For few rows of A a copy takes too long.
            const bool copies = kCopies && rows > 24;
            for (int i = 0; copies && i < n; i++) std::memcpy(some + i * kColumnsAtOnce, part + size_t(i) * kPanelColumns, kColumnsAtOnce * sizeof(float));
            product_columns<kMostVecs>(a + k, stride, 1, rows, copies ? some : part, copies ? kColumnsAtOnce : kPanelColumns, n, c + at, c_stride, add || k);
        }
    }
}

// Copies a row of n numbers, and pads it with zeros to `width`.
void round_row(const float* from, int n, int width, float* to) {
    std::memcpy(to, from, size_t(n) * sizeof(float));
    std::memset(to + n, 0, size_t(width - n) * sizeof(float));
}

// Packs rows of at most 64 numbers as `padded` rows of a panel; the rows from `rows` on are zero.
void pack_rows(const float* from, size_t stride, int rows, int padded, int n, float* to) {
    for (int r = 0; r < padded; r++, to += kPanelColumns)
        round_row(from + size_t(r) * stride, r < rows ? (n < kPanelColumns ? n : kPanelColumns) : 0, kPanelColumns, to);
}

// Stores W numbers of two rows (a, b) twice: as rows, and in a panel, where `in_panel` is the address of the first number of a.
inline void store_rows(float* row, float* next, float* in_panel, Vec a, Vec b) {
    store(row, a), store(next, b);
    store(in_panel, a), store(in_panel + kPanelColumns, b);
}
// The offset from `in_panel` of the number in a row (0 or 1) and a column.
inline size_t place_in_rows(int row, int column) { return size_t(row) * kPanelColumns + column; }

// Packs `rows` rows (at most 64) of n numbers as columns of a panel, to [width][64]; the remaining columns are zero.
void pack_transposed(const float* from, size_t stride, int rows, int n, int width, float* to) {
    for (int k = 0; k < width; k += W)
        for (int c = 0; c < kPanelColumns; c += W) {
            Ints part[W];
            for (int i = 0; i < W; i++) part[i] = c + i < rows ? (Ints)load_part(from + size_t(c + i) * stride + k, n - k) : Ints{};
            transpose(part);
            for (int i = 0; i < W; i++) store(to + size_t(k + i) * kPanelColumns + c, (Vec)part[i]);
        }
}

using LinearCall = transduce::LinearCall<float>;
using OperandRows = transduce::OperandRows<float>;

// The gradient of a layer's weights is A^T B over all rows. A, the gradient of the outputs, is read as rows. B, the inputs, is packed:
// for each chunk of rows, the columns that a product takes at once are contiguous, [kPackedRows][kColumnsAtOnce].
constexpr bool kPacksLeft = false;
constexpr int kGradientRows = 48, kGradientColumns = 128, kGradientStep = 128;  // computed at once: 8 times the 6 rows of a product

// Packs rows [first, first + rows) of B.
void pack_operands(const LinearCall& call, const float*, int, int64_t first, int rows, int, float*, float* right) {
    const int n = call.inputs;
    for (int r = 0; r < rows; r++) {
        const float* from = static_cast<const float*>(call.x) + (first + r) * n;
        const int64_t in_chunk = (first + r) % kPackedRows;
        float* to = right + (first + r - in_chunk) * call.padded_inputs() + in_chunk * kColumnsAtOnce;
        for (int k = 0; k < n; k += kColumnsAtOnce) round_row(from + k, n - k < kColumnsAtOnce ? n - k : kColumnsAtOnce, kColumnsAtOnce, to + k * kPackedRows);
    }
}

// Computes product [rows, kGradientColumns], for `rows` outputs from `first` on and `columns` inputs from `column` on.
void multiply_operands(const LinearCall& call, const OperandRows& operands, int first, int rows, int column, int columns,
                       float* product) {
    alignas(64) float some[kPackedRows * kGradientRows];  // rows of A, contiguous
    const float* a = (call.activates ? operands.left : static_cast<const float*>(call.grad_output)) + first;
    const size_t stride = call.activates ? (call.outputs + 31) / 32 * 32 : call.outputs;
    const int64_t end = operands.first + operands.rows;
    for (int64_t r = operands.first; r < end; r += kPackedRows) {
        const float* right = operands.right + r * call.padded_inputs();
        const int depth = int(end - r < kPackedRows ? end - r : kPackedRows);
        for (int k = 0; k < depth; k++) std::memcpy(some + k * kGradientRows, a + (r + k) * stride, size_t(rows) * sizeof(float));
        for (int c = 0; c < columns; c += kColumnsAtOnce)
            product_columns<kMostVecs>(some, 1, kGradientRows, rows, right + (column + c) * kPackedRows, kColumnsAtOnce, depth, product + c,
                                       kGradientColumns, r > operands.first);
    }
}

}  // namespace
