/* The C interface of the decoding library. See native/README.md.
 *
 * Functions return 0, or one of the codes below; `transduce_last_error` then has the reason (of the calling thread). Nothing is
 * thrown, nothing is printed, and no pointer is kept after a call returns except where a comment says so.
 */
#ifndef TRANSDUCE_NATIVE_H
#define TRANSDUCE_NATIVE_H

#include <stdint.h>

#define TRANSDUCE_ABI_VERSION 22
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
    int32_t tied;             /* 1: the output uses the target embedding; 0: output_embedding.weight */
    int32_t guided_layer, guided_head; /* decoder layer and head of cross-attention that were trained to align; -1: none */
} transduce_config;

/* Weights by the names of a run folder's model.safetensors (the embedding of a model without an encoder is `tgt_embedding`); row-major
 * float32. A vector has one row. */
typedef struct {
    const char* name;
    const float* data;
    int64_t rows, columns;
} transduce_tensor;

typedef struct transduce_model transduce_model;
typedef struct transduce_queue transduce_queue;
typedef struct transduce_client transduce_client;

TRANSDUCE_API int32_t transduce_abi_version(void);
TRANSDUCE_API const char* transduce_last_error(void);
/* The instruction set in use, such as "avx512_vnni"; NULL if TRANSDUCE_NATIVE_ISA names one that is unknown or not available. */
TRANSDUCE_API const char* transduce_isa(void);

/* Packs copies of the weights. */
TRANSDUCE_API int32_t transduce_model_new(const transduce_config* config, const transduce_tensor* tensors, int64_t n_tensors,
                                          transduce_model** model);
/* After its last queue is freed. */
TRANSDUCE_API void transduce_model_free(transduce_model* model);

/* ---- Translation
 *
 * A queue has the sentences of all its clients. A client submits sentences, and collects what comes of them, in the order in which it
 * comes. Threads that call `transduce_work` or `transduce_serve` decode. Sentences with different options are decoded together; this
 * does not change a result. All functions may be called from any thread at any time, except that a client has one thread that
 * collects, and that nothing else uses what is freed. */

/* `n_workers`: the number of threads that decode at the same time. A sentence without a deadline counts as one whose deadline is
 * `patience` seconds after it was submitted: the earliest is decoded first, then the longest. */
TRANSDUCE_API int32_t transduce_queue_new(transduce_model* model, int32_t n_workers, double patience, transduce_queue** queue);
/* Cancels all sentences and lets the threads that decode or collect return. */
TRANSDUCE_API void transduce_queue_close(transduce_queue* queue);
/* Closes it and waits for `transduce_work` and `transduce_serve`. Clients may be freed later, but not used. */
TRANSDUCE_API void transduce_queue_free(transduce_queue* queue);

/* What a queue is doing: sentences that wait, their source tokens, sentences that have not ended; steps and rows decoded so far. */
typedef struct {
    int64_t n_waiting, n_waiting_tokens, n_open, n_steps, n_rows;
} transduce_load;
TRANSDUCE_API int32_t transduce_queue_load(transduce_queue* queue, transduce_load* load);

TRANSDUCE_API int32_t transduce_client_new(transduce_queue* queue, transduce_client** client);
/* A file descriptor that can be read when there is something to collect that there was not at the last `transduce_collect`, for event
 * loops. `transduce_collect` reads it; it is closed with the client. */
TRANSDUCE_API int32_t transduce_client_fd(transduce_client* client, int32_t* fd);
/* Cancels its sentences and takes no more; `transduce_collect` no longer waits. */
TRANSDUCE_API void transduce_client_close(transduce_client* client);
TRANSDUCE_API void transduce_client_free(transduce_client* client);

/* A decoding option, by its name in transduce/config/decoding.py. In addition `stream`, 1: tokens are reported as soon as no hypothesis
 * that may still be the best differs in them. Options that are not given: greedy search. `sample` needs numbers, and no allowed tokens. */
