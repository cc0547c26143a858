/* Timed runs for the benchmarks: from Python the calls themselves would cost as much as the small matmuls. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "sdcp_kernels.h"

#include <stdlib.h>
#include <time.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef uint64_t line __attribute__((vector_size(64)));

typedef struct {
    const line *p;
    size_t lines;
} read_call;

static volatile uint64_t sink; /* keeps the reads */

static void read_task(void *arg, int thread, int threads) {
    const read_call *c = arg;
    const line *p = c->p + c->lines / (size_t)threads * (size_t)thread;
    line sum[4] = {{0}};
    for (size_t left = c->lines / (size_t)threads / 4; left; left--, p += 4)
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(p + 64 + i);
            sum[i] += p[i];
        }
    sink = (sum[0] + sum[1] + sum[2] + sum[3])[0];
}

double sdcp_measure_read(const void *p, size_t bytes) {
    double start = seconds();
    sdcp_parallel(read_task, &(read_call){p, bytes / sizeof(line)});
    return seconds() - start;
}

typedef struct {
    const sdcp_weight *weights;
    const float *x;
    float *y;
    int count, rows;
    void *scratch;
} pass_call;

static void pass_task(void *arg, int thread, int threads) {
    const pass_call *c = arg;
    for (const sdcp_weight *w = c->weights; w < c->weights + c->count; w++) {
        if (w->format != SDCP_F32) {
            sdcp_prepare_part(w->format, c->x, w->k, w->k, c->rows, c->scratch, thread, threads);
            sdcp_barrier(threads);
        }
        sdcp_matmul_part(w, c->x, w->k, c->y, w->n, c->rows, c->scratch, thread, threads);
        sdcp_barrier(threads);
    }
}

double sdcp_measure_pass(const sdcp_weight *weights, int count, const float *x, float *y, int rows) {
    size_t most = 64;
    for (int i = 0; i < count; i++) {
        size_t bytes = sdcp_scratch_bytes(weights[i].format, weights[i].k, rows);
        most = bytes > most ? bytes : most;
    }
    pass_call c = {weights, x, y, count, rows, aligned_alloc(64, most)};
    if (!c.scratch) return -1;
    double start = seconds();
    sdcp_parallel(pass_task, &c);
    double took = seconds() - start;
    free(c.scratch);
    return took;
}
