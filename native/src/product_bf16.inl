// Products of bfloat16 numbers with sums in float32, for training: by vectors, or on AMX tiles. Included after vec.h.
//
// C [rows, 64] = A B. A: rows of numbers. B, packed: panels of 64 columns [pairs of rows][64][2], so that one instruction multiplies a
// pair of A with 16 pairs of B.

namespace {

using transduce::kPanelColumns;
using Number = uint16_t;
constexpr bool kKeepsLogits = false;

inline __m512bh pairs_of(Vec low, Vec high) { return _mm512_cvtne2ps_pbh(high, low); }
// Numbers of two rows side by side: a0 b0 a1 b1 ...
inline __m512i interleaved(__m512bh pairs) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                           18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)pairs);
}
inline void store(Number* to, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(a)); }
inline Vec widened(__m256i a) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16); }
inline Vec load(const Number* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load_part(const Number* p, int n) { return widened(_mm256_maskz_loadu_epi16(lanes(n), p)); }
inline void store_part(Number* p, int n, Vec a) { _mm256_mask_storeu_epi16(p, lanes(n), (__m256i)_mm512_cvtneps_pbh(a)); }

#if defined(__AMX_BF16__)

// Configures the AMX tiles of this thread; products need an object of this class in scope.
struct Products {
    Products() { configure_tiles(16, 16); }
    ~Products() { _tile_release(); }
};

// C [32 or 16 rows, 32 or 16 columns] = A B, with B [pairs][b_stride][2]. The next 32 numbers of each row of A are `step` numbers further, and
// the second 16 columns of C are at c + c_next.
template <bool TWO, bool WIDE>
void tile_block(const Number* a, size_t stride, size_t step, const Number* b, size_t b_stride, int pairs, float* c, size_t c_stride, bool add,
                size_t c_next = 16) {
    float* below = c + 16 * c_stride;
    if (add) {
        _tile_loadd(0, c, c_stride * 4);
        if (WIDE) _tile_loadd(1, c + c_next, c_stride * 4);
        if (TWO) _tile_loadd(2, below, c_stride * 4);
        if (TWO && WIDE) _tile_loadd(3, below + c_next, c_stride * 4);
    } else {
        _tile_zero(0);
        if (WIDE) _tile_zero(1);
        if (TWO) _tile_zero(2);
        if (TWO && WIDE) _tile_zero(3);
    }
    for (int p = 0; p < pairs; p += 16, a += step, b += 32 * b_stride) {
        _tile_loadd(4, a, stride * 2);
        _tile_loadd(6, b, b_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (WIDE) {
            _tile_loadd(7, b + 32, b_stride * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (TWO) {
            _tile_loadd(5, a + 16 * stride, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            if (WIDE) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_stride * 4);
    if (WIDE) _tile_stored(1, c + c_next, c_stride * 4);
    if (TWO) _tile_stored(2, below, c_stride * 4);
    if (TWO && WIDE) _tile_stored(3, below + c_next, c_stride * 4);
}

// C [rows, 64] = A [rows, depth] times a panel, added to C if `add`. A depth that is a multiple of 32.
void multiply_tiles(const Number* a, size_t stride, size_t step, int rows, const Number* b, int depth, float* c, size_t c_stride, bool add) {
    constexpr int kPairs = 256;  // pairs of half a panel that stay in the L1 cache
    const int pairs = depth / 2;
    for (int p = 0; p < pairs; p += kPairs, a += kPairs / 16 * step) {
        const int some = pairs - p < kPairs ? pairs - p : kPairs;
        for (int half = 0; half < kPanelColumns; half += 32) {
            const Number* columns = b + size_t(p) * 2 * kPanelColumns + 2 * half;
            int r = 0;
            for (; r + 32 <= rows; r += 32)
                tile_block<true, true>(a + r * stride, stride, step, columns, kPanelColumns, some, c + r * c_stride + half, c_stride, add || p);
            const int left = rows - r;
            if (!left) continue;
            configure_tiles(left < 16 ? left : 16, left > 16 ? left - 16 : 16);
            const auto block = left > 16 ? tile_block<true, true> : tile_block<false, true>;
            block(a + r * stride, stride, step, columns, kPanelColumns, some, c + r * c_stride + half, c_stride, add || p, 16);
            configure_tiles(16, 16);
        }
    }
}
void multiply_panel(const Number* a, size_t stride, int rows, const Number* b, int depth, float* c, size_t c_stride, bool add) {
    multiply_tiles(a, stride, 32, rows, b, depth, c, c_stride, add);
}

// C [rows, columns] = A B, with B [depth / 2][b_stride][2]. Reads and writes rows up to a multiple of 16. `columns` is a multiple of 16, `depth` of 32.
void multiply_pairs(const Number* a, size_t stride, int rows, const Number* b, size_t b_stride, int depth, int columns, float* c, size_t c_stride,
                    bool add, size_t c_next) {
    for (int n = 0; n < columns; n += 32)
        for (int r = 0; r < rows; r += 32) {
            constexpr decltype(&tile_block<true, true>) kBlocks[2][2] = {{tile_block<false, false>, tile_block<false, true>},
                                                                         {tile_block<true, false>, tile_block<true, true>}};
            const auto block = kBlocks[rows - r > 16][columns - n > 16];
            block(a + r * stride, stride, 32, b + 2 * n, b_stride, depth / 2, c + r * c_stride + n / 16 * c_next, c_stride, add, c_next);
        }
}

#else

struct Products {
    Products() {}  // avoids a warning of an unused variable
};
constexpr int kMostVecs = kPanelColumns / W, kMostRows = 6;  // 24 sums in registers

// C [ROWS, VECS vectors] = A B, with B [pairs][b_stride][2]. Pair p of row r of A is at r * stride + p * next. A row's vectors in C are `c_next` apart.
template <int ROWS, int VECS>
void product_rows(const Number* a, size_t stride, size_t next, const Number* b, size_t b_stride, int pairs, float* c, size_t c_stride, bool add,
                  size_t c_next) {
    Vec sum[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) sum[r][v] = add ? load(c + r * c_stride + v * c_next) : zero();
    for (int p = 0; p < pairs; p++, a += next, b += 2 * b_stride) {
        __m512bh column[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) column[v] = (__m512bh)_mm512_loadu_si512(b + v * 2 * W);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            int pair;
            std::memcpy(&pair, a + r * stride, 4);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], x, column[v]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(c + r * c_stride + v * c_next, sum[r][v]);
}

template <int VECS>
void product_pairs(const Number* a, size_t stride, size_t next, int rows, const Number* b, size_t b_stride, int pairs, float* c, size_t c_stride, bool add,
                   size_t c_next = W) {
    constexpr decltype(&product_rows<1, VECS>) kRows[] = {nullptr, product_rows<1, VECS>, product_rows<2, VECS>, product_rows<3, VECS>,
                                                          product_rows<4, VECS>, product_rows<5, VECS>, product_rows<6, VECS>};
    for (int r = 0; r < rows; r += kMostRows)
        kRows[rows - r < kMostRows ? rows - r : kMostRows](a + r * stride, stride, next, b, b_stride, pairs, c + r * c_stride, c_stride, add, c_next);
}

// C [rows, 64] = A [rows, depth] times a panel, added to C if `add`.
void multiply_panel(const Number* a, size_t stride, int rows, const Number* b, int depth, float* c, size_t c_stride, bool add) {
    product_pairs<kMostVecs>(a, stride, 2, rows, b, kPanelColumns, depth / 2, c, c_stride, add);
}

// C [rows, columns] = A B, with B [depth / 2][b_stride][2]. `columns` is a multiple of 16.
void multiply_pairs(const Number* a, size_t stride, int rows, const Number* b, size_t b_stride, int depth, int columns, float* c, size_t c_stride,
                    bool add, size_t c_next) {
    int n = 0;
    for (; n + 64 <= columns; n += 64) product_pairs<4>(a, stride, 2, rows, b + 2 * n, b_stride, depth / 2, c + n / W * c_next, c_stride, add, c_next);
    for (; n + 32 <= columns; n += 32) product_pairs<2>(a, stride, 2, rows, b + 2 * n, b_stride, depth / 2, c + n / W * c_next, c_stride, add, c_next);
    if (n < columns) product_pairs<1>(a, stride, 2, rows, b + 2 * n, b_stride, depth / 2, c + n / W * c_next, c_stride, add, c_next);
}

#endif

// Rounds a row of n numbers, and pads it with zeros to `width`, which is even.
void round_row(const float* from, int n, int width, Number* to) {
    int k = 0;
    for (; k + W <= n; k += W) store(to + k, load(from + k));
    if (k < n) {
        Number rest[W];
        store(rest, load_part(from + k, n - k));
        std::memcpy(to + k, rest, size_t(n - k) * sizeof(Number));
    }
    std::memset(to + n, 0, size_t(width - n) * sizeof(Number));
}

// Rounds and interleaves two rows of at most 64 numbers into one row of pairs of a panel.
void interleave_rows(const float* a, const float* b, int n, Number* to) {
    for (int c = 0; c < kPanelColumns; c += W) {
        const Vec next = b ? load_part(b + c, n - c) : zero();
        _mm512_storeu_si512(to + 2 * c, interleaved(pairs_of(load_part(a + c, n - c), next)));
    }
}

// Interleaves up to 32 numbers of two rows: `low` has the first 16 pairs, `high` the others. If b is null, its numbers are zeros.
struct RowPair {
    __m512i low, high;
    RowPair(const Number* a, const Number* b, int n) {
        const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3,
                                               34, 2, 33, 1, 32, 0);
        const __mmask32 known = n >= 32 ? ~__mmask32(0) : (__mmask32(1) << n) - 1;
        const __m512i x = _mm512_maskz_loadu_epi16(known, a), y = b ? _mm512_maskz_loadu_epi16(known, b) : _mm512_setzero_si512();
        low = _mm512_permutex2var_epi16(x, order, y);
        high = _mm512_permutex2var_epi16(x, _mm512_add_epi16(order, _mm512_set1_epi16(16)), y);
    }
};

// Interleaves two rows of at most 64 numbers into one row of pairs of a panel.
inline void interleave_rows(const Number* a, const Number* b, int n, Number* to) {
    for (int c = 0; c < kPanelColumns; c += 2 * W) {
        const RowPair pair(a + c, b ? b + c : nullptr, n > c ? n - c : 0);
        _mm512_storeu_si512(to + 2 * c, pair.low);
        _mm512_storeu_si512(to + 2 * (c + W), pair.high);
    }
}

// Packs rows of at most 64 numbers of either type as `padded` (an even number of) rows of a panel; the rows from `rows` on are zero.
template <class T>
void pack_rows(const T* from, size_t stride, int rows, int padded, int n, Number* to) {
    for (int r = 0; r < padded; r += 2, to += 2 * kPanelColumns)
        interleave_rows(from + size_t(r) * stride, r + 1 < rows ? from + size_t(r + 1) * stride : nullptr, r < rows ? n : 0, to);
}

// Stores W numbers of two rows (a, b) twice: as rows, and in a panel, where `in_panel` is the address of the first number of a.
inline void store_rows(Number* row, Number* next, Number* in_panel, Vec a, Vec b) {
    const __m512bh both = pairs_of(a, b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256((__m512i)both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(next), _mm512_extracti64x4_epi64((__m512i)both, 1));
    _mm512_storeu_si512(in_panel, interleaved(both));
}
// The offset from `in_panel` of the number in a row (0 or 1) and a column.
inline size_t place_in_rows(int row, int column) { return size_t(column) * 2 + row; }

// Packs `rows` rows (at most 64) of n numbers as columns of a panel, to [width / 2][64][2]; the remaining columns are zero.
void pack_transposed(const float* from, size_t stride, int rows, int n, int width, Number* to) {
    alignas(64) Number row[W][2 * W];
    for (int k = 0; k < width; k += 2 * W) {
        const int n_pairs = (width - k < 2 * W ? width - k : 2 * W) / 2;
        for (int c = 0; c < kPanelColumns; c += W) {
            __m512i part[W];
            for (int i = 0; i < W; i++) {
                const int known = c + i < rows ? (n - k < 2 * W ? n - k : 2 * W) : 0;
                round_row(from + size_t(c + i < rows ? c + i : 0) * stride + k, known > 0 ? known : 0, 2 * W, row[i]);
                part[i] = _mm512_load_si512(row[i]);
            }
            transpose(part);
            for (int p = 0; p < n_pairs; p++) _mm512_storeu_si512(to + (size_t(k / 2 + p) * kPanelColumns + c) * 2, part[p]);
        }
    }
}

constexpr int kGradientRows = 256, kGradientColumns = 128, kGradientStep = kPanelColumns;  // computed at once, or for few, half as many and so on
using LinearCall = transduce::LinearCall<Number>;
using OperandRows = transduce::OperandRows<Number>;

// pack_left packs the left operand of a product A^T B over `all` rows of A, a part at a time: rows [first, first + padded) of `columns` numbers.
// The first `rows` of these are read, the others are zero. `padded` is a multiple of 32.
#if defined(__AMX_BF16__)

// Panels of 64 columns, [all / 32][64][32]: rows of A^T in the order in which tiles are read.
void pack_left(const Number* from, size_t stride, int rows, int padded, int columns, int64_t first, int64_t all, Number* to) {
    for (int r = 0; r < padded; r += 32)
        for (int k = 0; k < columns; k += 32) {
            __m512i part[2][W];
            for (int i = 0; i < W; i++) {
                const Number* row = from + size_t(r + 2 * i) * stride + k;
                const int known = rows - r - 2 * i;
                const RowPair pair(row, known > 1 ? row + stride : nullptr, known > 0 ? columns - k : 0);
                part[0][i] = pair.low, part[1][i] = pair.high;
            }
            for (int half = 0; half < 2; half++) {
                transpose(part[half]);
                const int column = k + half * W, in_panel = column % kPanelColumns;
                Number* tile = to + (column - in_panel) * all + (first + r) * kPanelColumns + 32 * in_panel;
                for (int i = 0; i < W && column + i < columns; i++) _mm512_storeu_si512(tile + 32 * i, part[half][i]);
            }
        }
}

// C [columns, 64] = A^T B, summed over rows [first, first + rows). The columns of A begin at `column` and are in one panel; b points to row `first`.
void product_over_rows(const LinearCall& call, const Number* left, int column, int columns, int64_t first, const Number* b, int rows, float* c,
                       bool add) {
    const int in_panel = column % kPanelColumns;
    const Number* a = left + (column - in_panel) * call.padded_rows + first * kPanelColumns + 32 * in_panel;
    multiply_tiles(a, 32, 32 * kPanelColumns, columns, b, rows, c, kGradientColumns, add);
}

#else

// Panels of 64 columns, [all / 2][64][2].
void pack_left(const Number* from, size_t stride, int rows, int padded, int columns, int64_t first, int64_t all, Number* to) {
    for (int k = 0; k < columns; k += kPanelColumns) pack_rows(from + k, stride, rows, padded, columns - k, to + size_t(k) * all + first * kPanelColumns);
}

// C [columns, 64] = A^T B, summed over rows [first, first + rows). The columns of A begin at `column` and are in one panel; b points to row `first`.
void product_over_rows(const LinearCall& call, const Number* left, int column, int columns, int64_t first, const Number* b, int rows, float* c,
                       bool add) {
    const int in_panel = column % kPanelColumns;
    const Number* a = left + size_t(column - in_panel) * call.padded_rows + first * kPanelColumns + in_panel * 2;
    product_pairs<kMostVecs>(a, 2, 2 * kPanelColumns, columns, b, kPanelColumns, rows / 2, c, kGradientColumns, add);
}

#endif

// The gradient of a layer's weights is A^T B, summed over all rows. A is the gradient of the outputs, and B the inputs.
constexpr bool kPacksLeft = true;

// Packs rows [first, first + padded) of A and B; those from first + rows on are zero. Rows of A have the stride `width`.
void pack_operands(const LinearCall& call, const Number* a, int width, int64_t first, int rows, int padded, Number* left,
                   Number* right) {
    pack_left(a, width, rows, padded, call.outputs, first, call.padded_rows, left);
    for (int part = 0; part < call.inputs; part += kPanelColumns) {
        Number* to = right + size_t(part) * call.padded_rows + first * kPanelColumns;
        const int64_t at = first * call.inputs + part;
        if (call.x_is_number) pack_rows(static_cast<const Number*>(call.x) + at, call.inputs, rows, padded, call.inputs - part, to);
        else pack_rows(static_cast<const float*>(call.x) + at, call.inputs, rows, padded, call.inputs - part, to);
    }
}

// Computes product [rows, kGradientColumns], for `rows` outputs from `first` on and `columns` inputs from `column` on.
void multiply_operands(const LinearCall& call, const OperandRows& operands, int first, int rows, int column, int columns, float* product) {
    constexpr int kRows = 512;  // rows that stay in the cache
    const int64_t end = transduce::round_up(operands.first + operands.rows, transduce::kRowStep);
    for (int64_t r = operands.first; r < end; r += kRows) {
        const int some = int(end - r < kRows ? end - r : kRows);
        for (int c = 0; c < columns; c += kPanelColumns)
            for (int i = 0; i < rows; i += kPanelColumns) {
                const Number* right = operands.right + (column + c) * call.padded_rows + r * kPanelColumns;
                const int n = rows - i < kPanelColumns ? rows - i : kPanelColumns;
                product_over_rows(call, operands.left, first + i, n, r, right, some, product + i * kGradientColumns + c, r > operands.first);
            }
    }
}

}  // namespace
