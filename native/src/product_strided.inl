// Products of float32 numbers whose operands are rows with any strides, for training. Included after vec.h.

namespace {

constexpr int kMostVecs = W == 16 ? 4 : 2;  // 6 rows of sums: 24 of 32 registers, or 12 of 16

// C [ROWS, VECS vectors] = A B. Element (r, k) of A is at r * a_row + k * a_next, so that A may be transposed. A row's vectors in C are `c_next`
// apart.
template <int ROWS, int VECS>
void small_product(const float* a, size_t a_row, size_t a_next, const float* b, size_t b_stride, int depth, float* c, size_t c_stride, bool add,
                   size_t c_next) {
    Vec sum[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) sum[r][v] = add ? load(c + r * c_stride + v * c_next) : zero();
    for (int k = 0; k < depth; k++, a += a_next, b += b_stride) {
        Vec row[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) row[v] = load(b + v * W);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const Vec x = splat(a[r * a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] = fma(x, row[v], sum[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(c + r * c_stride + v * c_next, sum[r][v]);
}

template <int VECS>
void product_columns(const float* a, size_t a_row, size_t a_next, int rows, const float* b, size_t b_stride, int depth, float* c, size_t c_stride, bool add,
                     size_t c_next = W) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) small_product<6, VECS>(a + r * a_row, a_row, a_next, b, b_stride, depth, c + r * c_stride, c_stride, add, c_next);
    for (; r + 4 <= rows; r += 4) small_product<4, VECS>(a + r * a_row, a_row, a_next, b, b_stride, depth, c + r * c_stride, c_stride, add, c_next);
    for (; r + 2 <= rows; r += 2) small_product<2, VECS>(a + r * a_row, a_row, a_next, b, b_stride, depth, c + r * c_stride, c_stride, add, c_next);
    for (; r < rows; r++) small_product<1, VECS>(a + r * a_row, a_row, a_next, b, b_stride, depth, c + r * c_stride, c_stride, add, c_next);
}

// C [rows, columns], a multiple of W.
void product_float32(const float* a, size_t a_row, size_t a_next, int rows, const float* b, size_t b_stride, int depth, int columns, float* c, size_t c_stride, bool add,
                     size_t c_next) {
    int at = 0;
    for (; at + kMostVecs * W <= columns; at += kMostVecs * W) product_columns<kMostVecs>(a, a_row, a_next, rows, b + at, b_stride, depth, c + at / W * c_next, c_stride, add, c_next);
    for (; at + 2 * W <= columns; at += 2 * W) product_columns<2>(a, a_row, a_next, rows, b + at, b_stride, depth, c + at / W * c_next, c_stride, add, c_next);
    for (; at < columns; at += W) product_columns<1>(a, a_row, a_next, rows, b + at, b_stride, depth, c + at / W * c_next, c_stride, add, c_next);
}

}  // namespace
