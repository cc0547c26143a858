/* One forward pass of a Llama-shaped decoder over a ragged batch with a paged KV cache, as one call. */
#ifndef SDCP_DECODER_H
#define SDCP_DECODER_H

#include "sdcp_kernels.h"

/* Vectors are float32 and NULL where the model has none. Sizes: q = heads * head_dim, kv = kv_heads * head_dim. */
typedef struct {
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head_dim], Qwen3 */
    const float *qkv_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
    sdcp_weight qkv; /* q + 2 kv outputs: queries, keys, values */
    sdcp_weight o, gate, up, down; /* all of one format, the same in every layer */
} sdcp_layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, mlp, vocab, context;
    int32_t kv_bf16, embedding_bf16; /* else float32 */
    int32_t blocks, block_size;      /* block_size: a multiple of 16 */
    float norm_epsilon;
    int32_t reserved;
    const void *embedding;          /* [vocab, hidden] */
    const float *inverse_frequency; /* [head_dim / 2] */
    const float *final_norm;        /* [hidden] */
    const sdcp_layer *layer;        /* [layers] */
    char *kv;                       /* blocks * sdcp_kv_block_bytes(...) */
    sdcp_weight head;               /* vocab outputs */
} sdcp_decoder;

typedef struct {
    int32_t rows, sequences, table_width, logit_rows;
    const int32_t *token_ids, *positions; /* [rows] */
    const int32_t *query_starts;          /* [sequences + 1] */
    const int32_t *context;               /* [sequences] positions after this pass */
    const int32_t *block_tables;          /* [sequences, table_width] */
    const int32_t *slots;                 /* [rows] block * block_size + offset */
    const int32_t *wanted;                /* [logit_rows] rows */
} sdcp_batch;

enum { /* what is wrong with a batch */
    SDCP_BAD_TOKEN_IDS = -1,
    SDCP_BAD_POSITIONS = -2,
    SDCP_BAD_QUERY_STARTS = -3,
    SDCP_BAD_CONTEXT = -4,
    SDCP_BAD_BLOCK_TABLES = -5,
    SDCP_BAD_SLOTS = -6,
    SDCP_BAD_LOGIT_ROWS = -7,
};

/* Bytes of one block, all layers together: [layer][kv head][keys, values], keys [block_size / 16][head_dim][16] and
 * values [block_size][head_dim rounded up to 16]. */
SDCP_EXPORT size_t sdcp_kv_block_bytes(const sdcp_decoder *d);

/* Write logits [logit_rows, vocab]. Returns 0, one of SDCP_BAD_..., or, having done nothing, the bytes of 64-byte
 * aligned scratch that this batch needs. A batch that is refused has touched no KV. */
SDCP_EXPORT int64_t sdcp_decoder_forward(const sdcp_decoder *d, const sdcp_batch *b, void *scratch,
                                         size_t scratch_bytes, float *logits);

/* The instruction set of norms, rotary embedding and attention: "avx512", "avx2" or "generic". */
SDCP_EXPORT const char *sdcp_decoder_isa(void);

#endif
