/* The fused decoder pass: RMSNorm, rotary embedding, grouped-query attention over paged KV, SwiGLU.
 *
 * One sdcp_parallel call per pass; its phases are separated by barriers. Work is split by output columns (matmuls), by
 * rows (norms, conversions) and by (sequence, row tile, KV head, split) in attention. None of it enters the sums, so a
 * row's logits are the same to the bit in every batch, chunking and number of threads. Attention covers the context
 * in splits of SPLIT positions, fixed by absolute position, and merges them in order.
 */
#include "decoder.h"

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SPLIT 128        /* positions per split: a head's K and V stay in the first-level cache while queries pass */
#define QUERY_TILE 6     /* query heads that share one reading of K and V */
#define TILE_QUERIES 48  /* query heads of one attention task: its rows times the query group */
#define REPEATED_ROWS 8  /* so few each thread norms and converts for itself: cheaper than a barrier (1.2 us) */
#define TASKS_A_THREAD 4 /* with fewer tasks, the splits of the context become tasks of their own */

/* Softmax over some positions: its largest score, the sum of exponentials and the weighted sum of values. */
struct state {
    float max, total, padding[14];
    float acc[];
};

struct vector_ops {
    const char *isa;
    void (*rms_norm)(const float *x, const float *weight, float epsilon, int n, float *out);
    void (*swiglu)(const float *gate, const float *up, int n, float *out);
    void (*attend)(int queries, int is_bf16, int dim, int padded, float scale, const float *const *query,
                   const int *visible, const char *const *keys, const char *const *values, struct state *const *states);
    void (*merge)(struct state *into, const struct state *next, int padded);
};

#pragma GCC diagnostic ignored "-Wpsabi" /* 64-byte vectors never cross a call */
#define VARIANT(name) name##_generic
#define ISA "generic"
#define WIDTH 1 /* 16-float vectors for each of QUERY_TILE query heads: as many accumulators as the registers hold */
#include "decoder_vectors.h"
#if defined(__x86_64__) && !defined(__clang__) && !defined(SDCP_GENERIC) /* clang has no target pragma */
#define X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#undef VARIANT
#undef ISA
#define VARIANT(name) name##_avx2
#define ISA "avx2"
#include "decoder_vectors.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#undef VARIANT
#undef ISA
#undef WIDTH
#define VARIANT(name) name##_avx512
#define ISA "avx512"
#define WIDTH 4
#include "decoder_vectors.h"
#pragma GCC pop_options
#endif

