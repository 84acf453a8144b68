// The best tokens of rows of logits, and the sum of their exponentials, in one pass. Included by target_*.cpp after vec.h.

namespace {

using transduce::RowBest;

// Inserts a token after all that are at least as good. Ids come in ascending order, so the lower id wins a tie.
void insert(RowBest& row, float value, int32_t id) {
    int at = row.n < row.k ? row.n++ : row.k - 1;
    for (; at > 0 && row.values[at - 1] < value; at--) row.values[at] = row.values[at - 1], row.ids[at] = row.ids[at - 1];
    row.values[at] = value, row.ids[at] = id;
}

// A bound that at least k of the logits reach: the k-th largest of the maxima of 16 sets of columns.
float bound_of(const float* logits, int n, int k) {
    float top[16];
    for (int i = 0; i < 16; i += W) {
        Vec largest = load(logits + i);
        for (int j = 16; j < n; j += 16) largest = max(largest, load(logits + i + j));
        store(top + i, largest);
    }
    for (int i = 0; i < k; i++)  // a few steps of selection sort
        for (int j = i + 1; j < 16; j++)
            if (top[j] > top[i]) {
                const float swapped = top[i];
                top[i] = top[j], top[j] = swapped;
            }
    return top[k - 1];
}

void add_exponentials(RowBest& row, const float* logits, int n, float largest) {
    if (!row.started) row.shift = largest;
    if (largest > row.shift) {
        const float factor = std::exp2((row.shift - largest) * kLog2E);
        for (float& part : row.sum) part *= factor;
        row.shift = largest;
    }
    const Vec shift = splat(-row.shift * kLog2E), scale = splat(kLog2E);
    Vec sum[16 / W];
    for (int i = 0; i < 16 / W; i++) sum[i] = load(row.sum + i * W);
    for (int j = 0; j < n; j += 16)
        for (int i = 0; i < 16 / W; i++) sum[i] = sum[i] + exp2(fma(load(logits + j + i * W), scale, shift));
    for (int i = 0; i < 16 / W; i++) store(row.sum + i * W, sum[i]);
}

void take_logits(RowBest& row, float* logits, int n, int first, const int32_t* banned, int n_banned, bool scores) {
    constexpr int kGroup = 64;  // columns that are skipped together
    Vec part[4] = {load(logits), load(logits + W), load(logits + 2 * W), load(logits + 3 * W)};
    for (int j = 4 * W; j < n; j += 4 * W)
        for (int i = 0; i < 4; i++) part[i] = max(part[i], load(logits + j + i * W));
    const float largest = max_of(max(max(part[0], part[1]), max(part[2], part[3])));
    if (scores) add_exponentials(row, logits, n, largest);
    for (int i = 0; i < n_banned; i++)
        if (banned[i] >= first && banned[i] < first + n) logits[banned[i] - first] = 2 * transduce::kNever;
    float threshold = row.n == row.k ? row.values[row.k - 1] : 4 * transduce::kNever;
    if (!row.started && row.k <= 16) threshold = bound_of(logits, n, row.k);
    row.started = true;
    if (!(largest >= threshold)) return;
    for (int group = 0; group < n; group += kGroup) {
        Vec top = load(logits + group);
        for (int i = W; i < kGroup; i += W) top = max(top, load(logits + group + i));
        if (!at_least(top, splat(threshold))) continue;
        for (int i = 0; i < kGroup; i += W) {
            for (unsigned lanes = at_least(load(logits + group + i), splat(threshold)); lanes; lanes &= lanes - 1) {
                const int at = group + i + __builtin_ctz(lanes);
                if (row.n == row.k && !(logits[at] > row.values[row.k - 1])) continue;
                insert(row, logits[at], first + at);
            }
        }
        if (row.n == row.k) threshold = max_of(splat(row.values[row.k - 1]));
    }
}

// ---- the best token by int8 bounds

using transduce::Screen;

float dot(float sum, const float* a, const float* b, int n) {
    for (int i = 0; i < n; i++) sum = fma(a[i], b[i], sum);
    return sum;
}

void start_screen(Screen& screen, const float* x, int width, float scale) {
    Vec square = zero(), square_error = zero();
    const Vec inverse = splat(scale > 0 ? 1 / scale : 0), unit = splat(scale);
    for (int i = 0; i < width; i += W) {
        const Vec value = load(x + i), error = value - nearest(value * inverse) * unit;
        square = fma(value, value, square), square_error = fma(error, error, square_error);
    }
    screen.n = 0, screen.lower = 2 * transduce::kNever;
    screen.norm = std::sqrt(sum_of(square));
    screen.error = std::sqrt(sum_of(square_error)) * 1.02f + 1e-5f * screen.norm;  // with margins for float32 rounding
}

void drop(Screen& screen) {
    int kept = 0;
    for (int i = 0; i < screen.n; i++) {
        if (!(screen.upper[i] >= screen.lower)) continue;
        screen.upper[kept] = screen.upper[i], screen.ids[kept++] = screen.ids[i];
    }
    screen.n = kept;
}

void take_bounds(Screen& screen, const float* logits, int n, int first, const float* error, const float* norm) {
    const Vec row_norm = splat(screen.norm), row_error = splat(screen.error);
    auto radius = [&](int i) { return fma(load(error + i), row_norm, load(norm + i) * row_error); };
    Vec lower = splat(screen.lower);
    for (int i = 0; i < n; i += W) lower = max(lower, load(logits + i) - radius(i));
    screen.lower = max_of(lower);
    if (screen.n > Screen::kMost) return;
    for (int i = 0; i < n; i += W) {
        const Vec upper = load(logits + i) + radius(i);
        unsigned lanes = at_least(upper, splat(screen.lower));
        if (__builtin_expect(!lanes, 1)) continue;
        float uppers[W];
        store(uppers, upper);
        for (; lanes; lanes &= lanes - 1) {
            if (screen.n == Screen::kMost) drop(screen);
            if (screen.n == Screen::kMost) {
                screen.n++;
                return;
            }
            const int lane = __builtin_ctz(lanes);
            screen.upper[screen.n] = uppers[lane], screen.ids[screen.n++] = first + i + lane;
        }
    }
}

}  // namespace
