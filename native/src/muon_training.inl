// Muon (Jordan et al. 2024): momentum, then Newton-Schulz steps with rounded operands and float32 in between. Included after attention_training.inl
// and loss_training.inl.

namespace {

using transduce::MuonCall;
using transduce::MuonMatrix;

// Computes a panel of columns, from `first` on, of a symmetric product [rows, rows]. Rows before `first` are copied from earlier columns.
void symmetric_panel(const Number* left, int depth, int rows, const Number* panel, int first, float* to, size_t stride) {
    multiply_panel(left + size_t(first) * depth, depth, rows - first, panel, depth, to + first * stride + first, stride, false);
    for (int r = 0; r < first; r++)
        for (int c = first; c < rows && c < first + kPanelColumns; c++) to[r * stride + c] = to[c * stride + r];
}

// Updates the running mean of the gradient, and computes the update [rows, columns] with Nesterov momentum.
void muon_momentum(const MuonCall& call, const MuonMatrix& matrix, float* update) {
    const Vec kept = splat(matrix.momentum), scale = splat(call.scale);
    const int64_t n = int64_t(matrix.rows) * matrix.columns;
    for (int64_t i = 0; i < n; i += W) {
        const int part = n - i < W ? int(n - i) : W;
        const Vec grad = load_part(matrix.grad + i, part) * scale;
        const Vec mean = fma(load_part(matrix.mean + i, part) - grad, kept, grad);
        store_part(matrix.mean + i, part, mean);
        store_part(update + i, part, fma(mean - grad, kept, grad));
    }
}

// Makes the whole step for a matrix; a tall matrix is transposed. The size of `memory` is in training_optimizer.cpp.
void muon_step(const MuonCall& call, const MuonMatrix& matrix, float* memory) {
    const Products products;
    const bool is_tall = matrix.rows > matrix.columns;
    const int rows = std::min(matrix.rows, matrix.columns), columns = std::max(matrix.rows, matrix.columns);
    const int depth = (rows + 31) / 32 * 32, width = (columns + 31) / 32 * 32;
    const size_t gram_stride = (rows + kPanelColumns - 1) / kPanelColumns * kPanelColumns;
    const size_t stride = (columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns, size = padded(rows) * stride;
    float *x = memory, *gram = x + size, *product = gram + rows * gram_stride, *whole = product + rows * gram_stride;
    Number *left = reinterpret_cast<Number*>(whole + size), *right = left + size_t(rows) * std::max(width, depth);
    muon_momentum(call, matrix, whole);
    if (is_tall) flip(whole, rows, columns, rows, x, stride);
    double square = 0;
    for (int r = 0; r < rows; r++) {
        Vec sum = zero();
        for (int c = 0; c < int(stride); c += W) {
            const Vec value = is_tall ? load_part(x + r * stride + c, columns - c) : load_part(whole + size_t(r) * columns + c, columns - c);
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
    const size_t row = is_tall ? padded(rows) : stride;
    const float* found = is_tall ? whole : x;
    if (is_tall) flip(x, stride, rows, columns, whole, row);
    const Vec rate = splat(-matrix.rate), weight_kept = splat(matrix.weight_kept);
    for (int r = 0; r < matrix.rows; r++)
        for (int k = 0; k < matrix.columns; k += W) {
            float* weight = matrix.weight + size_t(r) * matrix.columns + k;
            const int n = matrix.columns - k;
            store_part(weight, n, fma(load_part(found + r * row + k, n), rate, load_part(weight, n) * weight_kept));
        }
}

}  // namespace
