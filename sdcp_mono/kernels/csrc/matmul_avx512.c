/* AVX-512 kernels. Lanes are outputs, so an output's sum runs over k in order in one lane, whatever the tile's height:
 * a tile of `rows` rows holds 2 * rows accumulators and multiplies each weight vector with every row's broadcast x. */
#include "matmul.h"

#ifdef HAVE_X86
#include <immintrin.h>

#define F32_ROWS 12 /* 24 accumulators and 2 weight vectors of the 32 registers */
#define INT_ROWS 6  /* as many again for the group's integer sums */
#define FOR_F32 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define FOR_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define FOR_INT __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define TILE static inline __attribute__((always_inline))

/* Address of row r of a tile from few registers: r * stride as a sum that x86 addressing can form. */
TILE const char *row_of(const char *x, const char *x6, size_t s, size_t s3, size_t s5, int r) {
    const char *base = r < 6 ? x : x6;
    switch (r % 6) {
    case 0: return base;
    case 1: return base + s;
    case 2: return base + 2 * s;
    case 3: return base + s3;
    case 4: return base + 4 * s;
    default: return base + s5;
    }
}

TILE FOR_F32 void store(const panel_call *c, float *y, int columns, int row, __m512 low, __m512 high) {
    y += (size_t)row * c->ldy;
    uint32_t mask = columns < 32 ? (1u << columns) - 1 : 0xffffffffu;
    __mmask16 m0 = (__mmask16)mask, m1 = (__mmask16)(mask >> 16);
    if (c->add) {
        low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(m0, y));
        high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(m1, y + 16));
    }
    _mm512_mask_storeu_ps(y, m0, low);
    _mm512_mask_storeu_ps(y + 16, m1, high);
}

/* Weights to ask for while the tile reads 128 bytes of its panel. Evenly, because a core has only some 16 outstanding
 * misses: a burst of prefetches would hold up the loads behind it. */
typedef struct {
    const char *at;
    size_t step;
} ahead;

TILE void fetch(ahead *a) {
    __builtin_prefetch(a->at, 0, 2); /* into the second-level cache */
    __builtin_prefetch(a->at + 64, 0, 2);
    a->at += a->step;
}

TILE FOR_F32 void f32_tile(const panel_call *c, const char *panel, float *y, int columns, int row, int rows, ahead a) {
    size_t s = c->stride, s3 = 3 * s, s5 = 5 * s;
    const char *x = c->x + row * s, *x6 = x + 6 * s;
    const float *w = (const float *)panel;
    __m512 acc[F32_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int k = 0; k < c->k; k++, w += 32, x += 4, x6 += 4) {
        fetch(&a);
        __m512 w0 = _mm512_load_ps(w), w1 = _mm512_load_ps(w + 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512 v = _mm512_set1_ps(*(const float *)row_of(x, x6, s, s3, s5, r));
            acc[r][0] = _mm512_fmadd_ps(w0, v, acc[r][0]);
            acc[r][1] = _mm512_fmadd_ps(w1, v, acc[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) store(c, y, columns, row + r, acc[r][0], acc[r][1]);
}

TILE FOR_BF16 void bf16_tile(const panel_call *c, const char *panel, float *y, int columns, int row, int rows,
                             ahead a) {
    size_t s = c->stride, s3 = 3 * s, s5 = 5 * s;
    const char *x = c->x + row * s, *x6 = x + 6 * s, *w = panel;
    __m512 acc[F32_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int left = groups_of(c->k) * 2; left; left--) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            fetch(&a);
            __m512bh w0 = (__m512bh)_mm512_load_si512(w + i * 128), w1 = (__m512bh)_mm512_load_si512(w + i * 128 + 64);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                __m512bh v = (__m512bh)_mm512_set1_epi32(*(const int *)(row_of(x, x6, s, s3, s5, r) + i * 4));
                acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, v);
                acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, v);
            }
        }
        w += 1024, x += 32, x6 += 32;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) store(c, y, columns, row + r, acc[r][0], acc[r][1]);
}