typedef struct {
    const char* name;
    double value;
} transduce_option;

/* The ids of sentence i are ids[offsets[i]] to ids[offsets[i + 1] - 1]. Its output starts with its prefix, likewise in `prefixes`
 * (null: no prefixes), and has at most limits[i] tokens, the prefix and the end included. It consists of the tokens `allowed`,
 * likewise, in ascending order and with those of the prefix; others have no probability. None, or null: all tokens. A source of a model
 * with an encoder has no padding inside. */
typedef struct {
    const int32_t* ids;
    const int64_t* offsets;
    const int32_t* prefixes;
    const int64_t* prefix_offsets;
    const int32_t* allowed;
    const int64_t* allowed_offsets;
    const int32_t* limits;
    const double* numbers;  /* sampling: numbers of [0, 1), limits[i] for each sample, one behind another; they decide what is drawn */
    int64_t n;
} transduce_sentences;

/* Adds sentences, all or none, with the tickets first_ticket, first_ticket + 1, ..., which no sentence of the client may have that
 * has not ended. They expire after `seconds` (infinity: never). `works`: 1 if this thread calls `transduce_work` next. Everything is
 * copied. */
TRANSDUCE_API int32_t transduce_submit(transduce_client* client, const transduce_option* options, int64_t n_options,
                                       const transduce_sentences* sentences, int64_t first_ticket, double seconds, int32_t works);
/* The sentence ends at the next step of the search; its end is reported. No effect if it has ended. */
TRANSDUCE_API int32_t transduce_cancel(transduce_client* client, int64_t ticket);
/* Decodes in this thread until all sentences of a client have ended, or for about `seconds`; `n_open`: how many have not ended. */
TRANSDUCE_API int32_t transduce_work(transduce_client* client, double seconds, int64_t* n_open);
/* Decodes in this thread until the queue is closed. */
TRANSDUCE_API int32_t transduce_serve(transduce_queue* queue);

enum { TRANSDUCE_DONE = 0, TRANSDUCE_TOKENS = 1, TRANSDUCE_CANCELLED = 2, TRANSDUCE_EXPIRED = 3, TRANSDUCE_FAILED = 4 };

/* Takes what has come of the client's sentences; waits up to `seconds` until there is something. Gives the numbers of events, of
 * their hypotheses, of the tokens of these and of their weights. */
TRANSDUCE_API int32_t transduce_collect(transduce_client* client, double seconds, int64_t* n_events, int64_t* n_hypotheses,
                                        int64_t* n_tokens, int64_t* n_weights);
/* What it took. Of each event its ticket, one of the codes above (each sentence has one event, the last, that is not
 * TRANSDUCE_TOKENS) and its number of hypotheses. Of each hypothesis, best first, its number of tokens (without the end), its
 * log-probability, its score, 1 if it is finished (0: cut off at the limit), and the number of weights of each of its tokens. All
 * tokens. TRANSDUCE_TOKENS has one hypothesis: the tokens that are new. All weights: of each token the attention of the guided head
 * to each token of the source, at the step that read the token; zeros if no step did, which is so of the last token that was cut off.
 * No weights without a guided head, and of searches of more than 2^24 of them. */
TRANSDUCE_API int32_t transduce_results(transduce_client* client, int64_t* tickets, int32_t* outcomes, int32_t* counts, int32_t* lengths,
                                        float* log_probs, float* scores, int8_t* finished, int32_t* widths, int32_t* tokens,
                                        float* weights);

/* ---- Scoring */

/* Pairs of a source and a target. Source i: sources[source_offsets[i]] to sources[source_offsets[i + 1] - 1], with its end; null in a
 * model without an encoder. The model reads inputs[offsets[i]] to inputs[offsets[i + 1] - 1]; after each of them, `tokens` has the
 * token whose log-probability is wanted, or -1. Sources and `tokens` are without padding. */
