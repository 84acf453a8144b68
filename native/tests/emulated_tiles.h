/* AMX tiles in plain C++, to test the kernels for CPUs with AMX on others that have AVX-512 BF16:
 *
 *     TRANSDUCE_EMULATED_TILES=1 python setup.py build_ext --build-lib OTHER_FOLDER
 *
 * Speed says nothing. The library believes that the CPU has AMX. */
#pragma once

#define TRANSDUCE_EMULATED_TILES

#if defined(__AMX_TILE__) && defined(__cplusplus)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
struct Tiles {
    Config config;
    uint8_t data[8][16][64];
};
inline thread_local Tiles tiles{};

inline void require(bool fine) {
    if (!fine) std::abort();
}
inline void check(int t) { require(tiles.config.palette == 1 && tiles.config.rows[t] <= 16 && tiles.config.row_bytes[t] <= 64); }
inline void load_config(const void* from) {
    std::memcpy(&tiles.config, from, sizeof(Config));
    std::memset(tiles.data, 0, sizeof tiles.data);
}
inline void release() { tiles.config = {}; }
inline void zero(int t) {
    check(t);
    std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
}
inline void load(int t, const void* from, size_t stride) {
    zero(t);
    for (int r = 0; r < tiles.config.rows[t]; r++) std::memcpy(tiles.data[t][r], static_cast<const uint8_t*>(from) + r * stride, tiles.config.row_bytes[t]);
}
inline void store(int t, void* to, size_t stride) {
    check(t);
    for (int r = 0; r < tiles.config.rows[t]; r++) std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles.data[t][r], tiles.config.row_bytes[t]);
}
inline float bf16(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
// c += a b; `product` of 4 bytes of a and 4 of b.
template <class Number, class Product>
void multiply(int c, int a, int b, Product product) {
    for (int t : {c, a, b}) check(t);
    require(tiles.config.rows[c] == tiles.config.rows[a] && tiles.config.row_bytes[c] == tiles.config.row_bytes[b] &&
            tiles.config.row_bytes[a] == 4 * tiles.config.rows[b]);
    for (int m = 0; m < tiles.config.rows[c]; m++)
        for (int k = 0; k < tiles.config.rows[b]; k++)
            for (int n = 0; n < tiles.config.row_bytes[c] / 4; n++) {
                Number sum;
                std::memcpy(&sum, tiles.data[c][m] + 4 * n, 4);
                sum = product(sum, tiles.data[a][m] + 4 * k, tiles.data[b][k] + 4 * n);
                std::memcpy(tiles.data[c][m] + 4 * n, &sum, 4);
            }
}
inline void multiply_bf16(int c, int a, int b) {
    multiply<float>(c, a, b, [](float sum, const uint8_t* x, const uint8_t* y) {
        return std::fma(bf16(x + 2), bf16(y + 2), std::fma(bf16(x), bf16(y), sum));
    });
}
inline void multiply_int8(int c, int a, int b) {
    multiply<int32_t>(c, a, b, [](int32_t sum, const uint8_t* x, const uint8_t* y) {
        for (int i = 0; i < 4; i++) sum += int8_t(x[i]) * int8_t(y[i]);
        return sum;
    });
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulated::load_config(from)
#define _tile_release() emulated::release()
#define _tile_zero(t) emulated::zero(t)
#define _tile_loadd(t, from, stride) emulated::load(t, from, stride)
#define _tile_stored(t, to, stride) emulated::store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply_bf16(c, a, b)
#define _tile_dpbssd(c, a, b) emulated::multiply_int8(c, a, b)

#endif
