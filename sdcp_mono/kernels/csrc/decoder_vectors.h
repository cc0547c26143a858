/* The row-wise half of the decoder: norms, rotary embedding, SwiGLU and paged attention in vectors of 16 floats.
 *
 * decoder.c includes this file once per instruction set, with VARIANT(name) naming the copy. GCC's vector
 * extension turns the same text into AVX512, AVX2, SSE or NEON, so that one algorithm is read and tested.
 *
 * Law of this file: every function computes one row (or one row and head) from that row's data alone, in an order
 * that depends on shapes and absolute positions only. That is what makes logits independent of the batch.
 */

typedef float VARIANT(f16) __attribute__((vector_size(64)));
typedef int32_t VARIANT(i16) __attribute__((vector_size(64)));
typedef uint32_t VARIANT(u16) __attribute__((vector_size(64)));
typedef uint16_t VARIANT(h16) __attribute__((vector_size(32)));
#define f16 VARIANT(f16)
#define i16 VARIANT(i16)
#define u16 VARIANT(u16)
#define h16 VARIANT(h16)
#define INLINE static inline __attribute__((always_inline))

INLINE f16 VARIANT(load)(const float *p) { f16 v; memcpy(&v, p, sizeof v); return v; }
INLINE void VARIANT(store)(float *p, f16 v) { memcpy(p, &v, sizeof v); }
INLINE f16 VARIANT(splat)(float s) { return (f16){s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}; }
#define load VARIANT(load)
#define store VARIANT(store)
#define splat VARIANT(splat)

INLINE f16 VARIANT(fma)(f16 a, f16 b, f16 c) {
#if defined(__AVX512F__)
    return (f16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y), memcpy(z, &c, sizeof z);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}
#define fma16 VARIANT(fma)

INLINE f16 VARIANT(select)(i16 mask, f16 yes, f16 no) { return (f16)((mask & (i16)yes) | (~mask & (i16)no)); }
#define select16 VARIANT(select)

/* 16 stored K or V elements, widened. */
INLINE f16 VARIANT(widen)(const void *p, int is_bf16) {
    if (!is_bf16) return load((const float *)p);
#if defined(__AVX512F__)
    return (f16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    h16 h;
    memcpy(&h, p, sizeof h);
    return (f16)(__builtin_convertvector(h, u16) << 16);
#endif
}
#define widen VARIANT(widen)

INLINE float VARIANT(sum)(f16 v) { /* a fixed tree */
    float a[16];
    store(a, v);
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] += a[i + w];
    return a[0];
}

INLINE float VARIANT(max)(f16 v) { /* NaN wins, so that a poisoned row shows */
    float a[16];
    store(a, v);
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] = a[i + w] > a[i] || a[i + w] != a[i + w] ? a[i + w] : a[i];
    return a[0];
}

/* e^x within 2 ulp for -87 <= x <= 88, clamped outside, NaN stays NaN (Cephes expf polynomial). */
INLINE f16 VARIANT(exp)(f16 x) {
    const f16 low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f); /* 1.5 * 2^23: rounds to int */
    x = select16((i16)(x < low), low, x);
    x = select16((i16)(x > high), high, x);
    f16 z = fma16(x, splat(1.44269504088896341f), magic), n = z - magic;
    f16 r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    f16 p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r) + splat(1.0f);
    return (f16)((i16)p + ((i16)z << 23));
}
#define exp16 VARIANT(exp)

/* out = x / rms(x) * weight. out may be x. */
static void VARIANT(rms_norm)(const float *x, const float *weight, float epsilon, int n, float *out) {
    f16 a = splat(0), b = splat(0);
    int i = 0;
    for (; i + 32 <= n; i += 32) {
        f16 u = load(x + i), v = load(x + i + 16);
        a = fma16(u, u, a);
        b = fma16(v, v, b);
    }
    float total = VARIANT(sum)(a + b);
    for (; i < n; i++) total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / (float)n + epsilon);
    for (i = 0; i + 16 <= n; i += 16) store(out + i, load(x + i) * splat(scale) * load(weight + i));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

