// Newton-Schulz steps of Muon (Jordan et al. 2024): rounded operands, float32 in between. Included after loss_training.inl.

namespace {

using transduce::OrthogonalizeCall;

// Columns from `first` on of a symmetric product [rows, rows], of which those before are known: only rows from `first` on are multiplied.
void symmetric_panel(const Number* left, int depth, int rows, const Number* panel, int first, float* to, size_t stride) {
    multiply_panel(left + size_t(first) * depth, depth, rows - first, panel, depth, to + first * stride + first, stride, false);
    for (int r = 0; r < first; r++)
        for (int c = first; c < rows && c < first + kPanelColumns; c++) to[r * stride + c] = to[c * stride + r];
}

// One matrix [rows, columns], rows <= columns. Rows in `memory`, whose size training_orthogonalize.cpp computes, are padded to panels.
void orthogonalize_matrix(const OrthogonalizeCall& call, int64_t matrix, float* memory) {
    const Products products;
    const int rows = call.rows, columns = call.columns, depth = (rows + 31) / 32 * 32, width = (columns + 31) / 32 * 32;
    const size_t gram_stride = (rows + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
    const size_t stride = (columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
    float *x = memory, *gram = x + rows * stride, *product = gram + rows * gram_stride, *whole = product + rows * gram_stride;
    Number *left = reinterpret_cast<Number*>(whole + rows * stride), *right = left + size_t(rows) * std::max(width, depth);
    const float* from = call.matrices + size_t(matrix) * rows * columns;
    double square = 0;
    for (int r = 0; r < rows; r++) {
        Vec sum = zero();
        for (int c = 0; c < int(stride); c += W) {
            const Vec value = load_part(from + size_t(r) * columns + c, columns - c);
            sum = fma(value, value, sum);
            store(x + r * stride + c, value);
        }
        square += sum_of(sum);
    }
    const Vec inverse = splat(1 / std::max(float(std::sqrt(square)), 1e-7f));
    for (size_t i = 0; i < rows * stride; i += W) store(x + i, load(x + i) * inverse);
    const auto round_all = [&](const float* values, size_t from_stride, int n, int to_stride) {
        for (int r = 0; r < rows; r++) round_row(values + r * from_stride, n, to_stride, left + size_t(r) * to_stride);
    };
    const auto rows_as_panel = [&](const float* values, size_t from_stride, int first) {  // of 64 columns
        pack_rows(values + first, from_stride, rows, depth, kPanelColumns, right);
    };
    const Vec a = splat(call.coefficients[0]), b = splat(call.coefficients[1]), c = splat(call.coefficients[2]);
    for (int step = 0; step < call.steps; step++) {
        round_all(x, stride, columns, width);
        for (int first = 0; first < rows; first += kPanelColumns) {  // G = X X^T
            pack_transposed(x + first * stride, stride, std::min(rows - first, kPanelColumns), columns, width, right);
            symmetric_panel(left, width, rows, right, first, gram, gram_stride);
        }
        round_all(gram, gram_stride, rows, depth);
        for (int first = 0; first < rows; first += kPanelColumns) {  // b G + c G G
            rows_as_panel(gram, gram_stride, first);
            symmetric_panel(left, depth, rows, right, first, product, gram_stride);
        }
        for (size_t i = 0; i < rows * gram_stride; i += W) store(product + i, fma(load(product + i), c, load(gram + i) * b));
        round_all(product, gram_stride, rows, depth);
        for (int first = 0; first < columns; first += kPanelColumns) {  // a X + (b G + c G G) X
            rows_as_panel(x, stride, first);
            multiply_panel(left, depth, rows, right, depth, whole + first, stride, false);
        }
        for (size_t i = 0; i < rows * stride; i += W) store(x + i, fma(load(x + i), a, load(whole + i)));
    }
    float* to = call.matrices + size_t(matrix) * rows * columns;
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < columns; k += W) store_part(to + size_t(r) * columns + k, columns - k, load(x + r * stride + k));
}

}  // namespace
