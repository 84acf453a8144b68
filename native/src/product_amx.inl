// Products on AMX tiles: blocks of 32 rows and 32 columns, four tiles of sums. Included by target_amx.cpp only, after tiles.inl.

namespace {

thread_local int configured_rows = 0;  // rows of the tiles of this thread; 0: not configured

// Fewer than 16 rows take proportionally less time.
void configure_tiles(int rows) {
    if (rows != configured_rows) configure_tiles(rows, rows);
    configured_rows = rows;
}

void release_tiles() {
    if (configured_rows) _tile_release();
    configured_rows = 0;
}

// ---- bf16x3: (high + low) * (high + low), without the product of the two low halves

void convert_bf16x3(Activations& a, int depth) {
    for (int r = 0; r < a.rows; r++) {
        size_t at = size_t(r / 16) * (depth / 32) * 512 + r % 16 * 32;
        const float* row = a.values + r * a.stride;
        for (int k = 0; k < depth; k += 32, at += 512) {
            const Vec x = load(row + k), y = load(row + k + 16);
            const __m512i high = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x));
            const __m512i high_x = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(high)), 16);
            const __m512i high_y = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1)), 16);
            _mm512_store_si512(a.high + at, high);
            _mm512_store_si512(a.low + at, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y - _mm512_castsi512_ps(high_y),
                                                                                        x - _mm512_castsi512_ps(high_x))));
        }
    }
}

// 16 or, if TWO, 32 rows of sums to memory.
template <bool TWO>
void store_block(void* c, size_t stride) {
    float *above = static_cast<float*>(c), *below = above + 16 * stride;  // floats, or integers of that size
    _tile_stored(0, above, stride * 4);
    _tile_stored(1, above + 16, stride * 4);
    if (TWO) {
        _tile_stored(2, below, stride * 4);
        _tile_stored(3, below + 16, stride * 4);
    }
}

template <bool TWO>
void bf16x3_block(const Activations& a, int row, const PackedMatrix& w, int column, float* c, size_t stride, const float* init,
                  size_t init_stride) {
    const int n_tiles = w.depth / 32;
    const size_t from = size_t(row) * w.depth, panel = size_t(column) * w.depth;
    _tile_loadd(0, init, init_stride * 4);
    _tile_loadd(1, init + 16, init_stride * 4);
    if (TWO) {
        _tile_loadd(2, init + 16 * init_stride, init_stride * 4);
        _tile_loadd(3, init + 16 * init_stride + 16, init_stride * 4);
    }
    const auto load_weights = [](const uint16_t* weights) {
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + 512, 64);
    };
    const auto add = [=](const uint16_t* rows) {
        _tile_loadd(4, rows, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, rows + n_tiles * 512, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    };
    for (size_t k = 0; k < size_t(n_tiles); k++) {
        load_weights(w.high.data() + panel + k * 1024);
        add(a.high + from + k * 512);
        add(a.low + from + k * 512);
        load_weights(w.low.data() + panel + k * 1024);
        add(a.high + from + k * 512);
    }
    store_block<TWO>(c, stride);
}

void multiply_bf16x3(const PackedMatrix& w, const Activations& a, int first, int last, float* c, size_t stride, const float* init,
                     size_t init_stride) {
    configure_tiles(a.rows < 16 ? a.rows : 16);
    for (int column = first; column < last; column += 32) {
        for (int row = 0; row < a.rows; row += 32) {
            float* to = c + row * stride + (column - first);
            const float* from = init + row * init_stride + (column - first);
            if (a.rows - row > 16) bf16x3_block<true>(a, row, w, column, to, stride, from, init_stride);
            else bf16x3_block<false>(a, row, w, column, to, stride, from, init_stride);
        }
    }
}

// ---- int8

constexpr int kFewRows = 3;  // up to here the products of vectors, which give the same numbers, take less time than tiles

void convert_int8_tiles(Activations& a, int depth) {
    if (a.rows <= kFewRows) return convert_int8_rows(a, depth);
    for (int r = 0; r < a.rows; r++) {
        int8_t* to = a.quantized + size_t(r / 16) * depth * 16 + r % 16 * 64;
        a.scale[r] = quantize_row(a.values + r * a.stride, depth, [to](int k, Bytes q) { std::memcpy(to + k / 64 * 1024 + k % 64, &q, 16); });
    }
}

template <bool TWO>
void int8_block(const int8_t* a, const int8_t* b, int n_tiles) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const int next = n_tiles * 1024;
    for (int k = 0; k < n_tiles; k++, a += 1024, b += 2048) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + 1024, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, a + next, 64);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
}

void multiply_int8_tiles(const PackedMatrix& w, const Activations& a, int first, int last, float* c, size_t stride, const float* init,
                         size_t init_stride) {
    if (a.rows <= kFewRows) return multiply_int8(w, a, first, last, c, stride, init, init_stride);
    configure_tiles(a.rows < 16 ? a.rows : 16);
    const int n_tiles = w.depth / 64;
    alignas(64) int32_t sums[2][1024];
    int flip = 0, done_row = -1, done_column = 0;
    // Scales and stores the block before the current one, while the tiles of the current one are computed.
    auto finish = [&](const int32_t* block) {
        const Vec w0 = load(w.scale.data() + done_column), w1 = load(w.scale.data() + done_column + 16);
        const int rows = a.rows - done_row < 32 ? a.rows - done_row : 32;
        for (int r = 0; r < rows; r++) {
            const float* from = init + (done_row + r) * init_stride + (done_column - first);
            float* to = c + (done_row + r) * stride + (done_column - first);
            const Vec scale = splat(a.scale[done_row + r]);
            const Vec x0 = _mm512_cvtepi32_ps(_mm512_load_si512(block + 32 * r)), x1 = _mm512_cvtepi32_ps(_mm512_load_si512(block + 32 * r + 16));
            store(to, fma(x0 * scale, w0, load(from)));
            store(to + 16, fma(x1 * scale, w1, load(from + 16)));
        }
    };
    for (int column = first; column < last; column += 32) {
        for (int row = 0; row < a.rows; row += 32, flip ^= 1) {
            const bool two = a.rows - row > 16;
            const int8_t *tiles = a.quantized + size_t(row) * w.depth, *weights = w.quantized.data() + size_t(column) * w.depth;
            if (two) int8_block<true>(tiles, weights, n_tiles);
            else int8_block<false>(tiles, weights, n_tiles);
            if (done_row >= 0) finish(sums[flip ^ 1]);
            if (two) store_block<true>(sums[flip], 32);
            else store_block<false>(sums[flip], 32);
            done_row = row, done_column = column;
        }
    }
    if (done_row >= 0) finish(sums[flip ^ 1]);
}

}  // namespace
