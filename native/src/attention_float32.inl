// The operands of attention's products in float32; attention_bf16.inl has the bfloat16 version.

namespace {

struct Left {
    const float* at;
    size_t row, next;
};
struct Right {
    const float* at;
    size_t stride;
};

// c [rows, columns] = a b, added to c if `add`. In c, each vector of W columns is `c_next` floats after the previous vector. `columns` is a
// multiple of W.
void multiply(const Left& a, int rows, const Right& b, int depth, int columns, float* c, size_t c_stride, bool add = false, size_t c_next = W) {
    product_float32(a.at, a.row, a.next, rows, b.at, b.stride, depth, columns, c, c_stride, add, c_next);
}

// The rows of one head, and their transpose for products that sum over the numbers of a row (null: not needed).
struct HeadRows {
    int height, width;  // padded
    float *rows, *columns = nullptr;

    HeadRows(Memory& memory, int n_rows, int n, bool, bool as_columns)
        : height(padded(n_rows)), width(padded(n)), rows(memory.take<float>(size_t(height) * width)) {
        if (as_columns) columns = memory.take<float>(size_t(height) * width);
    }

    void read(const float* from, int64_t stride, int n_rows, int n) const {
        for (int r = 0; r < n_rows; r++) round_row(from + r * stride, n, width, rows + size_t(r) * width);
        if (columns) flip(rows, width, n_rows, width, columns, height);
    }

    Left left() const { return {rows, size_t(width), 1}; }
    Right over_rows() const { return {rows, size_t(width)}; }
    Right over_numbers() const { return {columns, size_t(height)}; }
};

// The attention weights of a block, or the gradients of its scores.
struct Weights {
    size_t queries;  // padded
    float* numbers;

    Weights(Memory& memory, int keys, int queries) : queries(queries), numbers(memory.take<float>(size_t(keys) * queries)) {}

    // Stores the values of keys s (a) and s + 1 (b) for the queries at, ..., at + W - 1.
    void put(int s, int at, Vec a, Vec b) const {
        store(numbers + s * queries + at, a);
        store(numbers + (s + 1) * queries + at, b);
    }
    void finish(int, int, bool) const {}
    Left by_keys() const { return {numbers, queries, 1}; }
    Left by_queries() const { return {numbers, 1, queries}; }
};

}  // namespace
