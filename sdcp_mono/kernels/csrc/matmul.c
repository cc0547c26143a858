/* Packing, and the split of one matmul among threads. */
#define _DEFAULT_SOURCE /* madvise */
#include "matmul.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

static size_t panel_bytes(int format, int k) {
    size_t groups = (size_t)groups_of(k);
    switch (format) {
    case SDCP_F32: return (size_t)k * SDCP_PANEL * sizeof(float);
    case SDCP_BF16: return groups * SDCP_GROUP * SDCP_PANEL * sizeof(uint16_t);
    case SDCP_INT8: return groups * INT8_BLOCK;
    default: return groups * INT4_BLOCK;
    }
}

static int panels_of(int n) { return (n + SDCP_PANEL - 1) / SDCP_PANEL; }

size_t sdcp_packed_bytes(int format, int n, int k) { return (size_t)panels_of(n) * panel_bytes(format, k); }

/* ---- memory ------------------------------------------------------------------------------------------------------ */

#define HUGE_PAGE ((size_t)2 << 20)

void *sdcp_alloc(size_t bytes) {
    bytes = round_up(bytes, HUGE_PAGE);
    char *p = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    size_t before = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(p, before);
    munmap(p + before + bytes, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(p + before, bytes, MADV_HUGEPAGE);
#endif
    return p + before;
}

void sdcp_free(void *p, size_t bytes) {
    if (p) munmap(p, round_up(bytes, HUGE_PAGE));
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */

static float float_of_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static uint16_t half_of(float f) { /* finite; to nearest even; saturates at the largest half */
    uint16_t sign = signbit(f) ? 0x8000 : 0;
    float a = fabsf(f);
    if (a >= 65504.0f) return sign | 0x7bff;
    if (a < 0x1p-14f) return (uint16_t)(sign | (uint16_t)lrintf(a * 0x1p24f));
    uint32_t bits;
    memcpy(&bits, &a, 4);
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits >> 13) - (112 << 10)));
}

typedef struct {
    const float *f32;
    const uint16_t *bf16; /* one of the two */
    int format, n, k;
    char *out;
} pack_call;

static void load_group(const pack_call *c, int output, int first, int count, float *out) {
    size_t at = (size_t)output * c->k + first;
    for (int i = 0; i < count; i++) out[i] = c->f32 ? c->f32[at + i] : float_of_bf16(c->bf16[at + i]);
}

/* q = round((w - minimum) / scale) with scale and minimum as float16, the layout of GGUF's Q4_1: weights that came from
 * one keep their values. */
