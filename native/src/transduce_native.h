/* The C interface of the decoding library. See native/README.md.
 *
 * Functions return 0 or one of the error codes below; `transduce_last_error` then returns the message of the calling thread's last error.
 * Nothing is thrown, nothing is printed, and no pointer is kept after a call returns unless a comment says so.
 */
#ifndef TRANSDUCE_NATIVE_H
#define TRANSDUCE_NATIVE_H

#include <stdint.h>

#define TRANSDUCE_ABI_VERSION 31
#if defined(__GNUC__)
#define TRANSDUCE_API __attribute__((visibility("default")))
#else
#define TRANSDUCE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { TRANSDUCE_OK = 0, TRANSDUCE_INVALID = 1, TRANSDUCE_MEMORY = 2, TRANSDUCE_INTERNAL = 3 };

/* The sizes and options of a Transformer. All fields are 32 bits wide. */
typedef struct {
    int32_t d_model, d_ff, n_heads, n_kv_heads;
    int32_t d_key, d_value;   /* widths of a head's queries and keys, and of its values */
    int32_t n_encoder_layers, n_decoder_layers, n_src, n_tgt;
    int32_t max_positions;    /* rows of learned positions */
    int32_t pre_norm;         /* 0: norm after the residual connection, 1: before it, and a final norm */
    int32_t norm;             /* 0: layer, 1: rms */
    int32_t embedding_norm;   /* 1: a norm over embeddings and positions */
    int32_t positions;        /* 0: none, 1: learned, 2: rotary, 3: T5's biases, 4: ALiBi, 5: the paper's sinusoids, 6: sinusoids with all sines before
                               * all cosines, 7: fairseq's sinusoids, 8: Marian's sinusoids */
    int32_t activation;       /* 0: relu, 1: gelu, 2: gelu_tanh, 3: silu */
    int32_t gated;            /* 1: feed_forward.expand has 2 d_ff outputs */
    float norm_eps, embedding_scale;
    int32_t pad, unk, bos, eos; /* token ids: pad, unk and bos are never chosen */
    int32_t start;            /* the token with which a target starts, and that is read in place of bos */
    int32_t placeholder;      /* the first of 8 ids that stand for parts of a source; -1: none */
    int32_t precision;        /* 0: float32, 1: bf16x3 (float32 if the CPU has no AMX), 2: int8 */
    int32_t decoder_only;     /* 1: no encoder and no cross-attention; targets continue their sources, n_src is n_tgt */
    int32_t recurrent;        /* 1: the decoder has recurrent units (SSRU) in place of self-attention */
    int32_t tied;             /* 1: the output uses the target embedding; 0: output_embedding.weight */
    int32_t tied_inputs;      /* 1: sources use the target embedding; 0: src_embedding.table.weight */
    int32_t guided_layer, guided_head; /* decoder layer and head of the cross-attention that was trained to align; -1: none */
} transduce_config;

/* A weight, row-major float32, by its name in a run folder's model.safetensors (but the embedding of a model without an encoder is called
 * `tgt_embedding`). A vector has one row. */
typedef struct {
    const char* name;
    int64_t rows, columns;
} transduce_tensor;

/* Writes `n` rows of a tensor, from row `first` on, to `rows`. Returns 0 if it cannot. */
typedef int32_t (*transduce_read)(int64_t tensor, int64_t first, int64_t n, float* rows);

typedef struct transduce_model transduce_model;
typedef struct transduce_queue transduce_queue;
typedef struct transduce_client transduce_client;

TRANSDUCE_API int32_t transduce_abi_version(void);
TRANSDUCE_API const char* transduce_last_error(void);
/* The instruction set in use, such as "avx512_vnni"; NULL if TRANSDUCE_NATIVE_ISA names one that is unknown or not available. */
TRANSDUCE_API const char* transduce_isa(void);

/* Makes a model from packed copies of the weights, which are read a few rows at a time. */
TRANSDUCE_API int32_t transduce_model_new(const transduce_config* config, const transduce_tensor* tensors, int64_t n_tensors,
                                          transduce_read read, transduce_model** model);
/* Frees a model. All its queues must have been freed before. */
TRANSDUCE_API void transduce_model_free(transduce_model* model);

