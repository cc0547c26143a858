/* Kernels in plain C with vector extensions: any machine, and what every other instruction set is checked against. */
#include "matmul.h"

typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

static inline void store(const panel_call *c, float *y, int columns, int row, const vf acc[2]) {
    float t[SDCP_PANEL];
    y += (size_t)row * c->ldy;
    memcpy(t, acc, sizeof t);
    for (int i = 0; i < columns; i++) y[i] = c->add ? y[i] + t[i] : t[i];
}

static void f32_panel(const panel_call *c, const char *panel, float *y, int columns) {
    for (int r = 0; r < c->rows; r++) {
        const float *x = (const float *)(c->x + r * c->stride);
        const vf *w = (const vf *)panel;
        vf acc[2] = {0};
        for (int i = 0; i < c->k; i++, w += 2) {
            acc[0] += w[0] * x[i];
            acc[1] += w[1] * x[i];
        }
        store(c, y, columns, r, acc);
    }
}

static void bf16_panel(const panel_call *c, const char *panel, float *y, int columns) {
    int pairs = groups_of(c->k) * SDCP_GROUP / 2;
    for (int r = 0; r < c->rows; r++) {
        const uint32_t *x = (const uint32_t *)(c->x + r * c->stride);
        const vu *w = (const vu *)panel;
        vf acc[2] = {0};
        for (int i = 0; i < pairs; i++, w += 2) {
            uint32_t even = x[i] << 16, odd = x[i] & 0xffff0000u;
            float xe, xo;
            memcpy(&xe, &even, 4);
            memcpy(&xo, &odd, 4);
            for (int h = 0; h < 2; h++) {
                acc[h] += (vf)(w[h] & 0xffff0000u) * xo;
                acc[h] += (vf)(w[h] << 16) * xe;
            }
        }
        store(c, y, columns, r, acc);
    }
}

static inline __attribute__((always_inline)) void int_panel(const panel_call *c, const char *panel, float *y,
                                                            int columns, int bits) {
    int groups = groups_of(c->k);
    for (int r = 0; r < c->rows; r++) {
        const char *row = c->x + r * c->stride, *block = panel;
        const int8_t *q = (const int8_t *)row;
        const float *scales = (const float *)(row + (size_t)groups * SDCP_GROUP);
        const float *sums = (const float *)(row + int_sums(groups));
        float acc[SDCP_PANEL] = {0};
        for (int g = 0; g < groups; g++, q += SDCP_GROUP, block += bits == 8 ? INT8_BLOCK : INT4_BLOCK) {
            const uint16_t *header = (const uint16_t *)block;
            const uint8_t *w = (const uint8_t *)block + GROUP_HEADER;
            int32_t dot[SDCP_PANEL] = {0};
            for (int i = 0; i < SDCP_GROUP / 4; i++) {
                const uint8_t *quad = w + (bits == 8 ? i : i / 2) * SDCP_PANEL * 4;
                int shift = bits == 8 ? 0 : i % 2 * 4;
                for (int o = 0; o < SDCP_PANEL; o++)
                    for (int j = 0; j < 4; j++)
                        dot[o] += (quad[o * 4 + j] >> shift & (bits == 8 ? 255 : 15)) * q[i * 4 + j];
            }
            for (int o = 0; o < SDCP_PANEL; o++) {
                acc[o] += (float)dot[o] * (float_of_half(header[o]) * scales[g]);
                acc[o] += float_of_half(header[SDCP_PANEL + o]) * sums[g];
            }
        }
        float *to = y + (size_t)r * c->ldy;
        for (int i = 0; i < columns; i++) to[i] = c->add ? to[i] + acc[i] : acc[i];
    }
}

#define KERNEL(name, function, ...) \
    void name(const panel_call *c) { \
        const char *panel = c->panel; \
        float *y = c->y; \
        for (int left = c->columns; left > 0; left -= SDCP_PANEL, panel += c->panel_bytes, y += SDCP_PANEL) \
            function(c, panel, y, panel_columns(left) __VA_ARGS__); \
    }

KERNEL(sdcp_generic_f32, f32_panel)
KERNEL(sdcp_generic_bf16, bf16_panel)
KERNEL(sdcp_generic_int8, int_panel, , 8)
KERNEL(sdcp_generic_int4, int_panel, , 4)
