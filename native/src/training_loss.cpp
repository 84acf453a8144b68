#include <algorithm>
#include <cmath>
#include <vector>

#include "buffer.h"
#include "cpu.h"
#include "pool.h"
#include "training.h"

namespace transduce {
namespace {

constexpr size_t kChunkBytes = 8 << 20;     // size of the exponentials that are kept for the gradient of the weights
constexpr int kChunkRows = 1536;            // at most, if all threads have a block
constexpr int kSummedColumns = 64;          // columns of hidden rows that a thread sums at once

template <class Number>
struct Scratch {
    Buffer<float> logits, products;
    Buffer<Number> exponentials;
};

// The computation of one loss, in chunks of the rows that have a target.
template <class Number>
class SmoothedLoss {
public:
    SmoothedLoss(const LossCall& call, int n_threads)
        : call_(call), kernels_(*training_kernels<Number>()), sizes_{call.width, call.vocabulary}, n_threads_(n_threads) {}

    Loss run() {
        for (int64_t i = 0; i < call_.rows; i++) {
            if (call_.gold[i] != call_.pad) kept_.push_back(i);
            else if (call_.grad_hidden) std::fill_n(call_.grad_hidden + i * call_.width, call_.width, 0.f);
        }
        pack_weight();
        const int n = int(kept_.size());
        block_rows_ = rows_at_once(n);
        const int at_once = n_threads_ * block_rows_, most = int(std::min<size_t>(kChunkRows, kChunkBytes / sizeof(Number) / sizes_.padded_vocabulary()));
        chunk_rows_ = std::max(1, (most + at_once / 2) / at_once) * at_once;  // equally many blocks for each thread
        chunk_rows_ = std::min(chunk_rows_, int(round_up(std::max(n, 1), block_rows_)));
        hidden_.reset(size_t(chunk_rows_) * sizes_.padded_width());
        results_.resize(kept_.size());
        if (call_.grad_weight) {
            exponentials_.reset(size_t(chunk_rows_) * sizes_.padded_vocabulary());
            transposed_.reset(size_t(sizes_.width + 1) * chunk_rows_);
            grad_.reset(size_t(sizes_.panels()) * (sizes_.width + 1) * kPanelColumns);
        }
        for (int first = 0; first < n; first += chunk_rows_) run_chunk(first, std::min(chunk_rows_, n - first));
        if (call_.grad_weight) finish();
        Loss sum;
        for (const Row& row : results_) sum.loss += row.loss, sum.nll += row.nll;
        return sum;
    }

private:
    struct Row {
        double loss = 0, nll = 0;
        float gold_factor = 0;  // factor of the gold token in the gradient of the logits
    };

    template <class Work>
    void share(int n_pieces, Work work) { Pool::get().run(n_threads_, n_pieces, work); }

    const float* weight_row(int64_t token) const { return call_.weight + token * call_.width; }
    const float* hidden_row(int row) const { return call_.hidden + kept_[row] * call_.width; }

    void pack_weight() {
        const int panels = sizes_.panels(), padded = int(round_up(sizes_.width, 16));
        columns_.reset(size_t(sizes_.padded_vocabulary()) * sizes_.padded_width());
        rows_.reset(size_t(sizes_.padded_vocabulary()) * sizes_.width_panels() * kPanelColumns);
        Buffer<float> sums(size_t(panels) * padded);
        std::vector<float> squares(panels);
        share(panels, [&](int p) {
            Number* columns = columns_.data() + size_t(p) * kPanelColumns * sizes_.padded_width();
            squares[p] = kernels_.pack_panel(sizes_, call_.weight, p, columns, rows_.data(), sums.data() + size_t(p) * padded);
        });
        largest_norm_ = std::sqrt(*std::max_element(squares.begin(), squares.end()));
        weight_sum_.assign(sizes_.width, 0);
        for (int p = 0; p < panels; p++)
            for (int k = 0; k < sizes_.width; k++) weight_sum_[k] += sums[size_t(p) * padded + k];
        for (int v = 0; call_.bias && v < sizes_.vocabulary; v++) bias_sum_ += call_.bias[v];
        if (call_.bias) largest_bias_ = *std::max_element(call_.bias, call_.bias + sizes_.vocabulary);
    }