/* ---- Translation
 *
 * A queue contains the sentences of all its clients. A client submits sentences and collects events, such as results, in the order in which
 * they happen. A sentence is open until it has ended. Threads that call `transduce_work` or `transduce_serve` decode. Sentences with different
 * options are decoded together, which does not change their results. All functions may be called from any thread at any time, with two
 * exceptions: only one thread collects a client's events, and no other thread may use an object while it is being freed. */

/* `n_workers`: the maximum number of threads that decode at the same time. */
TRANSDUCE_API int32_t transduce_queue_new(transduce_model* model, int32_t n_workers, transduce_queue** queue);
/* Cancels all sentences and lets the threads that decode or collect return. */
TRANSDUCE_API void transduce_queue_close(transduce_queue* queue);
/* Closes a queue, waits until `transduce_work` and `transduce_serve` have returned, and frees it. Afterwards, its clients can only be freed. */
TRANSDUCE_API void transduce_queue_free(transduce_queue* queue);

/* The load of a queue: numbers of waiting sentences, of their source tokens, of open sentences, and of steps and rows decoded so far. */
typedef struct {
    int64_t n_waiting, n_waiting_tokens, n_open, n_steps, n_rows;
} transduce_load;
TRANSDUCE_API int32_t transduce_queue_load(transduce_queue* queue, transduce_load* load);

TRANSDUCE_API int32_t transduce_client_new(transduce_queue* queue, transduce_client** client);
/* Gives a file descriptor for event loops. It is readable when there are events since the last `transduce_collect`, which reads it. It is
 * closed with the client. */
TRANSDUCE_API int32_t transduce_client_fd(transduce_client* client, int32_t* fd);
/* Cancels all sentences of a client and accepts no more. */
TRANSDUCE_API void transduce_client_close(transduce_client* client);
TRANSDUCE_API void transduce_client_free(transduce_client* client);

/* A decoding option, by its name in transduce/config/decoding.py. There is a further option `stream`; 1: tokens are reported as soon as all
 * hypotheses that may still be the best agree on them. The default is greedy search. `sample` needs `numbers` in transduce_sentences. */
typedef struct {
    const char* name;
    double value;
} transduce_option;

/* A token that may come in `state`, and the state after it, which is higher. */
typedef struct {
    int32_t state, token, next;
} transduce_spelling;

/* Sentences to translate, or prompts to continue. The ids of sentence i are ids[offsets[i]] to ids[offsets[i + 1] - 1]. A source of a model with
 * an encoder has no padding inside. The output starts with the sentence's prefix in `prefixes` (null: no prefixes), and has at most limits[i]
 * tokens, including the prefix and the end. After the prefix, the sentence's steps in `spellings` (null: none), ordered by state and token, say
 * which tokens may come, from state 0 until a state without steps. The first unscored[i] tokens of the prefix (null: none) count in lengths,
 * but not in log-probabilities. copies[i] has 8 bits for each placeholder, the first placeholder in the lowest bits: the exact number of its
 * occurrences in the output, unless the output is cut off; null: outputs have no placeholders. */
typedef struct {
    const int32_t* ids;
    const int64_t* offsets;
    const int32_t* prefixes;
    const int64_t* prefix_offsets;
    const transduce_spelling* spellings;
    const int64_t* spelling_offsets;
    const int32_t* limits;
    const int32_t* unscored;
    const uint64_t* copies;
    const double* numbers;  /* sampling: random numbers in [0, 1), limits[i] for each sample, one sample after another */
    int64_t n;
} transduce_sentences;

/* Adds sentences, all or none, with the tickets first_ticket, first_ticket + 1, ..., which the client's other open sentences must not have.
 * Sentences with the smallest `order` are decoded first; of these, the sentences submitted first; of these, the longest. `works`: 1 if this
 * thread calls `transduce_work` next. Everything is copied. */
TRANSDUCE_API int32_t transduce_submit(transduce_client* client, const transduce_option* options, int64_t n_options,
                                       const transduce_sentences* sentences, int64_t first_ticket, double order, int32_t works);
/* Ends a sentence at the next step of its search; the end is reported as an event. No effect if it has ended already. */
TRANSDUCE_API int32_t transduce_cancel(transduce_client* client, int64_t ticket);
/* Decodes in this thread until all sentences of a client have ended, or for about `seconds`. Gives the number of its open sentences. */
TRANSDUCE_API int32_t transduce_work(transduce_client* client, double seconds, int64_t* n_open);
/* Decodes in this thread until the queue is closed. */
TRANSDUCE_API int32_t transduce_serve(transduce_queue* queue);