typedef struct {
    const int32_t* sources;
    const int64_t* source_offsets;
    const int32_t* inputs;
    const int32_t* tokens;
    const int64_t* offsets;
    int64_t n;
} transduce_pairs;

/* Log-probabilities in nats, one for each input; 0 where none is wanted. `heads`: n_heads times a decoder layer and a head of its
 * cross-attention, whose weights [n_heads, inputs, source] of each pair, one pair behind another, go to `weights`; both may be null.
 * Several threads may score at the same time. */
TRANSDUCE_API int32_t transduce_score(transduce_model* model, const transduce_pairs* pairs, float* log_probs, const int32_t* heads,
                                      int32_t n_heads, float* weights);

/* ---- Training */

/* 2: this CPU has the kernels of training in bfloat16 and float32; 1: in float32; 0: none. Calls have their type of numbers in `is_bf16`. */
TRANSDUCE_API int32_t transduce_can_train(void);

/* The output layer with label-smoothed cross-entropy: logits of hidden [rows, width] times weight [vocabulary, width], plus bias. Rows
 * whose gold token is `pad` have no loss and no gradient. */
typedef struct {
    const float *hidden, *weight, *bias;  /* bias: null, or [vocabulary] */
    const int64_t* gold;                  /* [rows] */
    int64_t rows, pad;
    int32_t width, vocabulary, is_bf16;   /* of the numbers that are multiplied */
    float smoothing;
    float *grad_hidden, *grad_weight, *grad_bias;  /* written; all null: no gradients. grad_bias is null without a bias */
    float *loss, *nll;                    /* written: the sums of the smoothed loss and of -log p(gold), in nats */
} transduce_loss_call;

TRANSDUCE_API int32_t transduce_loss(const transduce_loss_call* call, int32_t n_threads);

/* dropout(softmax(scale * query key^T + bias)) value, of all heads of some sequences. The numbers of one head at one position
 * side by side; strides are of sequences, heads and positions, in numbers. Groups of heads / kv_heads heads share keys and values. The
 * output is contiguous: [batch, positions, heads, width]. */
typedef struct {
    int64_t batch;
    int32_t heads, kv_heads, queries, keys, width, value_width;
    int32_t causal;           /* a query sees no later key; as many keys as queries */
    int32_t is_bf16;
    float scale, p;           /* p: of dropping a weight */
    uint64_t seed;
    const void *query, *key, *value;
    int64_t query_strides[3], key_strides[3], value_strides[3];
    const float* bias;        /* null, or numbers of keys side by side */
    int64_t bias_strides[3];  /* 0: the same for all */
    void* output;             /* transduce_attend */
    const void* grad_output;  /* transduce_attend_backward: the rest */
    int64_t grad_strides[3];
    void *grad_query, *grad_key, *grad_value;
    int64_t grad_query_strides[3], grad_key_strides[3], grad_value_strides[3];
} transduce_heads_call;

TRANSDUCE_API int32_t transduce_attend(const transduce_heads_call* call, int32_t n_threads);
TRANSDUCE_API int32_t transduce_attend_backward(const transduce_heads_call* call, int32_t n_threads);

/* x + dropout(update), and its norm: LayerNorm, or RMSNorm. Rows of `width` numbers; those of `update` may be bfloat16. What is dropped
 * is a function of the seed and of the number of the element. */
typedef struct {
    int64_t rows;
    int32_t width, rms, is_bf16; /* is_bf16: the update, and `rounded` */
    float epsilon, p;          /* p: of dropping */
    uint64_t seed;
    const float* x;            /* null: zeros */
    const void* update;        /* null: none */
    const float *gain, *shift; /* of the norm; shift: null: none */
    float *sum, *output, *statistics; /* sum: null without an update; statistics: [rows, 2], null without a norm; output: of the norm, or null */
    void* rounded;             /* the norm in bfloat16, if is_bf16; null: not wanted */
    const float *grad_output, *normed; /* backward: the rest; `normed`: what the norm has read */
    const void* grad_rounded;  /* null: none; then also grad_output may be null */
    const float* grad_kept;    /* added to grad_x: of x where it is used beside the norm. Null: it is not */
    float* grad_x;             /* null without a norm, where it is grad_output */
    void* grad_update;
    float *grad_gain, *grad_shift;
} transduce_residual_call;

