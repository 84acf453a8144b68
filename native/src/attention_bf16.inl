// The operands of attention's products in bfloat16; attention_float32.inl has the float32 version.
// Included after the products of training.inl.
//
// A left operand is stored as rows of numbers, a right operand as pairs of rows [rows / 2][columns][2]. The axis that a product sums over is
// padded with zeros.

namespace {

struct Left {
    const Number* at;
    size_t stride;
};
struct Right {
    const Number* at;
    size_t stride;  // in columns
};

// c [rows, columns] = a b, added to c if `add`. In c, each vector of W columns is `c_next` floats after the previous vector. `columns` is a
// multiple of 16. On tiles, rows are written up to a multiple of 16.
void multiply(const Left& a, int rows, const Right& b, int depth, int columns, float* c, size_t c_stride, bool add = false, size_t c_next = W) {
    multiply_pairs(a.at, a.stride, rows, b.at, b.stride, (depth + 31) / 32 * 32, columns, c, c_stride, add, c_next);
}

// The rows of one head as operands. `pairs` is null unless products sum over rows, `columns` unless they sum over the numbers of a row.
struct HeadRows {
    int height, width;  // padded
    Number *rows, *pairs = nullptr, *columns = nullptr;

    HeadRows(Memory& memory, int n_rows, int n, bool over_rows, bool as_columns)
        : height(int(transduce::round_up(n_rows, 32))), width(int(transduce::round_up(n, 32))), rows(memory.take<Number>(size_t(height) * width)) {
        if (over_rows) pairs = memory.take<Number>(size_t(height) * width);
        if (as_columns) columns = memory.take<Number>(size_t(height) * width);
    }

    void read(const Number* from, int64_t stride, int n_rows, int n) const {
        const int end = (n_rows + 15) / 16 * 16;
        for (int k = 0; k < width; k += 32) {
            const __mmask32 known = ~__mmask32(0) >> (n - k < 32 ? 32 - (n - k) : 0);
            for (int r = 0; r < end; r++)
                _mm512_storeu_si512(rows + size_t(r) * width + k, _mm512_maskz_loadu_epi16(r < n_rows ? known : 0, from + r * stride + k));
        }
        if (columns) flip(reinterpret_cast<const float*>(rows), width / 2, n_rows, width / 2, reinterpret_cast<float*>(columns), height);
        if (!pairs) return;
        for (int r = 0; r < end; r += 2)
            for (int k = 0; k < width; k += 32) {
                const Number* row = rows + size_t(r) * width + k;
                const RowPair pair(row, row + width, 32);
                Number* to = pairs + size_t(r) * width + 2 * k;
                _mm512_storeu_si512(to, pair.low);
                _mm512_storeu_si512(to + 32, pair.high);
            }
        if (end % 32) std::memset(pairs + size_t(end) * width, 0, 16 * width * sizeof(Number));
    }

    Left left() const { return {rows, size_t(width)}; }
    Right over_rows() const { return {pairs, size_t(width)}; }
    Right over_numbers() const { return {columns, size_t(height)}; }
};

// The attention weights of a block, or the gradients of its scores.
struct Weights {
    int keys, queries;  // padded
    Number *by_key, *by_query, *pairs;

    Weights(Memory& memory, int keys, int queries)
        : keys(keys), queries(queries), by_key(memory.take<Number>(size_t(keys) * queries)), by_query(memory.take<Number>(size_t(keys) * queries)),
          pairs(memory.take<Number>(size_t(keys) * queries)) {}

    // Stores the values of keys s (a) and s + 1 (b) for the queries at, ..., at + W - 1.
    void put(int s, int at, Vec a, Vec b) const {
        Number* row = by_key + size_t(s) * queries + at;
        store_rows(row, row + queries, pairs + size_t(s) * queries + 2 * at, a, b);
    }
    // Call this after all calls of `put`. `over_keys`: also prepare the operand of products that sum over keys.
    void finish(int n_keys, int n_queries, bool over_keys) const {
        const int known = (n_keys + 1) / 2 * 2, end = (n_keys + 31) / 32 * 32, lanes = padded(n_queries);
        std::memset(by_key + size_t(known) * queries, 0, size_t(end - known) * queries * sizeof(Number));
        std::memset(pairs + size_t(known) * queries, 0, size_t(end - known) * queries * sizeof(Number));
        if (lanes % 32)
            for (int s = 0; s < known; s++) std::memset(by_key + size_t(s) * queries + lanes, 0, W * sizeof(Number));
        if (over_keys) flip(reinterpret_cast<const float*>(pairs), queries, end / 2, lanes, reinterpret_cast<float*>(by_query), keys / 2);
    }
    Left by_keys() const { return {by_key, size_t(queries)}; }
    Left by_queries() const { return {by_query, size_t(keys)}; }
};

}  // namespace
