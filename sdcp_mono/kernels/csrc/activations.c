/* Conversion of activations to what a format's kernel reads. Element by element, without fused operations: the same on
 * every instruction set, which only sets the width of the vectors that the compiler makes of these loops. */
#include "matmul.h"

size_t sdcp_scratch_bytes(int format, int k, int rows) {
    size_t groups = (size_t)groups_of(k), bytes;
    if (format == SDCP_F32) return 0;
    if (format == SDCP_BF16)
        bytes = groups * SDCP_GROUP * sizeof(uint16_t);
    else
        bytes = groups * (SDCP_GROUP + 2 * sizeof(float));
    /* An odd number of cache lines, so that the rows of a tile don't fall into the same cache set. */
    return (size_t)rows * (round_up(bytes, 64) / 64 | 1) * 64;
}

#define INLINE static inline __attribute__((always_inline))

INLINE void quantise_group(const float *restrict v, int8_t *restrict q, float *scale, float *sum) {
    float largest = 0;
    int32_t bits[SDCP_GROUP], total = 0;
    uint32_t not_finite = 0;
    memcpy(bits, v, sizeof bits);
    for (int i = 0; i < SDCP_GROUP; i++) {
        bits[i] &= 0x7fffffff;
        not_finite |= bits[i] >= 0x7f800000;
    }
    int32_t most = 0; /* floats of one sign are ordered as their bits are */
    for (int i = 0; i < SDCP_GROUP; i++) most = bits[i] > most ? bits[i] : most;
    memcpy(&largest, &most, 4);
    float inverse = largest > 0 ? 127.0f / largest : 0;
    for (int i = 0; i < SDCP_GROUP; i++) {
        float shifted = v[i] * inverse + 0x1.8p23f; /* rounds to nearest even: the integer is in the low bits */
        memcpy(bits + i, &shifted, 4);
        bits[i] -= 0x4b400000;
        q[i] = (int8_t)bits[i];
    }
    for (int i = 0; i < SDCP_GROUP; i++) total += bits[i];
    uint32_t nan = 0x7fc00000;
    float s = largest / 127.0f;
    if (not_finite) memcpy(&s, &nan, 4); /* such a row's results are NaN and no other's */
    *scale = s;
    *sum = s * (float)total;
}

INLINE void prepare(int format, const float *from, int k, char *row) {
    int groups = groups_of(k), full = k / SDCP_GROUP;
    float tail[SDCP_GROUP] = {0};
    memcpy(tail, from + full * SDCP_GROUP, (size_t)(k - full * SDCP_GROUP) * sizeof(float));
    float *scales = (float *)(row + (size_t)groups * SDCP_GROUP), *sums = (float *)(row + int_sums(groups));
    for (int g = 0; g < groups; g++) {
        const float *v = g < full ? from + g * SDCP_GROUP : tail;
        if (format == SDCP_BF16)
            for (int i = 0; i < SDCP_GROUP; i++) ((uint16_t *)row)[g * SDCP_GROUP + i] = bf16_of(v[i]);
        else
            quantise_group(v, (int8_t *)row + g * SDCP_GROUP, scales + g, sums + g);
    }
}

#define VARIANT(name, attributes) \
    attributes static void name(int format, const float *from, int k, char *row) { \
        if (format == SDCP_BF16) prepare(SDCP_BF16, from, k, row); \
        else prepare(SDCP_INT8, from, k, row); \
    }

VARIANT(prepare_generic, )
#ifdef HAVE_X86
VARIANT(prepare_avx2, __attribute__((target("avx2"))))
VARIANT(prepare_avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#endif

typedef void (*prepare_row)(int format, const float *from, int k, char *row);

static prepare_row choose(void) {
#ifdef HAVE_X86
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return prepare_avx512;
    if (__builtin_cpu_supports("avx2")) return prepare_avx2;
#endif
    return prepare_generic;
}

void sdcp_prepare_rows(int format, const float *x, int ldx, int k, int begin, int end, void *scratch) {
    if (format == SDCP_F32) return;
    size_t stride = sdcp_scratch_bytes(format, k, 1);
    prepare_row row = choose();
    for (int r = begin; r < end; r++) row(format, x + (size_t)r * ldx, k, (char *)scratch + (size_t)r * stride);
}

void sdcp_prepare_part(int format, const float *x, int ldx, int k, int rows, void *scratch, int thread, int threads) {
    int begin = (int)((int64_t)rows * thread / threads), end = (int)((int64_t)rows * (thread + 1) / threads);
    sdcp_prepare_rows(format, x, ldx, k, begin, end, scratch);
}