TRANSDUCE_API int32_t transduce_residual(const transduce_residual_call* call, int32_t n_threads);
TRANSDUCE_API int32_t transduce_residual_backward(const transduce_residual_call* call, int32_t n_threads);

/* dropout(table[ids] * scale + positions), in float32. Row r is at position r % length. */
typedef struct {
    int64_t rows, length;
    int32_t width, vocabulary;
    const int64_t* ids;        /* [rows] */
    const float *table, *positions; /* [vocabulary, width]; null, or [length, width] */
    float scale, p;            /* p: of dropping */
    uint64_t seed;
    float* output;
    const float* grad_output;  /* backward */
    float *grad_table, *grad_positions; /* null: not wanted */
    int32_t adds;              /* whether to add to grad_table what would be written to it */
} transduce_embedding_call;

TRANSDUCE_API int32_t transduce_embedding(const transduce_embedding_call* call, int32_t n_threads);
TRANSDUCE_API int32_t transduce_embedding_backward(const transduce_embedding_call* call, int32_t n_threads);

/* x weight^T + bias, with an activation and dropout after it, and its gradients. */
typedef struct {
    int64_t rows;
    int32_t inputs, outputs;
    int32_t is_bf16, x_is_bf16, grad_is_bf16; /* whether products and output, x, and grad_output are bfloat16; otherwise float32 */
    const void* x;             /* [rows, inputs] */
    int32_t activation;        /* -1: none; 0: ReLU, 1: GELU, 2: its tanh form, 3: SiLU */
    float p;                   /* of dropping what is activated; 0 without an activation */
    uint64_t seed;
    const float *weight, *bias; /* [outputs, inputs]; null, or [outputs] */
    void* output;              /* [rows, outputs] */
    void* slope;               /* of the output, for the gradient; null: not wanted, or ReLU, whose gradient needs `output` */
    const void* grad_output;   /* backward */
    void* grad_x;              /* of the type of x; null: not wanted */
    float *grad_weight, *grad_bias; /* grad_bias: null without a bias */
    int32_t adds;              /* whether to add to grad_x what would be written to it */
} transduce_linear_call;

TRANSDUCE_API int32_t transduce_linear(const transduce_linear_call* call, int32_t n_threads);
TRANSDUCE_API int32_t transduce_linear_backward(const transduce_linear_call* call, int32_t n_threads);

/* A linear layer of a sub-layer. */
typedef struct {
    const float *weight, *bias;  /* [outputs, inputs]; null, or [outputs] */
    float *grad_weight, *grad_bias;
    int32_t inputs, outputs;
} transduce_layer;

/* A sub-layer of a Transformer's block, of x [batch, positions, width], with its residual connection: norm(x + dropout(f(x))), or with pre_norm
 * x + dropout(f(norm(x))). f: two linear layers, and between them either the activation of the first one's output with dropout, or attention of
 * its heads. Bfloat16, if is_bf16: what is not float*. */
