/* The small-row matmul y = x W^T over packed weights, and the thread pool it runs on.
 *
 * Batch invariance: every output element is accumulated over k in one fixed order, whatever the number of rows, the
 * row's place among them, or the number of threads. So a row's result is the same to the bit alone, among 32 rows and
 * inside a long prefill, on one machine (another instruction set may round differently).
 *
 * Everything is float32 outside: x, y. Sizes are in elements unless the name says bytes. Rows are row-major; `ldx` and
 * `ldy` are the distances between rows in elements. Packed weights and scratch must be 64-byte aligned. A weight's
 * column is one output.
 */
#ifndef SDCP_KERNELS_H
#define SDCP_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define SDCP_EXPORT __attribute__((visibility("default")))
#define SDCP_PANEL 32 /* outputs of one packed panel: two AVX-512 vectors; threads split the work by whole panels */
#define SDCP_GROUP 32 /* k values that share a scale and a minimum (INT8, INT4) */

enum {
    SDCP_F32 = 0,
    SDCP_BF16 = 1, /* bfloat16 weights and activations, float32 accumulation */
    SDCP_INT8 = 2, /* weights scale * q + minimum, q of 8 bits; activations int8 with one scale per row and group */
    SDCP_INT4 = 3, /* the same with q of 4 bits */
};

typedef struct {
    int32_t format;
    int32_t n; /* outputs */
    int32_t k; /* inputs */
    int32_t reserved;
    const void *data; /* sdcp_packed_bytes(format, n, k) bytes, written by sdcp_pack */
} sdcp_weight;

/* ---- pool (pool.c) ---------------------------------------------------------------------------------------------- */

typedef void (*sdcp_task)(void *arg, int thread, int threads);

/* Start (or restart) the pool with `threads` threads in all, the caller of sdcp_parallel among them. Returns how many
 * there are: fewer than asked for when the system gives no more. Call it while no pass runs. */
SDCP_EXPORT int sdcp_pool_start(int threads);
SDCP_EXPORT void sdcp_pool_stop(void);
SDCP_EXPORT int sdcp_pool_threads(void); /* 1 before sdcp_pool_start */

/* Run task(arg, 0..threads-1, threads), thread 0 on the caller, and return when all are done. Concurrent callers take
 * turns; a call from inside a task runs on that thread alone (threads = 1). */
SDCP_EXPORT void sdcp_parallel(sdcp_task task, void *arg);

/* Inside a task: wait until all `threads` (the task's own argument) have arrived; what they wrote before is then
 * visible to all. */
SDCP_EXPORT void sdcp_barrier(int threads);

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Zeroed memory on 2 MiB boundaries that asks for huge pages, for packed weights and KV: use few and large ones.
 * NULL when there is none. `bytes` of sdcp_free must be that of sdcp_alloc. */
SDCP_EXPORT void *sdcp_alloc(size_t bytes);
SDCP_EXPORT void sdcp_free(void *p, size_t bytes);

/* ---- weights ----------------------------------------------------------------------------------------------------- */

SDCP_EXPORT size_t sdcp_packed_bytes(int format, int n, int k); /* a multiple of 64 */

/* Pack w (n x k row-major, as nn.Linear holds it) into out. Runs on the pool. */
SDCP_EXPORT void sdcp_pack(int format, const float *w, int n, int k, void *out);
SDCP_EXPORT void sdcp_pack_bf16(int format, const uint16_t *w, int n, int k, void *out);

/* Row `row` of the packed weight as float32 [k], what the matmul effectively multiplies with: an embedding that is tied
 * to a packed head can be read from it. */
SDCP_EXPORT void sdcp_unpack_row(const sdcp_weight *w, int row, float *out);

/* ---- matmul ------------------------------------------------------------------------------------------------------ */

/* Bytes of scratch for `rows` prepared rows of k activations. Row r lies at r * sdcp_scratch_bytes(format, k, 1).
 * 0 for F32, which reads x itself. */
SDCP_EXPORT size_t sdcp_scratch_bytes(int format, int k, int rows);

/* Convert rows begin..end-1 of x to the format's activations in scratch. Once per input, shared by all weights of that
 * format which multiply it (q, k and v; gate and up). Rows are independent, so a thread may prepare the row it has just
 * normalised. */
SDCP_EXPORT void sdcp_prepare_rows(int format, const float *x, int ldx, int k, int begin, int end, void *scratch);

/* This thread's share of sdcp_prepare_rows(0..rows-1). A barrier must follow before sdcp_matmul_part. */
SDCP_EXPORT void sdcp_prepare_part(int format, const float *x, int ldx, int k, int rows, void *scratch, int thread,
                                   int threads);

/* This thread's share of the output columns of y [rows, n] = x W^T, for all rows. `scratch` is prepared; x is read for
 * F32 only. Writes exactly columns sdcp_columns(w, thread, threads) of y. No barrier inside. */
SDCP_EXPORT void sdcp_matmul_part(const sdcp_weight *w, const float *x, int ldx, float *y, int ldy, int rows,
                                  const void *scratch, int thread, int threads);

/* The same with y += x W^T (a residual). The product is rounded to float32 first, then added. */
SDCP_EXPORT void sdcp_matmul_add_part(const sdcp_weight *w, const float *x, int ldx, float *y, int ldy, int rows,
                                      const void *scratch, int thread, int threads);

/* The columns [begin, end) that this thread computes. */
SDCP_EXPORT void sdcp_columns(const sdcp_weight *w, int thread, int threads, int *begin, int *end);

/* Ask for the first `bytes` of this thread's share of w to be brought into the second-level cache: the memory bus
 * otherwise idles during norms, attention and barriers. Returns at once. */
SDCP_EXPORT void sdcp_prefetch_part(const sdcp_weight *w, size_t bytes, int thread, int threads);

/* A whole call on the pool: y [rows, n] = x [rows, k] W^T, both dense. 0, or -1 when scratch can't be had. */
SDCP_EXPORT int sdcp_matmul(const sdcp_weight *w, const float *x, float *y, int rows);

/* The instruction set chosen for a format: "generic", "avx2", "avx512", "avx512bf16", "avx512vnni" or "amx". The
 * environment variable SDCP_ISA (one of these) lowers the choice, read once. */
SDCP_EXPORT const char *sdcp_isa(int format);

/* ---- measuring (measure.c) --------------------------------------------------------------------------------------- */

/* Seconds to read `bytes` on the pool with nothing else to do: the floor of a pass. */
SDCP_EXPORT double sdcp_measure_read(const void *p, size_t bytes);

/* Seconds for one pass over `count` weights with `rows` rows, one parallel call and a barrier after each, as a decoder
 * does it. x [rows, largest k] and y [rows, largest n] are read and written with each weight's own k and n. */
SDCP_EXPORT double sdcp_measure_pass(const sdcp_weight *weights, int count, const float *x, float *y, int rows);

#endif
