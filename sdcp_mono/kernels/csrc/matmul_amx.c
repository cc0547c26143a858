/* AMX kernel for bfloat16: a tile instruction multiplies up to 16 rows by 32 k by 16 outputs. The architecture fixes
 * the order in which it sums one row and output (even and odd k apart, then together), so the number of rows it is
 * configured for doesn't change any result. It is used for every number of rows where the machine has it, because
 * AVX512-BF16 rounds differently. */
#define _GNU_SOURCE /* syscall */
#include "matmul.h"

#ifdef HAVE_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOR_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl")))

/* The kernel grants a process the tile registers on request (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
int sdcp_amx_permitted(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Tiles 0..1: results of the first `rows` rows by 2 x 16 outputs; 2..3: of the next `more`; 4, 5: their activations;
 * 6, 7: weights. */
static inline FOR_AMX void configure(int rows, int more) {
    _Alignas(64) tile_config t = {.palette = 1};
    int heights[8] = {rows, rows, more, more, rows, more, 16, 16};
    for (int i = 0; i < 8; i++) {
        if (!heights[i]) continue;
        t.rows[i] = (uint8_t)heights[i];
        t.row_bytes[i] = 64;
    }
    _tile_loadconfig(&t);
}

static inline FOR_AMX void store(const panel_call *c, float *y, int columns, int rows, const float *low,
                                 const float *high) {
    uint32_t mask = columns < 32 ? (1u << columns) - 1 : 0xffffffffu;
    __mmask16 m0 = (__mmask16)mask, m1 = (__mmask16)(mask >> 16);
    for (int r = 0; r < rows; r++, y += c->ldy, low += 16, high += 16) {
        __m512 a = _mm512_load_ps(low), b = _mm512_load_ps(high);
        if (c->add) {
            a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(m0, y));
            b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(m1, y + 16));
        }
        _mm512_mask_storeu_ps(y, m0, a);
        _mm512_mask_storeu_ps(y + 16, m1, b);
    }
}

/* A quarter of a group's weights into the second-level cache, and of what comes sooner into the first. */
static inline __attribute__((always_inline)) void fetch(const char *w) {
#pragma GCC unroll 8
    for (int i = 0; i < 512; i += 64) {
        __builtin_prefetch(w + AHEAD + i, 0, 2);
        __builtin_prefetch(w + AHEAD / 2 + i, 0, 3);
    }
}

FOR_AMX static void amx_panel(const panel_call *c, const char *w, float *y, int columns, int row, int rows, int more) {
    _Alignas(64) float low[256], high[256];
    const char *x = c->x + row * c->stride, *next = x + rows * c->stride;
    _tile_zero(0);
    _tile_zero(1);
    if (more) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int left = groups_of(c->k); left; left--, w += 2048, x += 64, next += 64) {
        fetch(w);
        _tile_loadd(6, w, 128);
        fetch(w + 512);
        _tile_loadd(4, x, c->stride);
        _tile_dpbf16ps(0, 4, 6);
        fetch(w + 1024);
        _tile_loadd(7, w + 64, 128);
        fetch(w + 1536);
        _tile_dpbf16ps(1, 4, 7);
        if (!more) continue;
        _tile_loadd(5, next, c->stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    y += (size_t)row * c->ldy;
    _tile_stored(0, low, 64);
    _tile_stored(1, high, 64);
    store(c, y, columns, rows, low, high);
    if (!more) return;
    _tile_stored(2, low, 64);
    _tile_stored(3, high, 64);
    store(c, y + (size_t)rows * c->ldy, columns, more, low, high);
}

FOR_AMX void sdcp_amx_bf16(const panel_call *c) {
    const char *panel = c->panel;
    float *y = c->y;
    int configured = 0;
    for (int left = c->columns; left > 0; left -= SDCP_PANEL, panel += c->panel_bytes, y += SDCP_PANEL)
        for (int row = 0, n; row < c->rows; row += n) {
            n = tile_rows(c->rows - row, 32);
            int rows = n > 16 ? (n + 1) / 2 : n;
            if (n != configured) configure(rows, n - rows);
            configured = n;
            amx_panel(c, panel, y, panel_columns(left), row, rows, n - rows);
        }
    _tile_release(); /* tiles in use make context switches dearer */
}
#endif