/* out = silu(gate) * up. */
static void VARIANT(swiglu)(const float *gate, const float *up, int n, float *out) {
    const f16 one = splat(1.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        f16 g = load(gate + i);
        store(out + i, g / (one + exp16(-g)) * load(up + i));
    }
    if (i < n) { /* the tail in a padded vector: the same arithmetic */
        float g[16] = {0}, u[16] = {0}, r[16];
        memcpy(g, gate + i, (size_t)(n - i) * sizeof(float));
        memcpy(u, up + i, (size_t)(n - i) * sizeof(float));
        f16 v = load(g);
        store(r, v / (one + exp16(-v)) * load(u));
        memcpy(out + i, r, (size_t)(n - i) * sizeof(float));
    }
}

/* Scores of `queries` query heads against WIDTH * 16 positions; keys are [dim][16 positions]. */
INLINE void VARIANT(scores)(int queries, int is_bf16, int dim, float scale, const float *const *query,
                            const char *const *keys, float (*out)[SPLIT]) {
    f16 acc[QUERY_TILE][WIDTH];
#pragma GCC unroll 8
    for (int q = 0; q < queries; q++)
#pragma GCC unroll 8
        for (int g = 0; g < WIDTH; g++) acc[q][g] = splat(0);
    for (int d = 0; d < dim; d++) {
        f16 k[WIDTH];
#pragma GCC unroll 8
        for (int g = 0; g < WIDTH; g++) k[g] = widen(keys[g] + (size_t)d * (is_bf16 ? 32 : 64), is_bf16);
#pragma GCC unroll 8
        for (int q = 0; q < queries; q++) {
            f16 s = splat(query[q][d]);
#pragma GCC unroll 8
            for (int g = 0; g < WIDTH; g++) acc[q][g] = fma16(k[g], s, acc[q][g]);
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < queries; q++)
#pragma GCC unroll 8
        for (int g = 0; g < WIDTH; g++) store(out[q] + 16 * g, acc[q][g] * splat(scale));
}

/* acc[q] += sum over positions [from, to) of p[q][position] * V[position], in that order. */
INLINE void VARIANT(values)(int queries, int is_bf16, int vectors, int from, int to, const char *const *blocks,
                            size_t row_bytes, const float (*p)[SPLIT], float *const *acc) {
    f16 sum[QUERY_TILE][WIDTH];
#pragma GCC unroll 8
    for (int q = 0; q < queries; q++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sum[q][v] = load(acc[q] + 16 * v);
    for (int i = from; i < to; i++) {
        const char *row = blocks[i / 16] + (size_t)(i % 16) * row_bytes;
        f16 value[WIDTH];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) value[v] = widen(row + v * (is_bf16 ? 32 : 64), is_bf16);
#pragma GCC unroll 8
        for (int q = 0; q < queries; q++) {
            f16 s = splat(p[q][i]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sum[q][v] = fma16(value[v], s, sum[q][v]);
        }
    }
#pragma GCC unroll 8
    for (int q = 0; q < queries; q++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store(acc[q] + 16 * v, sum[q][v]);
}

/* As VARIANT(values) over a whole padded head, in register-sized pieces of the head. */
INLINE void VARIANT(all_values)(int queries, int is_bf16, int padded, int from, int to, const char *const *blocks,
                                const float (*p)[SPLIT], struct state *const *states) {
    const size_t element = is_bf16 ? 2 : 4, row_bytes = (size_t)padded * element;
    for (int d = 0; d < padded;) {
        float *acc[QUERY_TILE];
        const char *shifted[SPLIT / 16];
        for (int q = 0; q < queries; q++) acc[q] = states[q]->acc + d;
        for (int g = 0; g < (to + 15) / 16; g++) shifted[g] = blocks[g] + (size_t)d * element;
        if (padded - d >= 16 * WIDTH) {
            VARIANT(values)(queries, is_bf16, WIDTH, from, to, shifted, row_bytes, p, acc);
            d += 16 * WIDTH;
        } else {
            VARIANT(values)(queries, is_bf16, 1, from, to, shifted, row_bytes, p, acc);
            d += 16;
        }
    }
}

/* Attention of up to QUERY_TILE query heads over one split of the context.
 *
 * visible[q] >= 1 positions of the split are seen by query q. Lanes past them are computed on whatever the block
 * holds and dropped by selection; values past them are not touched at all, because 0 * NaN would be NaN. */
INLINE void VARIANT(attend_tile)(int queries, int is_bf16, int dim, int padded, float scale,
                                 const float *const *query, const int *visible, const char *const *keys,
                                 const char *const *values, struct state *const *states) {
    float p[QUERY_TILE][SPLIT] __attribute__((aligned(64)));
    int longest = 0, shortest = SPLIT;
    for (int q = 0; q < queries; q++) {
        longest = visible[q] > longest ? visible[q] : longest;
        shortest = visible[q] < shortest ? visible[q] : shortest;
    }
    const int groups = (longest + 15) / 16;
    for (int g = 0; g < groups; g += WIDTH) {
        const char *some[WIDTH];
        for (int i = 0; i < WIDTH; i++) some[i] = keys[g + i < groups ? g + i : g];
        VARIANT(scores)(queries, is_bf16, dim, scale, query, some, (float (*)[SPLIT])(p[0] + 16 * g));
    }
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int q = 0; q < queries; q++) {
        f16 top = splat(-INFINITY), total = splat(0);
        for (int g = 0; g < groups; g++) {
            f16 s = select16((i16)(lane < visible[q] - 16 * g), load(p[q] + 16 * g), splat(-INFINITY));
            store(p[q] + 16 * g, s);
            top = select16((i16)(s > top) | (i16)(s != s), s, top);
        }
        const float m = VARIANT(max)(top);
        for (int g = 0; g < groups; g++) {
            f16 e = exp16(load(p[q] + 16 * g) - splat(m));
            e = select16((i16)(lane < visible[q] - 16 * g), e, splat(0));
            store(p[q] + 16 * g, e);
            total += e;
        }
        states[q]->max = m;
        states[q]->total = VARIANT(sum)(total);
        for (int d = 0; d < padded; d += 16) store(states[q]->acc + d, splat(0));
    }
    VARIANT(all_values)(queries, is_bf16, padded, 0, shortest, values, (const float (*)[SPLIT])p, states);
    for (int q = 0; q < queries; q++)
        if (visible[q] > shortest)
            VARIANT(all_values)(1, is_bf16, padded, shortest, visible[q], values, (const float (*)[SPLIT])p[q],
                                states + q);
}

static void VARIANT(attend)(int queries, int is_bf16, int dim, int padded, float scale, const float *const *query,
                            const int *visible, const char *const *keys, const char *const *values,
                            struct state *const *states) {
#if defined(__FMA__) || defined(__aarch64__) /* the compiler gets tile height and dtype as constants */
#define CASE(n) \
    case 2 * n: VARIANT(attend_tile)(n, 0, dim, padded, scale, query, visible, keys, values, states); break; \
    case 2 * n + 1: VARIANT(attend_tile)(n, 1, dim, padded, scale, query, visible, keys, values, states); break;
    switch (2 * queries + is_bf16) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
#else
    VARIANT(attend_tile)(queries, is_bf16, dim, padded, scale, query, visible, keys, values, states);
#endif
}

/* into = into and next, where next covers the positions after into's: the exact softmax of both. */
static void VARIANT(merge)(struct state *into, const struct state *next, int padded) {
    const float m = next->max > into->max || next->max != next->max ? next->max : into->max;
    float scales[16] = {into->max - m, next->max - m};
    store(scales, exp16(load(scales)));
    into->max = m;
    into->total = into->total * scales[0] + next->total * scales[1];
    for (int d = 0; d < padded; d += 16)
        store(into->acc + d, fma16(load(next->acc + d), splat(scales[1]), load(into->acc + d) * splat(scales[0])));
}

static const struct vector_ops VARIANT(ops) = {
    ISA, VARIANT(rms_norm), VARIANT(swiglu), VARIANT(attend), VARIANT(merge),
};

#undef f16
#undef i16
#undef u16
#undef h16
#undef load
#undef store
#undef splat
#undef fma16
#undef select16
#undef widen
#undef exp16
#undef INLINE