enum { TRANSDUCE_DONE = 0, TRANSDUCE_TOKENS = 1, TRANSDUCE_CANCELLED = 2, TRANSDUCE_FAILED = 3 };

/* Takes the client's new events. Gives their number, and the numbers of their hypotheses, of the hypotheses' tokens, and of attention
 * weights. */
TRANSDUCE_API int32_t transduce_collect(transduce_client* client, int64_t* n_events, int64_t* n_hypotheses, int64_t* n_tokens, int64_t* n_weights);
/* Writes the events that `transduce_collect` took. For each event: its ticket, one of the codes above, and its number of hypotheses. The last
 * event of a sentence, and no other, has a code other than TRANSDUCE_TOKENS. For each hypothesis, best first: its number of tokens (without
 * the end), its log-probability, its score, 1 if it is finished (0: cut off at the limit), and its number of weights per token. An event
 * TRANSDUCE_TOKENS has one hypothesis, with the new tokens. Then all tokens, and all weights: for each token, the attention of the guided
 * head to each token of the source at the step that read the token; zeros for the last token of a cut-off hypothesis, which was not read.
 * There are no weights without a guided head, or if a search has more than 2^24 of them. */
TRANSDUCE_API int32_t transduce_results(transduce_client* client, int64_t* tickets, int32_t* outcomes, int32_t* counts, int32_t* lengths,
                                        float* log_probs, float* scores, int8_t* finished, int32_t* widths, int32_t* tokens,
                                        float* weights);

/* ---- Scoring */

/* Pairs of a source and a target. Source i is sources[source_offsets[i]] to sources[source_offsets[i + 1] - 1], including its end; null in a
 * model without an encoder. The decoder reads inputs[offsets[i]] to inputs[offsets[i + 1] - 1]. For each input, `tokens` has the next token, whose
 * log-probability is computed, or -1. Sources and `tokens` contain no padding. */
typedef struct {
    const int32_t* sources;
    const int64_t* source_offsets;
    const int32_t* inputs;
    const int32_t* tokens;
    const int64_t* offsets;
    int64_t n;
} transduce_pairs;

/* Computes a log-probability in nats for each input; 0 if its token is -1. `heads`: n_heads pairs of a decoder layer and a head of its
 * cross-attention. Their attention weights, [n_heads, inputs, source] for each pair, are written to `weights`, one pair after another. Both may
 * be null. Several threads may score at the same time. */
TRANSDUCE_API int32_t transduce_score(transduce_model* model, const transduce_pairs* pairs, float* log_probs, const int32_t* heads,
                                      int32_t n_heads, float* weights);

/* ---- Training */

/* Returns 2 if there are training kernels for this CPU in bfloat16 and float32, 1 if only in float32, 0 if there are none. `is_bf16` in the calls
 * below selects the type of the numbers that are multiplied. */
TRANSDUCE_API int32_t transduce_can_train(void);

/* The output layer with label-smoothed cross-entropy. Logits are hidden [rows, width] times the transposed weight [vocabulary, width], plus
 * bias. Rows whose gold token is `pad` have no loss and no gradient. */
typedef struct {
    const float *hidden, *weight, *bias;  /* bias: null, or [vocabulary] */
    const int64_t* gold;                  /* [rows] */
    int64_t rows, pad;
    int32_t width, vocabulary, is_bf16;
    float smoothing;
    float *grad_hidden, *grad_weight, *grad_bias;  /* written; all null: no gradients. grad_bias is null without a bias */
    float *loss, *nll;                    /* written: the sums of the smoothed loss and of -log p(gold), in nats */
} transduce_loss_call;

TRANSDUCE_API int32_t transduce_loss(const transduce_loss_call* call, int32_t n_threads);

/* An embedding layer, dropout(table[ids] * scale + positions), in float32. Row r is at position r % length. */
typedef struct {
    int64_t rows, length;
    int32_t width, vocabulary;
    const int64_t* ids;        /* [rows] */
    const float *table, *positions; /* table: [vocabulary, width]; positions: null, or [length, width] */
    float scale, p;            /* p: the probability of dropping a number */
    uint64_t seed;
    float* output;
    const float* grad_output;  /* for the backward pass */
    float *grad_table, *grad_positions; /* null: not computed */
    int32_t adds;              /* whether the gradient is added to grad_table instead of replacing its values */
} transduce_embedding_call;