static void pack_quantised(int format, const float *w, int count, int lane, char *block) {
    int levels = format == SDCP_INT8 ? 255 : 15;
    float low = w[0], high = w[0];
    for (int i = 1; i < count; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    uint16_t *header = (uint16_t *)block;
    header[lane] = half_of((high - low) / (float)levels);
    header[SDCP_PANEL + lane] = half_of(low);
    float scale = float_of_half(header[lane]), minimum = float_of_half(header[SDCP_PANEL + lane]);
    uint8_t *quads = (uint8_t *)block + GROUP_HEADER;
    for (int i = 0; i < count; i++) {
        float q = scale > 0 ? rintf((w[i] - minimum) / scale) : 0;
        uint8_t v = (uint8_t)(q < 0 ? 0 : q > (float)levels ? (float)levels : q);
        if (format == SDCP_INT8)
            quads[(i / 4 * SDCP_PANEL + lane) * 4 + i % 4] = v;
        else
            quads[(i / 8 * SDCP_PANEL + lane) * 4 + i % 4] |= (uint8_t)(v << i / 4 % 2 * 4);
    }
}

static void pack_panel(const pack_call *c, int panel) {
    size_t bytes = panel_bytes(c->format, c->k);
    char *out = c->out + (size_t)panel * bytes;
    memset(out, 0, bytes);
    int outputs = c->n - panel * SDCP_PANEL < SDCP_PANEL ? c->n - panel * SDCP_PANEL : SDCP_PANEL;
    for (int first = 0; first < c->k; first += SDCP_GROUP) {
        int count = c->k - first < SDCP_GROUP ? c->k - first : SDCP_GROUP;
        char *block = out + (size_t)(first / SDCP_GROUP) * (c->format == SDCP_INT8 ? INT8_BLOCK : INT4_BLOCK);
        for (int lane = 0; lane < outputs; lane++) {
            float w[SDCP_GROUP];
            load_group(c, panel * SDCP_PANEL + lane, first, count, w);
            if (c->format == SDCP_F32)
                for (int i = 0; i < count; i++) ((float *)out)[(size_t)(first + i) * SDCP_PANEL + lane] = w[i];
            else if (c->format == SDCP_BF16)
                for (int i = 0; i < count; i++)
                    ((uint16_t *)out)[((size_t)(first + i) / 2 * SDCP_PANEL + lane) * 2 + i % 2] = bf16_of(w[i]);
            else
                pack_quantised(c->format, w, count, lane, block);
        }
    }
}

static void pack_task(void *arg, int thread, int threads) {
    const pack_call *c = arg;
    for (int panel = thread; panel < panels_of(c->n); panel += threads) pack_panel(c, panel);
}

void sdcp_pack(int format, const float *w, int n, int k, void *out) {
    sdcp_parallel(pack_task, &(pack_call){.f32 = w, .format = format, .n = n, .k = k, .out = out});
}

void sdcp_pack_bf16(int format, const uint16_t *w, int n, int k, void *out) {
    sdcp_parallel(pack_task, &(pack_call){.bf16 = w, .format = format, .n = n, .k = k, .out = out});
}

void sdcp_unpack_row(const sdcp_weight *w, int row, float *out) {
    const char *panel = (const char *)w->data + (size_t)(row / SDCP_PANEL) * panel_bytes(w->format, w->k);
    int lane = row % SDCP_PANEL;
    for (int i = 0; i < w->k; i++) {
        if (w->format == SDCP_F32) {
            out[i] = ((const float *)panel)[(size_t)i * SDCP_PANEL + lane];
        } else if (w->format == SDCP_BF16) {
            out[i] = float_of_bf16(((const uint16_t *)panel)[((size_t)i / 2 * SDCP_PANEL + lane) * 2 + i % 2]);
        } else {
            int int8 = w->format == SDCP_INT8, j = i % SDCP_GROUP;
            const char *block = panel + (size_t)(i / SDCP_GROUP) * (int8 ? INT8_BLOCK : INT4_BLOCK);
            const uint16_t *header = (const uint16_t *)block;
            const uint8_t *quads = (const uint8_t *)block + GROUP_HEADER;
            int q = quads[((int8 ? j / 4 : j / 8) * SDCP_PANEL + lane) * 4 + j % 4];
            if (!int8) q = q >> j / 4 % 2 * 4 & 15;
            out[i] = float_of_half(header[lane]) * (float)q + float_of_half(header[SDCP_PANEL + lane]);
        }
    }
}

/* ---- matmul ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const char *isa;
    int format;
    panel_kernel kernel;
} choice;

static const choice choices[] = {
    /* best first, for each format */
#ifdef HAVE_AMX
    {"amx", SDCP_BF16, sdcp_amx_bf16},
#endif
#ifdef HAVE_X86
    {"avx512bf16", SDCP_BF16, sdcp_avx512_bf16},
    {"avx512vnni", SDCP_INT8, sdcp_avx512_int8},
    {"avx512vnni", SDCP_INT4, sdcp_avx512_int4},
    {"avx512", SDCP_F32, sdcp_avx512_f32},
    {"avx2", SDCP_F32, sdcp_avx2_f32},
    {"avx2", SDCP_BF16, sdcp_avx2_bf16},
    {"avx2", SDCP_INT8, sdcp_avx2_int8},
    {"avx2", SDCP_INT4, sdcp_avx2_int4},
#endif
    {"generic", SDCP_F32, sdcp_generic_f32},
    {"generic", SDCP_BF16, sdcp_generic_bf16},
    {"generic", SDCP_INT8, sdcp_generic_int8},
    {"generic", SDCP_INT4, sdcp_generic_int4},
};

