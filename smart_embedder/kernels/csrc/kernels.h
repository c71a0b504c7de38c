/* The names of the kernels, which end in their instruction set: `gemm_avx2`. */
#ifndef KERNELS_H
#define KERNELS_H

#ifndef INSTRUCTIONS
#error "INSTRUCTIONS must name the instruction set"
#endif

#define JOIN(name, set) name##_##set
#define NAME(name, set) JOIN(name, set)
#define KERNEL(name) NAME(name, INSTRUCTIONS)

#include <stdint.h>

/* Kernels that other kernels call. Their definitions describe the arguments. */
void KERNEL(attention)(
    const void *query, const void *key, const void *value, void *output, int format,
    long query_token, long query_head, long key_token, long key_head, long output_token,
    long output_head, const int64_t *offsets, long sequences, long heads, long group, long width,
    float scale, long before, long after, int threads);
void KERNEL(gemm)(
    const void *left, const void *right, const float *row_scale, const float *row_minimum,
    const float *scale, const float *sums, const float *bias, void *output, int format,
    int output_format, long rows, long depth, long columns, long output_stride, int activation,
    int threads);
void KERNEL(add_norm)(
    void *states, const void *residual, int format, const float *weight, const float *bias,
    float epsilon, long rows, long width, int threads);
void KERNEL(quantize_rows)(
    const void *states, int format, const float *factors, const float *offsets,
    const int32_t *repeated, uint8_t *values, float *scale, float *minimum, long rows, long width,
    long repeats, int threads);

#endif
