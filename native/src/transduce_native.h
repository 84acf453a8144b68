/* The C interface of the decoding library. See native/README.md.
 *
 * Functions return 0, or one of the codes below; `transduce_last_error` then has the reason (of the calling thread). Nothing is
 * thrown, nothing is printed, and no pointer is kept after a call returns except where a comment says so.
 */
#ifndef TRANSDUCE_NATIVE_H
#define TRANSDUCE_NATIVE_H

#include <stdint.h>

#define TRANSDUCE_ABI_VERSION 3
#if defined(__GNUC__)
#define TRANSDUCE_API __attribute__((visibility("default")))
#else
#define TRANSDUCE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { TRANSDUCE_OK = 0, TRANSDUCE_INVALID = 1, TRANSDUCE_MEMORY = 2, TRANSDUCE_INTERNAL = 3 };

/* A Transformer. All fields are 32 bits wide. */
typedef struct {
    int32_t d_model, d_ff, n_heads, n_kv_heads, n_encoder_layers, n_decoder_layers, n_src, n_tgt;
    int32_t max_positions;    /* rows of learned positions */
    int32_t pre_norm;         /* 0: norm after the residual connection, 1: before it, and a final norm */
    int32_t norm;             /* 0: layer, 1: rms */
    int32_t embedding_norm;   /* 1: a norm over embeddings and positions */
    int32_t positions;        /* 0: none, 1: sinusoidal, 2: all sines before all cosines, 3: learned, 4: rotary */
    int32_t activation;       /* 0: relu, 1: gelu, 2: gelu_tanh, 3: silu */
    int32_t gated;            /* 1: feed_forward.expand has 2 d_ff outputs */
    float norm_eps, embedding_scale;
    int32_t pad, bos, eos;    /* token ids: pad and bos are never chosen, a target starts with bos */
    int32_t precision;        /* 0: float32, 1: bf16x3 (float32 where the CPU has no AMX), 2: int8 */
    int32_t decoder_only;     /* 1: no encoder and no cross-attention; targets continue their sources, n_src is n_tgt */
    int32_t recurrent;        /* 1: the decoder has recurrent units (SSRU) in place of self-attention */
} transduce_config;

/* Weights by the names of a run folder's model.safetensors (the embedding of a model without an encoder is `tgt_embedding`); row-major float32. A vector has one row. */
typedef struct {
    const char* name;
    const float* data;
    int64_t rows, columns;
} transduce_tensor;

typedef struct transduce_model transduce_model;
typedef struct transduce_job transduce_job;

TRANSDUCE_API int32_t transduce_abi_version(void);
TRANSDUCE_API const char* transduce_last_error(void);
/* The instruction set in use, such as "avx512_vnni"; NULL if TRANSDUCE_NATIVE_ISA names one that is unknown or not available. */
TRANSDUCE_API const char* transduce_isa(void);

/* Copies and packs the weights. */
TRANSDUCE_API int32_t transduce_model_new(const transduce_config* config, const transduce_tensor* tensors, int64_t n_tensors,
                                          transduce_model** model);
/* After its last job is freed. */
TRANSDUCE_API void transduce_model_free(transduce_model* model);

/* Beam search, or greedy search with a beam of 1. */
typedef struct {
    int32_t beam, n_best;
    int32_t scores;  /* 0: greedy search leaves out log-probabilities (they are 0) */
    float length_penalty;
} transduce_options;

/* Sentences to translate: the ids of sentence i are ids[offsets[i]] to ids[offsets[i + 1] - 1], its output has at most limits[i]
 * tokens, the end included. Ids and limits are copied. */
TRANSDUCE_API int32_t transduce_job_new(transduce_model* model, const transduce_options* options, const int32_t* ids, const int64_t* offsets,
                                        const int32_t* limits, int64_t n_sentences, int32_t n_threads, transduce_job** job);
/* Translates sentences until none is left. Call it from `n_threads` threads at once, one call each. */
TRANSDUCE_API int32_t transduce_job_run(transduce_job* job);
/* Makes calls of `transduce_job_run` return after their current step. From any thread. */
TRANSDUCE_API void transduce_job_cancel(transduce_job* job);
/* After all runs: the numbers of hypotheses and of their tokens, over all sentences. */
TRANSDUCE_API int32_t transduce_job_sizes(transduce_job* job, int64_t* n_hypotheses, int64_t* n_tokens);
/* Then: the number of hypotheses of each sentence; of each hypothesis, best first, its number of tokens (without the end), its
 * log-probability, its score, and 1 if it is finished (0: cut off at the limit); and all tokens. */
TRANSDUCE_API int32_t transduce_job_results(transduce_job* job, int32_t* counts, int32_t* lengths, float* log_probs, float* scores,
                                            int8_t* finished, int32_t* tokens);
TRANSDUCE_API void transduce_job_free(transduce_job* job);

#ifdef __cplusplus
}
#endif

#endif
