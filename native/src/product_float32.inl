// float32 products with vectors of any width. Included by target_*.cpp after vec.h.
//
// A kernel computes a few rows times one panel of columns, all in registers. Inputs are summed in their order, one
// multiply-add each, so the number of rows that a kernel takes does not change the result.

namespace {

#if defined(__AVX512F__)
constexpr int kPanelVecs = 4, kMaxRows = 6;  // 24 of 32 registers for sums
#elif defined(__AVX2__)
constexpr int kPanelVecs = 2, kMaxRows = 6;  // 12 of 16
#elif defined(__aarch64__)
constexpr int kPanelVecs = 4, kMaxRows = 6;  // 24 of 32
#else
constexpr int kPanelVecs = 2, kMaxRows = 4;
#endif
constexpr int kPanel = kPanelVecs * W;
constexpr int kDepthAtOnce = 128;  // inputs after which the next rows follow: so much of a panel stays in the L1 cache

// Weights that do not fit into the caches arrive long after a kernel asks for them. So while kernels multiply, they prefetch the weights that
// follow, a few bytes for each product, into the L2 cache. A prefetch of an address behind the last weights does nothing.
inline void prefetch(const void* weights, int bytes) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(weights) + at, 0, 2);
}

// The bytes that each product prefetches if `n_calls` calls read the same weights, `bytes` for each product. A single row does not
// prefetch: it uses a weight only once, and needs all the time for reading.
inline int bytes_ahead(int rows, int bytes, int n_calls) { return rows > 1 ? bytes / n_calls : 0; }

// `ahead`: later weights, of which `ahead_step` bytes are prefetched for each input.
template <int ROWS>
void panel_rows(const float* a, size_t a_stride, const float* panel, int depth, float* c, size_t stride, const float* init,
                size_t init_stride, const char* ahead, int ahead_step) {
    Vec sum[ROWS][kPanelVecs];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVecs; j++) sum[r][j] = load(init + r * init_stride + W * j);
    for (int k = 0; k < depth; k++, panel += kPanel, ahead += ahead_step) {
        prefetch(ahead, ahead_step);
        Vec b[kPanelVecs];
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVecs; j++) b[j] = load(panel + W * j);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const Vec x = splat(a[r * a_stride + k]);
#pragma GCC unroll 4
            for (int j = 0; j < kPanelVecs; j++) sum[r][j] = fma(x, b[j], sum[r][j]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < kPanelVecs; j++) store(c + r * stride + W * j, sum[r][j]);
}

using PanelRows = void (*)(const float*, size_t, const float*, int, float*, size_t, const float*, size_t, const char*, int);
template <int ROWS>
constexpr PanelRows kRows = panel_rows<(ROWS < kMaxRows ? ROWS : kMaxRows)>;
constexpr PanelRows kPanelRows[] = {nullptr, kRows<1>, kRows<2>, kRows<3>, kRows<4>, kRows<5>, kRows<6>};

// Multiplies all rows by inputs [from, from + depth) of one panel; the sums start from `init`.
void panel_product(const transduce::Activations& a, int from, int depth, const float* panel, float* c, size_t stride, const float* init,
                   size_t init_stride) {
    const int n_groups = (a.rows + kMaxRows - 1) / kMaxRows;
    const int ahead_step = bytes_ahead(a.rows, kPanel * sizeof(float), n_groups);
    const char* ahead = reinterpret_cast<const char*>(panel + size_t(depth) * kPanel);
    for (int group = 0, row = 0; group < n_groups; group++, ahead += size_t(depth) * ahead_step) {
        const int rows = (a.rows - row + n_groups - group - 1) / (n_groups - group);  // groups of nearly equal size
        kPanelRows[rows](a.values + row * a.stride + from, a.stride, panel, depth, c + row * stride, stride, init + row * init_stride,
                         init_stride, ahead, ahead_step);
        row += rows;
    }
}

void multiply_float32(const transduce::PackedMatrix& w, const transduce::Activations& a, int first, int last, float* c, size_t stride,
                      const float* init, size_t init_stride) {
    const bool whole = a.rows <= kMaxRows || w.inputs <= 2 * kDepthAtOnce;
    const int step = whole ? w.inputs : kDepthAtOnce;
    for (int column = first; column < last; column += kPanel) {
        const float* panel = w.values.data() + size_t(column) * w.inputs;
        float* to = c + (column - first);
        panel_product(a, 0, step, panel, to, stride, init + (column - first), init_stride);
        for (int from = step; from < w.inputs; from += step) {
            const int depth = from + step <= w.inputs ? step : w.inputs - from;
            panel_product(a, from, depth, panel + size_t(from) * kPanel, to, stride, to, stride);
        }
    }
}

}  // namespace