    void run_chunk(int first, int n) {
        const int blocks = (n + block_rows_ - 1) / block_rows_, rows = blocks * block_rows_;
        share(blocks, [&](int b) { run_block(first, b * block_rows_, std::min(block_rows_, n - b * block_rows_)); });
        if (!call_.grad_weight) return;
        share(sizes_.panels(), [&](int p) {
            const int width = sizes_.width + (call_.grad_bias ? 1 : 0);
            kernels_.weight_gradient(transposed_.data(), chunk_rows_, width, exponentials_.data() + size_t(p) * chunk_rows_ * kPanelColumns,
                                     rows, grad_.data() + size_t(p) * (sizes_.width + 1) * kPanelColumns, first > 0);
        });
    }

    // Rows [start, start + n) of the chunk that begins at row `first`, filled up with rows of zeros.
    void run_block(int first, int start, int n) {
        static thread_local Scratch<Number> scratch;
        const int stride = sizes_.padded_width(), product_stride = sizes_.width_panels() * kPanelColumns;
        Number* hidden = hidden_.data() + size_t(start) * stride;
        int64_t gold[kMostRows];
        float largest[kMostRows * 16], sums[kMostRows * 16], gold_logits[kMostRows], inverse[kMostRows];
        const float* rows[kMostRows];
        for (int r = 0; r < block_rows_; r++) {
            gold[r] = r < n ? call_.gold[kept_[first + start + r]] : -1;
            if (r < n) kernels_.round_row(hidden_row(first + start + r), sizes_.width, stride, hidden + r * stride);
            else std::fill_n(hidden + r * stride, stride, 0);
            // Cauchy-Schwarz; rounding to bfloat16 adds less than 1 %
            const float square = r < n ? kernels_.square_of(hidden_row(first + start + r), sizes_.width) : 0;
            largest[r] = 1.01f * std::sqrt(square) * largest_norm_ + largest_bias_;
        }
        scratch.logits.reserve(size_t(block_rows_) * (kernels_.keeps_logits ? sizes_.padded_vocabulary() : kPanelColumns));
        LossBlock<Number> block{start, block_rows_, chunk_rows_, hidden, gold, columns_.data(), rows_.data(), call_.bias, scratch.logits.data(),
                        largest, sums, gold_logits, nullptr, nullptr, nullptr};
        if (call_.grad_weight) {
            scratch.exponentials.reserve(size_t(block_rows_) * kernels_.loss_columns);
            scratch.products.reserve(size_t(block_rows_) * product_stride);
            block.exponentials = scratch.exponentials.data(), block.panels = exponentials_.data(), block.products = scratch.products.data();
        }
        kernels_.loss_block(sizes_, block);
        // The factors 1 / z belong to the rows of the exponentials, and to the sums of these (the gradient of the bias).
        for (int r = 0; r < block_rows_; r++) {
            inverse[r] = r < n ? 1 / sums[r] : 0;
            if (r < n) finish_row(first + start + r, gold_logits[r], largest[r], sums[r]);
            if (r < n && call_.grad_weight) hidden_gradient(first + start + r, gold[r], scratch.products.data() + r * product_stride, inverse[r]);
            rows[r] = r < n ? hidden_row(first + start + r) : nullptr;
        }
        if (call_.grad_weight) kernels_.transpose_rows(rows, inverse, block_rows_, sizes_.width, chunk_rows_, transposed_.data() + start);
    }

    void finish_row(int row, float logit, float largest, float sum) {
        const double log_z = double(largest) + std::log(double(sum));
        const float* hidden = hidden_row(row);
        double sums[8] = {bias_sum_};
        for (int k = 0; k < sizes_.width; k++) sums[k % 8] += double(hidden[k]) * weight_sum_[k];
        const double mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        const double nll = log_z - logit, s = call_.smoothing;
        results_[row] = {(1 - s) * nll - s * (mean / sizes_.vocabulary - log_z), nll, float(std::exp(-nll) - (1 - s))};
    }