typedef struct transduce_sublayer_call {
    int64_t batch;
    int32_t positions, width;
    int32_t is_bf16, read_is_bf16, pre_norm, rms;
    float epsilon, p, inner_p;   /* p, inner_p: of dropping the result, and what is activated or the weights of attention */
    uint64_t seed, inner_seed;
    const float *gain, *shift;   /* shift: null: none */
    float *grad_gain, *grad_shift;
    transduce_layer first, second; /* first: queries and, without `key`, keys and values, side by side */
    int32_t activation;          /* as in transduce_linear_call */
    int32_t heads, kv_heads, keys, key_width, value_width, causal; /* heads: 0 without attention; the others as in transduce_heads_call */
    const void *key, *value;     /* of other positions than x's; null: of x's */
    int64_t key_strides[3], value_strides[3];
    const float* bias;
    int64_t bias_strides[3];
    const float* x;
    const void* read;            /* x for the first layer, in either type; null: x. Not with pre_norm */
    float *output, *sum;         /* written: the result, and without pre_norm what the norm has read */
    void* rounded;               /* the result in bfloat16; null: not wanted */
    void* normed;                /* with pre_norm, its result */
    float* statistics;           /* [rows, 2] */
    void *hidden, *slope, *inner; /* the first layer's output, its slope as in transduce_linear_call, and that of attention */
    const float* grad_output;    /* backward, which reads what has been written: the rest */
    const void* grad_rounded;    /* this or grad_output may be null; not with pre_norm */
    float* grad_x;
    void *grad_read, *grad_key, *grad_value; /* grad_read: of the type of `read`; without it, grad_x has both */
    int64_t grad_key_strides[3], grad_value_strides[3];
} transduce_sublayer_call;

TRANSDUCE_API int32_t transduce_sublayer(const transduce_sublayer_call* call, int32_t n_threads);
TRANSDUCE_API int32_t transduce_sublayer_backward(const transduce_sublayer_call* call, int32_t n_threads);

/* A function of those above that take a call and the number of threads, and its call. */
typedef struct {
    int32_t (*function)(const void* call, int32_t n_threads);
    const void* call;
} transduce_step;

/* Queues n calls, which threads of the library, or one that waits here, make in order; with one thread they are made before the return. If
 * more than `most` are unfinished, the calling thread first helps until at most `most / 2` are. `left`: how many are unfinished, the last ones: what they read and
 * write must be kept. After a failure the remaining calls are skipped, and the run that leaves none returns the error. There is one queue in a
 * process: `left` and the error are those of all callers. */
TRANSDUCE_API int32_t transduce_run(const transduce_step* steps, int64_t n, int32_t n_threads, int64_t most, int64_t* left);

/* A float32 tensor for transduce_adam: its weights, their gradient, the running means of the gradient and of its square, and the number
 * of updates, which grows by one. */
typedef struct transduce_adam_tensor {
    float* weight;
    const float* grad;
    float *mean, *square;
    float* step;
    int64_t n;
} transduce_adam_tensor;

/* One update of Adam with decoupled weight decay, from gradients times `scale`. */
TRANSDUCE_API int32_t transduce_adam(const transduce_adam_tensor* tensors, int64_t n, double lr, double beta1, double beta2, double epsilon,
                                     double weight_decay, double scale, int32_t n_threads);

/* A float32 matrix [rows, columns] for transduce_muon: its weights, their gradient, and the running mean of the gradient. */
typedef struct transduce_muon_matrix {
    float* weight;
    const float* grad;
    float* mean;
    int32_t rows, columns;
    float rate, weight_kept, momentum;
} transduce_muon_matrix;

/* One update of Muon from gradients times `scale`: X = (1 - momentum) gradient + momentum mean, divided by its norm; then `steps` times
 * a X + (b G + c G G) X with G = X X^T (of X^T where X is tall); weight = weight_kept * weight - rate * X. */
TRANSDUCE_API int32_t transduce_muon(const transduce_muon_matrix* matrices, int64_t n, float scale, const float* coefficients, int32_t steps,
                                     int32_t n_threads);

/* The norm of all numbers of `n` tensors. */
TRANSDUCE_API int32_t transduce_norm(const float* const* tensors, const int64_t* sizes, int64_t n, int32_t n_threads, double* norm);

#ifdef __cplusplus
}
#endif

#endif