TRANSDUCE_API int32_t transduce_embedding(const transduce_embedding_call* call, int32_t n_threads);
TRANSDUCE_API int32_t transduce_embedding_backward(const transduce_embedding_call* call, int32_t n_threads);

/* The blocks of an encoder or a decoder. Each block has self-attention, attention to a memory if there is one, and a feed-forward network. Each of
 * these sub-layers has a residual connection and a norm, which comes first if pre_norm. If pre_norm, a final norm follows the last block.
 *
 * `weights` has the parameters in this order, with null for missing parameters. For each block: weight and bias of the projection to queries, keys
 * and values, weight and bias of the output projection, gain and shift of the norm; if there is a memory: weight and bias of the projection to
 * queries, of the projection to keys and values, and of the output projection, gain and shift of the norm; weight and bias of both layers of the
 * feed-forward network, gain and shift of the norm. If pre_norm: gain and shift of the final norm. With `recurrent`, the simpler simple recurrent
 * unit (SSRU) replaces self-attention; it has one layer, the projection to gates and values. `grads` has the gradients in the same order; null: not
 * computed. */
typedef struct {
    int64_t batch;
    int32_t positions, width, n_blocks, inner_width, heads, kv_heads, key_width, value_width, memory_positions;
    int32_t is_bf16, pre_norm, rms, causal, activation, gated, recurrent; /* activation: 0: ReLU, 1: GELU, 2: its tanh form, 3: SiLU */
    float epsilon, p, attention_p, activation_p; /* probabilities of dropout: on a sub-layer's output, on attention weights, on activations */
    uint64_t seed;
    const float* const* weights;
    float* const* grads;
    const int8_t* adds;         /* for each gradient, whether it is added to the values in `grads` instead of replacing them */
    const float* x;             /* [batch, positions, width] */
    const float* bias;          /* is added to the scores of self-attention; null: none. It is contiguous along keys. bias_strides: its strides along
                                 * sequences, heads and queries; 0 if it is broadcast along this axis */
    int64_t bias_strides[3];
    const float *cos, *sin;     /* [positions, key_width / 2], of the angles by which self-attention's queries and keys are rotated; null: none */
    const float* memory;        /* [batch, memory_positions, width]; null: none */
    const float* memory_bias;   /* is added to the scores of attention to the memory, as `bias` */
    int64_t memory_bias_strides[3];
    void* kept;                 /* memory of the size that transduce_stack_memory gives, from the forward to the backward pass */
    float* output;              /* [batch, positions, width] */
    const float* grad_output;   /* for the backward pass */
    float *grad_x, *grad_memory; /* null: not computed */
} transduce_stack_call;

TRANSDUCE_API int32_t transduce_stack_memory(const transduce_stack_call* call, int64_t* bytes);
TRANSDUCE_API int32_t transduce_stack(const transduce_stack_call* call, int32_t n_threads);
TRANSDUCE_API int32_t transduce_stack_backward(const transduce_stack_call* call, int32_t n_threads);

/* A float32 tensor of n numbers for transduce_adam: weights, gradient, running means of the gradient and of its square, and the number of
 * updates, which grows by one. */
typedef struct transduce_adam_tensor {
    float* weight;
    const float* grad;
    float *mean, *square;
    float* step;
    int64_t n;
} transduce_adam_tensor;

/* Makes one update of Adam with decoupled weight decay; gradients are multiplied by `scale`. */
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

/* Makes one update of Muon; gradients are multiplied by `scale`. X is (1 - momentum) gradient + momentum mean, divided by its norm. `steps` times,
 * X is replaced by a X + (b G + c G G) X with G = X X^T and `coefficients` a, b, c (on X^T if X has more rows than columns). Then weight becomes
 * weight_kept * weight - rate * X. */
TRANSDUCE_API int32_t transduce_muon(const transduce_muon_matrix* matrices, int64_t n, float scale, const float* coefficients, int32_t steps,
                                     int32_t n_threads);

/* Computes the Euclidean norm of all numbers of `n` tensors together. */
TRANSDUCE_API int32_t transduce_norm(const float* const* tensors, const int64_t* sizes, int64_t n, int32_t n_threads, double* norm);

#ifdef __cplusplus
}
#endif

#endif
