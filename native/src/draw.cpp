// Tokens drawn from the rows of a step: logits of the whole vocabulary, a few rows at a time.

#include <algorithm>

#include "network.h"
#include "search.h"

namespace transduce {
namespace {

constexpr int kLogitsAtOnce = 1 << 19;  // 2 MB

}  // namespace

void Network::draw(std::vector<Draw>& draws) {
    const int columns = model_.logits.columns, most = std::clamp(kLogitsAtOnce / columns, 1, 64);
    drawn_hidden_.reserve((size_t(most) + kSpareRows) * width_), drawn_logits_.reserve((size_t(most) + kSpareRows) * columns);
    for (size_t first = 0; first < draws.size(); first += most) {
        const int n = int(std::min<size_t>(most, draws.size() - first));
        for (int i = 0; i < n; i++) std::copy_n(hidden_ + draws[first + i].row * width_, width_, drawn_hidden_.data() + i * width_);
        multiplier_.convert(model_.logits, drawn_hidden_.data(), width_, n);
        multiplier_.columns(model_.logits, 0, columns, drawn_logits_.data(), columns);
        for (int i = 0; i < n; i++) {
            Draw& draw = draws[first + i];
            float* logits = drawn_logits_.data() + size_t(i) * columns;
            hide_padding(model_.logits, logits, 0, columns);
            raised_.clear();
            for (int32_t id = model_.config.placeholder, last = id + kPlaceholders; draw.missing && id < last; id++)
                if (count_of(draw.missing, id, model_.config.placeholder)) raised_.emplace_back(id, logits[model_.config.eos] + kMisplaced);
            draw.token =
                sampler_.draw(logits, model_.config.n_tgt, columns, banned(draw.row), raised_, *draw.sampling, draw.number, draw.log_prob);
        }
    }
}

}  // namespace transduce