static int supported(const char *isa) {
#ifdef HAVE_X86
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl");
#ifdef HAVE_AMX
    if (!strcmp(isa, "amx"))
        return avx512 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
               sdcp_amx_permitted();
#endif
    if (!strcmp(isa, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!strcmp(isa, "avx512")) return avx512;
    if (!strcmp(isa, "avx512bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(isa, "avx512vnni")) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return !strcmp(isa, "generic");
}

static const choice *chosen[4];

/* Once, when the library is loaded. SDCP_ISA=generic takes the choices from the first of that name on. */
__attribute__((constructor)) static void choose(void) {
    const char *lowered = getenv("SDCP_ISA");
    size_t count = sizeof choices / sizeof *choices, first = 0;
    while (lowered && first < count && strcmp(choices[first].isa, lowered)) first++;
    if (first == count) first = 0; /* not a name: ignored */
    for (size_t i = first; i < count; i++)
        if (!chosen[choices[i].format] && supported(choices[i].isa)) chosen[choices[i].format] = &choices[i];
}

const char *sdcp_isa(int format) { return chosen[format]->isa; }

static int first_panel(int n, int thread, int threads) { return (int)((int64_t)panels_of(n) * thread / threads); }

void sdcp_columns(const sdcp_weight *w, int thread, int threads, int *begin, int *end) {
    int first = first_panel(w->n, thread, threads) * SDCP_PANEL;
    int last = first_panel(w->n, thread + 1, threads) * SDCP_PANEL;
    *begin = first < w->n ? first : w->n;
    *end = last < w->n ? last : w->n;
}

static void matmul_part(const sdcp_weight *w, const float *x, int ldx, float *y, int ldy, int rows,
                        const void *scratch, int thread, int threads, int add) {
    int begin, end, first = first_panel(w->n, thread, threads);
    sdcp_columns(w, thread, threads, &begin, &end);
    if (begin == end) return;
    panel_call c = {.panel_bytes = panel_bytes(w->format, w->k), .x = scratch, .y = y + begin, .ldy = ldy, .rows = rows,
                    .k = w->k, .columns = end - begin, .add = add};
    c.panel = (const char *)w->data + (size_t)first * c.panel_bytes;
    c.stride = sdcp_scratch_bytes(w->format, w->k, 1);
    if (w->format == SDCP_F32) {
        c.x = (const char *)x;
        c.stride = (size_t)ldx * sizeof(float);
    }
    chosen[w->format]->kernel(&c);
}

void sdcp_matmul_part(const sdcp_weight *w, const float *x, int ldx, float *y, int ldy, int rows, const void *scratch,
                      int thread, int threads) {
    matmul_part(w, x, ldx, y, ldy, rows, scratch, thread, threads, 0);
}

void sdcp_matmul_add_part(const sdcp_weight *w, const float *x, int ldx, float *y, int ldy, int rows,
                          const void *scratch, int thread, int threads) {
    matmul_part(w, x, ldx, y, ldy, rows, scratch, thread, threads, 1);
}

void sdcp_prefetch_part(const sdcp_weight *w, size_t bytes, int thread, int threads) {
    size_t panel = panel_bytes(w->format, w->k);
    const char *p = (const char *)w->data + (size_t)first_panel(w->n, thread, threads) * panel;
    size_t share = (size_t)(first_panel(w->n, thread + 1, threads) - first_panel(w->n, thread, threads)) * panel;
    for (size_t i = 0; i < bytes && i < share; i += 64) __builtin_prefetch(p + i, 0, 2);
}

typedef struct {
    const sdcp_weight *w;
    const float *x;
    float *y;
    int rows;
    void *scratch;
} matmul_call;

static void matmul_task(void *arg, int thread, int threads) {
    const matmul_call *c = arg;
    if (c->scratch) {
        sdcp_prepare_part(c->w->format, c->x, c->w->k, c->w->k, c->rows, c->scratch, thread, threads);
        sdcp_barrier(threads);
    }
    sdcp_matmul_part(c->w, c->x, c->w->k, c->y, c->w->n, c->rows, c->scratch, thread, threads);
}

int sdcp_matmul(const sdcp_weight *w, const float *x, float *y, int rows) {
    matmul_call c = {.w = w, .x = x, .y = y, .rows = rows};
    size_t bytes = sdcp_scratch_bytes(w->format, w->k, rows);
    if (bytes && !(c.scratch = aligned_alloc(64, bytes))) return -1;
    sdcp_parallel(matmul_task, &c);
    free(c.scratch);
    return 0;
}