    void hidden_gradient(int row, int64_t gold, const float* product, float inverse) {
        float* grad = call_.grad_hidden + kept_[row] * call_.width;
        const float *of_gold = weight_row(gold), factor = results_[row].gold_factor, even = call_.smoothing / float(sizes_.vocabulary);
        for (int k = 0; k < sizes_.width; k++) grad[k] = product[k] * inverse + factor * of_gold[k] - even * weight_sum_[k];
    }

    void finish() {
        const int padded = int(round_up(sizes_.width, kSummedColumns));
        const float even = call_.smoothing / float(sizes_.vocabulary);
        std::vector<float> less(padded);
        share(padded / kSummedColumns, [&](int part) {
            const int from = part * kSummedColumns, end = std::min(from + kSummedColumns, sizes_.width);
            for (size_t i = 0; i < kept_.size(); i++)
                for (int k = from; k < end; k++) less[k] += even * hidden_row(int(i))[k];
        });
        std::vector<std::vector<int>> of_gold(sizes_.panels());
        for (size_t i = 0; i < kept_.size(); i++) of_gold[call_.gold[kept_[i]] / kPanelColumns].push_back(int(i));
        share(sizes_.panels(), [&](int p) {
            const float* grad = grad_.data() + size_t(p) * (sizes_.width + 1) * kPanelColumns;
            kernels_.unpack_gradient(sizes_, grad, p, less.data(), call_.grad_weight);
            for (int v = p * kPanelColumns; call_.grad_bias && v < std::min((p + 1) * kPanelColumns, sizes_.vocabulary); v++)
                call_.grad_bias[v] = grad[size_t(sizes_.width) * kPanelColumns + v % kPanelColumns] - even * float(kept_.size());
            for (const int i : of_gold[p]) {
                const int64_t gold = call_.gold[kept_[i]];
                const float factor = results_[i].gold_factor, *hidden = hidden_row(i);
                float* to = call_.grad_weight + gold * call_.width;
                for (int k = 0; k < sizes_.width; k++) to[k] += factor * hidden[k];
                if (call_.grad_bias) call_.grad_bias[gold] += factor;
            }
        });
    }

    const LossCall& call_;
    const TrainingKernels<Number>& kernels_;
    const LossSizes sizes_;
    const int n_threads_;
    std::vector<int64_t> kept_;
    std::vector<Row> results_;
    std::vector<float> weight_sum_;
    float largest_norm_ = 0, largest_bias_ = 0;
    double bias_sum_ = 0;
    int block_rows_ = 0, chunk_rows_ = 0;
    Buffer<Number> columns_, rows_, hidden_, exponentials_, transposed_;
    Buffer<float> grad_;  // gradient of the weights, with that of the bias as last row: [panels][width + 1][64]
};

}  // namespace

template <class Number>
Loss smoothed_loss(const LossCall& call, int n_threads) { return SmoothedLoss<Number>(call, n_threads).run(); }

template Loss smoothed_loss<uint16_t>(const LossCall&, int);
template Loss smoothed_loss<float>(const LossCall&, int);

template <>
const TrainingKernels<uint16_t>* training_kernels() {
#if defined(TRANSDUCE_EMULATED_AVX512) && defined(TRANSDUCE_EMULATED_TILES)
    return &kAmxBf16Kernels;
#elif defined(TRANSDUCE_EMULATED_AVX512)
    return &kBf16Kernels;
#elif defined(__x86_64__)
    if (chosen_isa() == Isa::amx) return &kAmxBf16Kernels;
    if (chosen_isa() == Isa::avx512_vnni && has_bf16()) return &kBf16Kernels;
#endif
    return nullptr;
}

template <>
const TrainingKernels<float>* training_kernels() {
#if defined(__x86_64__)
    if (chosen_isa() >= Isa::avx512) return &kAvx512TrainingKernels;
    if (chosen_isa() >= Isa::avx2) return &kAvx2TrainingKernels;
#endif
    return nullptr;
}

}  // namespace transduce
