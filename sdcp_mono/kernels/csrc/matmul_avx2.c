/* AVX2 and FMA kernels: four vectors of eight outputs to a panel, in the order of sums of matmul_avx512.c. */
#include "matmul.h"

#ifdef HAVE_X86
#include <immintrin.h>

#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TILE static inline __attribute__((always_inline)) FOR_AVX2
#define F32_ROWS 3 /* 12 accumulators of the 16 registers */
#define BF16_ROWS 2
#define INT_ROWS 2

TILE void store(const panel_call *c, float *y, int columns, int row, const __m256 acc[4]) {
    y += (size_t)row * c->ldy;
    float t[SDCP_PANEL];
    for (int h = 0; h < 4; h++) _mm256_storeu_ps(t + h * 8, acc[h]);
    for (int i = 0; i < columns; i++) y[i] = c->add ? y[i] + t[i] : t[i];
}

TILE void f32_tile(const panel_call *c, const char *panel, float *y, int columns, int row, int rows) {
    const float *w = (const float *)panel;
    const char *x = c->x + row * c->stride;
    __m256 acc[F32_ROWS][4];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = _mm256_setzero_ps();
    for (int k = 0; k < c->k; k++, w += 32, x += 4) {
        __builtin_prefetch(w + AHEAD / 4);
        __builtin_prefetch(w + AHEAD / 4 + 16);
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++)
#pragma GCC unroll 3
            for (int r = 0; r < rows; r++)
                acc[r][h] = _mm256_fmadd_ps(_mm256_loadu_ps(w + h * 8),
                                            _mm256_broadcast_ss((const float *)(x + r * c->stride)), acc[r][h]);
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++) store(c, y, columns, row + r, acc[r]);
}

TILE void bf16_tile(const panel_call *c, const char *panel, float *y, int columns, int row, int rows) {
    const char *w = panel, *x = c->x + row * c->stride;
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    __m256 acc[BF16_ROWS][4], even[BF16_ROWS], odd[BF16_ROWS];
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = _mm256_setzero_ps();
    for (int left = groups_of(c->k) * SDCP_GROUP / 2; left; left--, w += 128, x += 4) {
        __builtin_prefetch(w + AHEAD);
        __builtin_prefetch(w + AHEAD + 64);
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            __m256i v = _mm256_set1_epi32(*(const int *)(x + r * c->stride));
            even[r] = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
            odd[r] = _mm256_castsi256_ps(_mm256_and_si256(v, high));
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(w + h * 32));
            __m256 we = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
            __m256 wo = _mm256_castsi256_ps(_mm256_and_si256(v, high));
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++)
                acc[r][h] = _mm256_fmadd_ps(we, even[r], _mm256_fmadd_ps(wo, odd[r], acc[r][h]));
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) store(c, y, columns, row + r, acc[r]);
}

TILE void int_tile(const panel_call *c, const char *panel, float *y, int columns, int row, int rows, int bits) {
    int groups = groups_of(c->k);
    const char *x = c->x + row * c->stride, *block = panel;
    const char *scales = x + (size_t)groups * SDCP_GROUP, *sums = x + int_sums(groups);
    const __m256i nibble = _mm256_set1_epi8(15), low = _mm256_set1_epi16(255);
    __m256 acc[INT_ROWS][4];
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = _mm256_setzero_ps();
    for (int g = 0; g < groups; g++, x += SDCP_GROUP, scales += 4, sums += 4) {
        __m256i dot[INT_ROWS][4], even[INT_ROWS], odd[INT_ROWS];
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) dot[r][0] = dot[r][1] = dot[r][2] = dot[r][3] = _mm256_setzero_si256();
        for (int i = 0; i < 8; i++) {
            const char *w = block + GROUP_HEADER + (bits == 8 ? i : i / 2) * 128;
            __builtin_prefetch(w + AHEAD);
            __builtin_prefetch(w + AHEAD + 64);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) { /* int16 products can't saturate as vpmaddubsw's would */
                __m256i v = _mm256_set1_epi32(*(const int *)(x + r * c->stride + i * 4));
                even[r] = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
                odd[r] = _mm256_srai_epi16(v, 8);
            }
#pragma GCC unroll 4
            for (int h = 0; h < 4; h++) {
                __m256i v = _mm256_loadu_si256((const __m256i *)(w + h * 32));
                if (bits == 4) v = _mm256_and_si256(i % 2 ? _mm256_srli_epi16(v, 4) : v, nibble);
                __m256i we = _mm256_and_si256(v, low), wo = _mm256_srli_epi16(v, 8);
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++)
                    dot[r][h] = _mm256_add_epi32(dot[r][h], _mm256_add_epi32(_mm256_madd_epi16(we, even[r]),
                                                                             _mm256_madd_epi16(wo, odd[r])));
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(block + h * 16)));
            __m256 minimum = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(block + 64 + h * 16)));
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) {
                __m256 xs = _mm256_broadcast_ss((const float *)(scales + r * c->stride));
                __m256 sum = _mm256_broadcast_ss((const float *)(sums + r * c->stride));
                acc[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][h]), _mm256_mul_ps(scale, xs), acc[r][h]);
                acc[r][h] = _mm256_fmadd_ps(minimum, sum, acc[r][h]);
            }
        }
        block += bits == 8 ? INT8_BLOCK : INT4_BLOCK;
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) store(c, y, columns, row + r, acc[r]);
}

#define KERNEL(name, highest, tile, ...) \
    FOR_AVX2 void name(const panel_call *c) { \
        const char *panel = c->panel; \
        float *y = c->y; \
        for (int left = c->columns; left > 0; left -= SDCP_PANEL, panel += c->panel_bytes, y += SDCP_PANEL) \
            for (int row = 0, n; row < c->rows; row += n) switch (n = tile_rows(c->rows - row, highest)) { \
                case 1: tile(c, panel, y, panel_columns(left), row, 1 __VA_ARGS__); break; \
                case 2: tile(c, panel, y, panel_columns(left), row, 2 __VA_ARGS__); break; \
                default: tile(c, panel, y, panel_columns(left), row, highest __VA_ARGS__); \
                } \
    }

KERNEL(sdcp_avx2_f32, F32_ROWS, f32_tile)
KERNEL(sdcp_avx2_bf16, BF16_ROWS, bf16_tile)
KERNEL(sdcp_avx2_int8, INT_ROWS, int_tile, , 8)
KERNEL(sdcp_avx2_int4, INT_ROWS, int_tile, , 4)
#endif
