// Use of the AMX tiles: 0 to 3 contain sums (rows 0-15 and 16-31, columns 0-15 and 16-31), 4 and 5 the left operand, 6 and 7 the right operand.

namespace {

// `rows`: rows of the tiles for rows 0-15. `more_rows`: rows of the tiles for rows 16-31.
void configure_tiles(int rows, int more_rows) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config;
    std::memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    for (int i = 0; i < 6; i++) config.rows[i] = uint8_t(i == 0 || i == 1 || i == 4 ? rows : more_rows);
    asm volatile("" : : "r"(&config) : "memory");  // GCC before 14 believes that only 8 bytes are read (bug 114098)
    _tile_loadconfig(&config);
}

}  // namespace
