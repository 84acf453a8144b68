// The C interface: checks what it is given, and turns exceptions into codes and messages.

#include <algorithm>
#include <cmath>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "engine.h"
#include "transduce_native.h"

struct transduce_model {
    transduce::Model model;
    transduce::WorkerPool pool;
};
struct transduce_job {
    transduce::Job job;
};

namespace {

thread_local std::string last_error;

int fail(int code, const char* reason) noexcept {
    try {
        last_error = reason;
    } catch (...) {
        last_error.clear();
    }
    return code;
}

template <class Work>
int guarded(Work work) noexcept {
    try {
        work();
        return TRANSDUCE_OK;
    } catch (const std::invalid_argument& error) {
        return fail(TRANSDUCE_INVALID, error.what());
    } catch (const std::bad_alloc&) {
        return fail(TRANSDUCE_MEMORY, "out of memory");
    } catch (const std::length_error&) {
        return fail(TRANSDUCE_MEMORY, "out of memory");
    } catch (const std::exception& error) {
        return fail(TRANSDUCE_INTERNAL, error.what());
    } catch (...) {
        return fail(TRANSDUCE_INTERNAL, "unknown error");
    }
}

void require(bool fine, const char* problem) {
    if (!fine) throw std::invalid_argument(problem);
}

constexpr int kMaxBeam = 512, kMaxThreads = 1024;
constexpr int32_t kMaxSource = 1 << 16, kMaxLimit = 1'000'000;

void check(const transduce_config& config, const transduce_options& o, const int32_t* ids, const int64_t* offsets, const int32_t* limits,
           int64_t n, int32_t n_threads) {
    require(1 <= o.beam && o.beam <= kMaxBeam, "beam: must be from 1 to 512");
    require(1 <= o.n_best && o.n_best <= o.beam, "n_best: must be from 1 to beam");
    require(o.length_penalty >= 0 && o.length_penalty <= 10, "length_penalty: must be from 0 to 10");
    require(o.scores == 1 || (o.scores == 0 && o.beam == 1), "scores: must be 0 or 1; a beam needs them");
    require(1 <= n_threads && n_threads <= kMaxThreads, "n_threads: must be from 1 to 1024");
    require(n >= 0 && n <= INT32_MAX, "n_sentences: must be from 0 to 2^31 - 1");
    require(n == 0 || (ids && offsets && limits), "ids, offsets and limits must not be null");
    require(n == 0 || offsets[0] == 0, "offsets: must start with 0");
    const bool learned = config.positions == 3;
    for (int64_t i = 0; i < n; i++) {
        const int64_t length = offsets[i + 1] >= offsets[i] ? offsets[i + 1] - offsets[i] : 0;
        require(1 <= length && length <= kMaxSource, "offsets: a sentence must have from 1 to 65536 tokens");
        require(1 <= limits[i] && limits[i] <= kMaxLimit, "limits: must be from 1 to 1000000");
        const int64_t n_positions = config.decoder_only ? length + limits[i] - 1 : std::max<int64_t>(length, limits[i]);
        require(!learned || n_positions <= config.max_positions, "a sentence or a limit is longer than the learned positions");
        for (int64_t k = offsets[i]; k < offsets[i + 1]; k++)
            require(0 <= ids[k] && ids[k] < config.n_src && ids[k] != config.pad, "ids: must be tokens of the source vocabulary, without padding");
    }
}

}  // namespace

extern "C" {

int32_t transduce_abi_version(void) { return TRANSDUCE_ABI_VERSION; }

const char* transduce_last_error(void) { return last_error.c_str(); }

const char* transduce_isa(void) {
    const char* name = nullptr;
    guarded([&] { name = transduce::name_of(transduce::chosen_isa()); });
    return name;
}

int32_t transduce_model_new(const transduce_config* config, const transduce_tensor* tensors, int64_t n_tensors, transduce_model** model) {
    return guarded([&] {
        require(config && tensors && model && n_tensors >= 0, "config, tensors and model must not be null");
        *model = new transduce_model{transduce::Model(*config, tensors, n_tensors), {}};
    });
}

void transduce_model_free(transduce_model* model) { delete model; }

int32_t transduce_job_new(transduce_model* model, const transduce_options* options, const int32_t* ids, const int64_t* offsets,
                          const int32_t* limits, int64_t n, int32_t n_threads, transduce_job** result) {
    return guarded([&] {
        require(model && options && result, "model, options and job must not be null");
        check(model->model.config, *options, ids, offsets, limits, n, n_threads);
        auto made = std::make_unique<transduce_job>();
        transduce::Job& job = made->job;
        job.model = &model->model, job.pool = &model->pool;
        job.options = {options->beam, options->n_best, options->length_penalty, options->scores == 1, model->model.config.eos};
        job.n_threads = n_threads;
        job.offsets.assign(1, 0);
        if (n) {
            job.offsets.assign(offsets, offsets + n + 1);
            job.ids.assign(ids, ids + offsets[n]);
            job.limits.assign(limits, limits + n);
        }
        job.plan();
        *result = made.release();
    });
}

int32_t transduce_job_run(transduce_job* job) {
    return guarded([&] {
        require(job, "job must not be null");
        job->job.run();
    });
}

void transduce_job_cancel(transduce_job* job) {
    if (job) job->job.cancelled = true;
}

int32_t transduce_job_sizes(transduce_job* job, int64_t* n_hypotheses, int64_t* n_tokens) {
    return guarded([&] {
        require(job && n_hypotheses && n_tokens, "job and sizes must not be null");
        *n_hypotheses = *n_tokens = 0;
        for (const auto& sentence : job->job.results)
            for (const transduce::Finished& found : sentence) *n_hypotheses += 1, *n_tokens += int64_t(found.ids.size());
    });
}

int32_t transduce_job_results(transduce_job* job, int32_t* counts, int32_t* lengths, float* log_probs, float* scores, int8_t* finished,
                              int32_t* tokens) {
    return guarded([&] {
        require(job && counts && lengths && log_probs && scores && finished && tokens, "job and results must not be null");
        for (const auto& sentence : job->job.results) {
            *counts++ = int32_t(sentence.size());
            for (const transduce::Finished& found : sentence) {
                *lengths++ = int32_t(found.ids.size());
                *log_probs++ = found.log_prob, *scores++ = found.score, *finished++ = found.finished;
                for (const int32_t id : found.ids) *tokens++ = id;
            }
        }
    });
}

void transduce_job_free(transduce_job* job) { delete job; }

}  // extern "C"
