/* What matmul.c and the instruction sets' kernels share. The packed layout is the same for every instruction set.
 *
 * A panel holds SDCP_PANEL outputs; panels follow one another. Within a panel:
 *   F32   [k][32] float
 *   BF16  [k/2][32][2] bfloat16: pairs of k side by side, as vdpbf16ps and AMX take them; k padded to 32 with zeros
 *   INT8, INT4: one block per group of 32 k: 32 scales and 32 minima (float16), then
 *     INT8  [8][32][4] uint8: quads of k side by side, as vpdpbusd takes them
 *     INT4  [4][32][4] bytes: low nibbles are quad 2i, high nibbles quad 2i+1
 */
#ifndef SDCP_MATMUL_H
#define SDCP_MATMUL_H

#include "sdcp_kernels.h"

#include <string.h>

#if defined(__x86_64__) && !defined(SDCP_GENERIC) /* -DSDCP_GENERIC: for compilers that don't know the newer sets */
#define HAVE_X86 1
#endif
#if defined(HAVE_X86) && defined(__linux__)
#define HAVE_AMX 1
#endif

#define AHEAD 4096 /* bytes to prefetch ahead: covers the memory's latency at one core's rate */
#define GROUP_HEADER (2 * SDCP_PANEL * sizeof(uint16_t))
#define INT8_BLOCK (GROUP_HEADER + SDCP_PANEL * SDCP_GROUP)
#define INT4_BLOCK (GROUP_HEADER + SDCP_PANEL * SDCP_GROUP / 2)

/* Consecutive panels against all rows. Row r's activations are at x + r * stride bytes; results go to `columns` floats
 * at y + r * ldy, 32 a panel but for the last; `add` adds instead of storing. */
typedef struct {
    const char *panel;
    size_t panel_bytes;
    const char *x;
    size_t stride;
    float *y;
    int ldy, rows, k, columns, add;
} panel_call;

static inline int panel_columns(int left) { return left < SDCP_PANEL ? left : SDCP_PANEL; }

typedef void (*panel_kernel)(const panel_call *c);

/* Prepared int8 row: int8 [groups * 32], then float scale[groups], then float scale * sum of q [groups]. */
static inline size_t int_sums(int groups) { return (size_t)groups * (SDCP_GROUP + sizeof(float)); }

static inline size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

static inline int groups_of(int k) { return (k + SDCP_GROUP - 1) / SDCP_GROUP; }

/* Row tiles of nearly equal height: the number of rows of the next tile. */
static inline int tile_rows(int left, int highest) {
    int tiles = (left + highest - 1) / highest;
    return (left + tiles - 1) / tiles;
}

static inline uint16_t bf16_of(float f) { /* to nearest even; a NaN stays one */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 64;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static inline float float_of_half(uint16_t h) { /* finite values */
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    return h & 0x8000 ? -f : f;
}

void sdcp_generic_f32(const panel_call *c);
void sdcp_generic_bf16(const panel_call *c);
void sdcp_generic_int8(const panel_call *c);
void sdcp_generic_int4(const panel_call *c);
#ifdef HAVE_X86
void sdcp_avx2_f32(const panel_call *c);
void sdcp_avx2_bf16(const panel_call *c);
void sdcp_avx2_int8(const panel_call *c);
void sdcp_avx2_int4(const panel_call *c);
void sdcp_avx512_f32(const panel_call *c);
void sdcp_avx512_bf16(const panel_call *c);
void sdcp_avx512_int8(const panel_call *c);
void sdcp_avx512_int4(const panel_call *c);
#endif
#ifdef HAVE_AMX
int sdcp_amx_permitted(void);
void sdcp_amx_bf16(const panel_call *c);
#endif

#endif