TILE FOR_INT void int_tile(const panel_call *c, const char *panel, float *y, int columns, int row, int rows,
                           ahead a, int bits) {
    size_t s = c->stride, s3 = 3 * s, s5 = 5 * s;
    int groups = groups_of(c->k);
    const char *x = c->x + row * s, *block = panel;
    const char *scales = x + (size_t)groups * SDCP_GROUP, *sums = x + int_sums(groups);
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 acc[INT_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, x += SDCP_GROUP, scales += 4, sums += 4) {
        const char *w = block + GROUP_HEADER;
        __m512i dot[INT_ROWS][2];
        fetch(&a);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) dot[r][0] = dot[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512i w0, w1;
            if (bits == 8 || i % 2) fetch(&a);
            if (bits == 8) {
                w0 = _mm512_load_si512(w + i * 128);
                w1 = _mm512_load_si512(w + i * 128 + 64);
            } else {
                w0 = _mm512_load_si512(w + i / 2 * 128);
                w1 = _mm512_load_si512(w + i / 2 * 128 + 64);
                if (i % 2) w0 = _mm512_srli_epi16(w0, 4), w1 = _mm512_srli_epi16(w1, 4);
                w0 = _mm512_and_si512(w0, nibble), w1 = _mm512_and_si512(w1, nibble);
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                __m512i v = _mm512_set1_epi32(*(const int *)(row_of(x, x, s, s3, s5, r) + i * 4));
                dot[r][0] = _mm512_dpbusd_epi32(dot[r][0], w0, v);
                dot[r][1] = _mm512_dpbusd_epi32(dot[r][1], w1, v);
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m512 scale = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(block + h * 32)));
            __m512 minimum = _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)(block + 64 + h * 32)));
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                __m512 xs = _mm512_set1_ps(*(const float *)row_of(scales, scales, s, s3, s5, r));
                __m512 sum = _mm512_set1_ps(*(const float *)row_of(sums, sums, s, s3, s5, r));
                acc[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][h]), _mm512_mul_ps(scale, xs), acc[r][h]);
                acc[r][h] = _mm512_fmadd_ps(minimum, sum, acc[r][h]);
            }
        }
        block += bits == 8 ? INT8_BLOCK : INT4_BLOCK;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) store(c, y, columns, row + r, acc[r][0], acc[r][1]);
}


/* One tile streams AHEAD of what it reads. Of several, each fetches its share of the next panel, so that all take as
 * long and the first finds the panel in cache. */
TILE ahead plan(const char *panel, size_t bytes, int tile, int tiles) {
    if (tiles == 1) return (ahead){panel + AHEAD, 128};
    return (ahead){panel + bytes + bytes / (size_t)tiles * (size_t)tile, 128 / (size_t)tiles};
}

#define CASE(n, call) \
    case n: call; break;
#define CASES6(row, call) \
    CASE(1, call(row, 1)) CASE(2, call(row, 2)) CASE(3, call(row, 3)) \
    CASE(4, call(row, 4)) CASE(5, call(row, 5)) CASE(6, call(row, 6))
#define CASES12(row, call) \
    CASES6(row, call) CASE(7, call(row, 7)) CASE(8, call(row, 8)) CASE(9, call(row, 9)) CASE(10, call(row, 10)) \
    CASE(11, call(row, 11)) CASE(12, call(row, 12))

#define KERNEL(name, attributes, highest, cases, call) \
    attributes void name(const panel_call *c) { \
        const char *panel = c->panel; \
        float *y = c->y; \
        int tiles = (c->rows + highest - 1) / highest; \
        for (int left = c->columns; left > 0; left -= SDCP_PANEL, panel += c->panel_bytes, y += SDCP_PANEL) \
            for (int tile = 0, row = 0, n; row < c->rows; row += n, tile++) { \
                ahead a = plan(panel, c->panel_bytes, tile, tiles); \
                switch (n = tile_rows(c->rows - row, highest)) { cases(row, call) } \
            } \
    }

#define F32_CALL(row, n) f32_tile(c, panel, y, panel_columns(left), row, n, a)
#define BF16_CALL(row, n) bf16_tile(c, panel, y, panel_columns(left), row, n, a)
#define INT8_CALL(row, n) int_tile(c, panel, y, panel_columns(left), row, n, a, 8)
#define INT4_CALL(row, n) int_tile(c, panel, y, panel_columns(left), row, n, a, 4)

KERNEL(sdcp_avx512_f32, FOR_F32, F32_ROWS, CASES12, F32_CALL)
KERNEL(sdcp_avx512_bf16, FOR_BF16, F32_ROWS, CASES12, BF16_CALL)
KERNEL(sdcp_avx512_int8, FOR_INT, INT_ROWS, CASES6, INT8_CALL)
KERNEL(sdcp_avx512_int4, FOR_INT, INT_ROWS, CASES6, INT4_CALL)
#endif