/* The best copy for this processor; SDCP_ISA=generic or avx2 lowers the choice, as it does for the matmuls. */
static const struct vector_ops *vectors(void) {
    static const struct vector_ops *_Atomic chosen;
    const struct vector_ops *ops = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (ops) return ops;
    ops = &ops_generic;
#ifdef X86_VARIANTS
    const char *limit = getenv("SDCP_ISA");
    bool generic = limit && !strcmp(limit, "generic"), avx2 = limit && !strcmp(limit, "avx2");
    if (!generic && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) ops = &ops_avx2;
    if (!generic && !avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        ops = &ops_avx512;
#endif
    atomic_store_explicit(&chosen, ops, memory_order_relaxed);
    return ops;
}

const char *sdcp_decoder_isa(void) { return vectors()->isa; }

/* ---- one pass ---------------------------------------------------------------------------------------------------- */

/* Rows of one sequence against one KV head, over all splits of the context or over one. */
struct task {
    int sequence, begin, end, kv_head, split; /* split -1: all of them */
};

struct pass {
    const sdcp_decoder *d;
    const sdcp_batch *b;
    const struct vector_ops *ops;
    int group, padded, qkv_width, splits, tile_rows, task_count;
    bool split_tasks, repeated;
    size_t element, head_bytes, block_bytes, state_floats, normed_floats, prepared_bytes;
    float scale;
    float *logits;
    /* scratch */
    float *hidden, *qkv, *attended, *gate, *up, *cosine, *sine; /* [rows, ...] */
    float *normed;  /* [rows, hidden], for each thread if `repeated` */
    char *prepared; /* the same in the weight format's activations */
    float *partial; /* states [row, head, split] when split_tasks */
    float *own;     /* states of one attention task, for each thread */
    struct task *tasks;
    atomic_int *next_task; /* [layers] */
};

static int least(int a, int b) { return a < b ? a : b; }

static struct state *state_at(const struct pass *p, float *base, size_t i) {
    return (struct state *)(base + i * p->state_floats);
}

static struct state *partial_of(const struct pass *p, int t, int head, int split) {
    const size_t row_and_head = (size_t)t * (size_t)p->d->heads + (size_t)head;
    return state_at(p, p->partial, row_and_head * (size_t)p->splits + (size_t)split);
}

size_t sdcp_kv_block_bytes(const sdcp_decoder *d) {
    const int padded = (d->head_dim + 15) / 16 * 16;
    const size_t head = (size_t)d->block_size * (size_t)(d->head_dim + padded) * (d->kv_bf16 ? 2 : 4);
    return head * (size_t)d->kv_heads * (size_t)d->layers;
}

static int64_t check(const sdcp_decoder *d, const sdcp_batch *b) {
    const int64_t slots = (int64_t)d->blocks * d->block_size;
    if (b->rows < 1 || b->sequences < 1 || b->query_starts[0] != 0 || b->query_starts[b->sequences] != b->rows)
        return SDCP_BAD_QUERY_STARTS;
    for (int s = 0; s < b->sequences; s++) {
        const int begin = b->query_starts[s], end = b->query_starts[s + 1], context = b->context[s];
        if (end < begin || end > b->rows) return SDCP_BAD_QUERY_STARTS;
        if (context < 1 || context > d->context) return SDCP_BAD_CONTEXT;
        const int32_t *table = b->block_tables + (size_t)s * (size_t)b->table_width;
        const int needed = (context + d->block_size - 1) / d->block_size;
        if (needed > b->table_width) return SDCP_BAD_BLOCK_TABLES;
        for (int i = 0; i < needed; i++)
            if (table[i] < 0 || table[i] >= d->blocks) return SDCP_BAD_BLOCK_TABLES;
        for (int t = begin; t < end; t++) {
            if (b->token_ids[t] < 0 || b->token_ids[t] >= d->vocab) return SDCP_BAD_TOKEN_IDS;
            if (b->positions[t] < (t > begin ? b->positions[t - 1] + 1 : 0) || b->positions[t] >= context)
                return SDCP_BAD_POSITIONS; /* ascending, within the context */
            if (b->slots[t] < 0 || b->slots[t] >= slots) return SDCP_BAD_SLOTS;
        }
    }
    if (b->logit_rows < 0 || b->logit_rows > b->rows) return SDCP_BAD_LOGIT_ROWS;
    for (int i = 0; i < b->logit_rows; i++)
        if (b->wanted[i] < 0 || b->wanted[i] >= b->rows) return SDCP_BAD_LOGIT_ROWS;
    return 0;
}

/* How this batch's attention is cut into tasks. */
static void plan(struct pass *p, int threads) {
    const sdcp_batch *b = p->b;
    int tiles = 0, longest = 0;
    for (int s = 0; s < b->sequences; s++) {
        tiles += (b->query_starts[s + 1] - b->query_starts[s] + p->tile_rows - 1) / p->tile_rows;
        longest = b->context[s] > longest ? b->context[s] : longest;
    }
    p->splits = (longest + SPLIT - 1) / SPLIT;
    p->split_tasks = p->splits > 1 && tiles * p->d->kv_heads < TASKS_A_THREAD * threads;
    p->task_count = tiles * p->d->kv_heads * (p->split_tasks ? p->splits : 1);
}

static void list_tasks(struct pass *p) {
    const sdcp_batch *b = p->b;
    int count = 0;
    for (int s = 0; s < b->sequences; s++) {
        const int splits = p->split_tasks ? (b->context[s] + SPLIT - 1) / SPLIT : 1, end = b->query_starts[s + 1];
        for (int t = b->query_starts[s]; t < end; t += p->tile_rows)
            for (int h = 0; h < p->d->kv_heads; h++)
                for (int i = 0; i < splits; i++)
                    p->tasks[count++] = (struct task){s, t, least(t + p->tile_rows, end), h, p->split_tasks ? i : -1};
    }
    p->task_count = count;
}

/* A task's running states and those of its current split. */
static size_t own_states(const struct pass *p) { return 2 * (size_t)(p->tile_rows * p->group); }

/* Lay the scratch out from `base`; returns its bytes. */
static size_t lay_out(struct pass *p, char *base, int threads) {
    const sdcp_decoder *d = p->d;
    const size_t rows = (size_t)p->b->rows;
    const int outputs = d->heads * d->head_dim, widest = outputs > d->mlp ? outputs : d->mlp;
    const size_t copies = p->repeated ? (size_t)threads : 1;
    const int k = widest > d->hidden ? widest : d->hidden;
    const size_t for_layers = sdcp_scratch_bytes(d->layer[0].qkv.format, k, p->b->rows);
    const size_t for_head = sdcp_scratch_bytes(d->head.format, d->hidden, p->b->logit_rows);
    size_t bytes = 0;
    p->normed_floats = (rows * (size_t)d->hidden + 15) / 16 * 16;
    p->prepared_bytes = for_layers > for_head ? for_layers : for_head;
#define TAKE(field, size) (p->field = (void *)(base + bytes), bytes += ((size) + 63) / 64 * 64)
    TAKE(hidden, rows * (size_t)d->hidden * 4);
    TAKE(normed, copies * p->normed_floats * 4);
    TAKE(qkv, rows * (size_t)p->qkv_width * 4);
    TAKE(attended, rows * (size_t)outputs * 4);
    TAKE(gate, rows * (size_t)d->mlp * 4);
    TAKE(up, rows * (size_t)d->mlp * 4);
    TAKE(cosine, rows * (size_t)d->head_dim * 2);
    TAKE(sine, rows * (size_t)d->head_dim * 2);
    TAKE(prepared, copies * p->prepared_bytes);
    TAKE(partial, p->split_tasks ? rows * (size_t)d->heads * (size_t)p->splits * p->state_floats * 4 : 0);
    TAKE(own, own_states(p) * p->state_floats * 4 * (size_t)threads);
    TAKE(tasks, (size_t)p->task_count * sizeof(struct task));
    TAKE(next_task, (size_t)d->layers * sizeof(atomic_int));
#undef TAKE
    return bytes;
}

static void share(int count, int thread, int threads, int *begin, int *end) {
    *begin = (int)((int64_t)count * thread / threads);
    *end = (int)((int64_t)count * (thread + 1) / threads);
}

static float bf16_to_float(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static uint16_t float_to_bf16(float f) { /* to nearest even; a NaN stays one */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Embedding and the angles of the rotary embedding, as transformers computes them: float32 products. */
static void begin_row(const struct pass *p, int t) {
    const sdcp_decoder *d = p->d;
    const size_t first = (size_t)p->b->token_ids[t] * (size_t)d->hidden;
    const uint16_t *halves = (const uint16_t *)d->embedding + first;
    float *hidden = p->hidden + (size_t)t * (size_t)d->hidden;
    if (d->embedding_bf16)
        for (int i = 0; i < d->hidden; i++) hidden[i] = bf16_to_float(halves[i]);
    else
        memcpy(hidden, (const float *)d->embedding + first, (size_t)d->hidden * sizeof(float));
    const int half = d->head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float angle = (float)p->b->positions[t] * d->inverse_frequency[i];
        p->cosine[t * half + i] = cosf(angle);
        p->sine[t * half + i] = sinf(angle);
    }
}

/* What one thread prepares of its phase's input: its share of the rows for all, or all of them for itself. */
struct input {
    int begin, end;
    float *normed;
    char *prepared;
};

static struct input input_of(const struct pass *p, int rows, int thread, int threads) {
    struct input in = {0, rows, p->normed, p->prepared};
    if (p->repeated) {
        in.normed += p->normed_floats * (size_t)thread;
        in.prepared += p->prepared_bytes * (size_t)thread;
    } else {
        share(rows, thread, threads, &in.begin, &in.end);
    }
    return in;
}

/* Norm rows of hidden (`which[i]`, or i) and convert them; a barrier unless the thread did it for itself. */
static void norm_rows(const struct pass *p, const struct input *in, const int32_t *which, const float *weight,
                      int format, int threads) {
    const int hidden = p->d->hidden;
    for (int i = in->begin; i < in->end; i++)
        p->ops->rms_norm(p->hidden + (size_t)(which ? which[i] : i) * (size_t)hidden, weight, p->d->norm_epsilon,
                         hidden, in->normed + (size_t)i * (size_t)hidden);
    sdcp_prepare_rows(format, in->normed, hidden, hidden, in->begin, in->end, in->prepared);
    if (!p->repeated) sdcp_barrier(threads);
}

/* Convert rows of x, which all threads have finished, for a weight. */
static void convert_rows(const struct pass *p, const struct input *in, const sdcp_weight *w, const float *x,
                         int threads) {
    if (w->format == SDCP_F32) return; /* read as it is */
    sdcp_prepare_rows(w->format, x, w->k, w->k, in->begin, in->end, in->prepared);
    if (!p->repeated) sdcp_barrier(threads);
}

static void add_bias(const sdcp_weight *w, const float *bias, float *y, int rows, int thread, int threads) {
    int begin, end;
    sdcp_columns(w, thread, threads, &begin, &end);
    for (int t = 0; t < rows; t++)
        for (int i = begin; i < end; i++) y[(size_t)t * (size_t)w->n + (size_t)i] += bias[i];
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

static void rotate(float *x, int dim, const float *cosine, const float *sine) {
    const int half = dim / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

/* Norm and rotate the query heads of one KV head in place, and put its key and value into the row's slot. */
static void place_row(const struct pass *p, const sdcp_layer *layer, int l, int t, int kv_head) {
    const sdcp_decoder *d = p->d;
    const int dim = d->head_dim, size = d->block_size, slot = p->b->slots[t], offset = slot % size;
    const float *cosine = p->cosine + t * (dim / 2), *sine = p->sine + t * (dim / 2);
    float *row = p->qkv + (size_t)t * (size_t)p->qkv_width;
    float *key = row + (d->heads + kv_head) * dim, *value = key + d->kv_heads * dim;
    for (int h = 0; h <= p->group; h++) { /* the last one is the key */
        float *x = h < p->group ? row + (kv_head * p->group + h) * dim : key;
        const float *norm = h < p->group ? layer->query_norm : layer->key_norm;
        if (norm) p->ops->rms_norm(x, norm, d->norm_epsilon, dim, x);
        rotate(x, dim, cosine, sine);
    }
    char *head = d->kv + (size_t)(slot / size) * p->block_bytes + (size_t)(l * d->kv_heads + kv_head) * p->head_bytes;
    const size_t first_key = (size_t)(offset / 16 * dim * 16 + offset % 16);
    const size_t first_value = (size_t)size * (size_t)dim + (size_t)offset * (size_t)p->padded;
    for (int i = 0; i < dim; i++) {
        if (d->kv_bf16) {
            ((uint16_t *)head)[first_key + (size_t)i * 16] = float_to_bf16(key[i]);
            ((uint16_t *)head)[first_value + (size_t)i] = float_to_bf16(value[i]);
        } else {
            ((float *)head)[first_key + (size_t)i * 16] = key[i];
            ((float *)head)[first_value + (size_t)i] = value[i];
        }
    }
}

/* Positions of one split that a row sees. */
static int visible_in(const struct pass *p, int t, int split) {
    return least(p->b->positions[t] + 1 - split * SPLIT, SPLIT);
}

/* One split for all query heads of a task. Results go to result[query]. */
static void attend_split(const struct pass *p, const struct task *k, int l, int split, struct state **result) {
    const sdcp_decoder *d = p->d;
    const char *keys[SPLIT / 16], *values[SPLIT / 16];
    const int32_t *table = p->b->block_tables + (size_t)k->sequence * (size_t)p->b->table_width;
    const int last = least(p->b->context[k->sequence] - split * SPLIT, SPLIT), size = d->block_size;
    for (int g = 0; g < (last + 15) / 16; g++) {
        const int position = split * SPLIT + 16 * g, offset = position % size;
        const char *head = d->kv + (size_t)table[position / size] * p->block_bytes +
                           (size_t)(l * d->kv_heads + k->kv_head) * p->head_bytes;
        keys[g] = head + (size_t)(offset * d->head_dim) * p->element;
        values[g] = head + (size_t)(size * d->head_dim + offset * p->padded) * p->element;
    }
    const float *query[QUERY_TILE];
    struct state *states[QUERY_TILE];
    int visible[QUERY_TILE], count = 0, queries = (k->end - k->begin) * p->group;
    for (int i = 0; i <= queries; i++) {
        if (count == QUERY_TILE || (i == queries && count)) {
            p->ops->attend(count, d->kv_bf16, d->head_dim, p->padded, p->scale, query, visible, keys, values, states);
            count = 0;
        }
        if (i == queries) break;
        const int t = k->begin + i / p->group, head = k->kv_head * p->group + i % p->group;
        const int sees = visible_in(p, t, split);
        if (sees < 1) continue;
        query[count] = p->qkv + (size_t)t * (size_t)p->qkv_width + head * d->head_dim;
        visible[count] = sees;
        states[count++] = result[i];
    }
}

static void finish_head(const struct pass *p, int t, int head, const struct state *s) {
    const int dim = p->d->head_dim;
    float *out = p->attended + ((size_t)t * (size_t)p->d->heads + (size_t)head) * (size_t)dim;
    const float scale = 1.0f / s->total;
    for (int i = 0; i < dim; i++) out[i] = s->acc[i] * scale;
}

static void run_task(const struct pass *p, const struct task *k, int l, float *own) {
    const int queries = (k->end - k->begin) * p->group;
    struct state *running[queries], *current[queries];
    for (int i = 0; i < queries; i++) {
        const int t = k->begin + i / p->group, head = k->kv_head * p->group + i % p->group;
        running[i] = p->split_tasks ? partial_of(p, t, head, k->split) : state_at(p, own, (size_t)i);
        current[i] = state_at(p, own, (size_t)(queries + i));
    }
    if (p->split_tasks) {
        attend_split(p, k, l, k->split, running);
        return;
    }
    attend_split(p, k, l, 0, running);
    for (int split = 1; split * SPLIT <= p->b->positions[k->end - 1]; split++) {
        attend_split(p, k, l, split, current);
        for (int i = 0; i < queries; i++)
            if (visible_in(p, k->begin + i / p->group, split) > 0) p->ops->merge(running[i], current[i], p->padded);
    }
    for (int i = 0; i < queries; i++)
        finish_head(p, k->begin + i / p->group, k->kv_head * p->group + i % p->group, running[i]);
}

static void merge_head(const struct pass *p, int t, int head) {
    struct state *running = partial_of(p, t, head, 0);
    for (int split = 1; visible_in(p, t, split) > 0; split++)
        p->ops->merge(running, partial_of(p, t, head, split), p->padded);
    finish_head(p, t, head, running);
}

/* ---- the pass ---------------------------------------------------------------------------------------------------- */

/* y = x W^T + bias (or y += that, to the residual) for this thread's columns. */
static void multiply(const sdcp_weight *w, const float *bias, const float *x, const char *prepared, float *y, int rows,
                     bool add, int thread, int threads) {
    if (add)
        sdcp_matmul_add_part(w, x, w->k, y, w->n, rows, prepared, thread, threads);
    else
        sdcp_matmul_part(w, x, w->k, y, w->n, rows, prepared, thread, threads);
    if (bias) add_bias(w, bias, y, rows, thread, threads);
}

static void attention_half(struct pass *p, int l, const struct input *in, int thread, int threads) {
    const sdcp_decoder *d = p->d;
    const sdcp_layer *layer = &d->layer[l];
    const int rows = p->b->rows;
    int begin, end;
    norm_rows(p, in, NULL, layer->attention_norm, layer->qkv.format, threads);
    multiply(&layer->qkv, layer->qkv_bias, in->normed, in->prepared, p->qkv, rows, false, thread, threads);
    sdcp_barrier(threads);
    share(rows * d->kv_heads, thread, threads, &begin, &end);
    for (int i = begin; i < end; i++) place_row(p, layer, l, i / d->kv_heads, i % d->kv_heads);
    sdcp_barrier(threads);
    float *own = p->own + own_states(p) * p->state_floats * (size_t)thread;
    for (int i; (i = atomic_fetch_add_explicit(&p->next_task[l], 1, memory_order_relaxed)) < p->task_count;)
        run_task(p, &p->tasks[i], l, own);
    sdcp_barrier(threads);
    if (p->split_tasks) {
        share(rows * d->heads, thread, threads, &begin, &end);
        for (int i = begin; i < end; i++) merge_head(p, i / d->heads, i % d->heads);
        sdcp_barrier(threads);
    }
    convert_rows(p, in, &layer->o, p->attended, threads);
    multiply(&layer->o, layer->o_bias, p->attended, in->prepared, p->hidden, rows, true, thread, threads);
    sdcp_barrier(threads);
}

static void mlp_half(struct pass *p, int l, const struct input *in, int thread, int threads) {
    const sdcp_layer *layer = &p->d->layer[l];
    const int rows = p->b->rows, mlp = p->d->mlp;
    int begin, end;
    norm_rows(p, in, NULL, layer->mlp_norm, layer->gate.format, threads);
    multiply(&layer->gate, layer->gate_bias, in->normed, in->prepared, p->gate, rows, false, thread, threads);
    multiply(&layer->up, layer->up_bias, in->normed, in->prepared, p->up, rows, false, thread, threads);
    sdcp_columns(&layer->gate, thread, threads, &begin, &end); /* gate and up are split alike: no barrier between */
    for (int t = 0; t < rows; t++) {
        const size_t at = (size_t)t * (size_t)mlp + (size_t)begin;
        p->ops->swiglu(p->gate + at, p->up + at, end - begin, p->gate + at);
    }
    sdcp_barrier(threads);
    convert_rows(p, in, &layer->down, p->gate, threads);
    multiply(&layer->down, layer->down_bias, p->gate, in->prepared, p->hidden, rows, true, thread, threads);
    sdcp_barrier(threads);
}

static void run_pass(void *arg, int thread, int threads) {
    struct pass *p = arg;
    const sdcp_decoder *d = p->d;
    const sdcp_batch *b = p->b;
    int begin, end;
    share(b->rows, thread, threads, &begin, &end);
    for (int t = begin; t < end; t++) begin_row(p, t);
    sdcp_barrier(threads);
    const struct input in = input_of(p, b->rows, thread, threads), last = input_of(p, b->logit_rows, thread, threads);
    for (int l = 0; l < d->layers; l++) {
        attention_half(p, l, &in, thread, threads);
        mlp_half(p, l, &in, thread, threads);
    }
    norm_rows(p, &last, b->wanted, d->final_norm, d->head.format, threads);
    multiply(&d->head, NULL, last.normed, last.prepared, p->logits, b->logit_rows, false, thread, threads);
}

int64_t sdcp_decoder_forward(const sdcp_decoder *d, const sdcp_batch *b, void *scratch, size_t scratch_bytes,
                             float *logits) {
    const int64_t wrong = check(d, b);
    if (wrong) return wrong;
    const int threads = sdcp_pool_threads(), padded = (d->head_dim + 15) / 16 * 16, group = d->heads / d->kv_heads;
    struct pass p = {
        .d = d,
        .b = b,
        .ops = vectors(),
        .group = group,
        .repeated = b->rows <= REPEATED_ROWS,
        .padded = padded,
        .qkv_width = (d->heads + 2 * d->kv_heads) * d->head_dim,
        .tile_rows = group < TILE_QUERIES ? TILE_QUERIES / group : 1,
        .element = d->kv_bf16 ? 2 : 4,
        .block_bytes = sdcp_kv_block_bytes(d),
        .head_bytes = sdcp_kv_block_bytes(d) / (size_t)(d->layers * d->kv_heads),
        .state_floats = sizeof(struct state) / sizeof(float) + (size_t)padded,
        .scale = 1.0f / sqrtf((float)d->head_dim),
        .logits = logits,
    };
    plan(&p, threads);
    const size_t needed = lay_out(&p, NULL, threads);
    if (needed > scratch_bytes) return (int64_t)needed;
    lay_out(&p, scratch, threads);
    list_tasks(&p);
    for (int l = 0; l < d->layers; l++) atomic_init(&p.next_task[l], 0);
    sdcp_parallel(run_pass, &p);
    return 0;
}
