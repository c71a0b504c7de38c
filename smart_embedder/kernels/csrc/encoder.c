/* A layer of an encoder in one call for a small batch, or in two calls for a larger one, between which
 * another forward may run. families/bert.py has the same layer as single operations. Between two
 * operations Python takes as long as some of them do, while all threads but one wait.
 *
 * The layer calls the operations of the other files in order, so that the result has the same
 * bits. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "vector.h"

/* The activation of a product of states with weights plus the bias, as in gemm.c. */
typedef struct {
  const void *weights;
  const float *bias;
  const float *scale, *sums;       /* of weights in 8 bits; otherwise NULL */
  const float *factors, *offsets;  /* to quantize states, as in row_ops.c */
  const int32_t *repeated;
  long repeats, depth, columns;
  int activation;
} Linear;

typedef struct {
  const float *weight, *bias;
  float epsilon;
} LayerNorm;

typedef struct {
  Linear to_query_key_value, from_attended, to_inner, from_inner;
  LayerNorm attention_norm, output_norm;
  long heads;
  float scale; /* of the attention's scores */
  int format;  /* of the states */
} EncoderLayer;

/* The rows of a batch, and the rest of the memory, from which `take` allocates. */
typedef struct {
  long rows;
  Format format;
  int threads;
  char *memory;
} Call;

enum { ALIGNMENT = 64 };

/* Allocate memory for each row, rounded up; native.py has computed the same sizes. */
static void *take(Call *call, long bytes_of_row) {
  void *taken = call->memory;
  call->memory += ceil_div(bytes_of_row, ALIGNMENT) * ALIGNMENT * call->rows;
  return taken;
}

static long bytes_of(const Call *call, long numbers) {
  return numbers * (long)sizeof(Word) / numbers_of_word(call->format);
}

static void multiply(Call *call, const Linear *linear, const void *states, void *output) {
  if (linear->scale == NULL) {
    KERNEL(gemm)(
        states, linear->weights, NULL, NULL, NULL, NULL, linear->bias, output, call->format,
        call->format, call->rows, linear->depth, linear->columns, linear->columns,
        linear->activation, call->threads);
    return;
  }
  const long width = linear->depth + linear->repeats;
  char *const rest = call->memory;
  uint8_t *bytes = take(call, width);
  float *scale = take(call, sizeof(float)), *minimum = take(call, sizeof(float));
  KERNEL(quantize_rows)(
      states, call->format, linear->factors, linear->offsets, linear->repeated, bytes, scale,
      minimum, call->rows, linear->depth, linear->repeats, call->threads);
  KERNEL(gemm)(
      bytes, linear->weights, scale, minimum, linear->scale, linear->sums, linear->bias, output,
      INT8, call->format, call->rows, width, linear->columns, linear->columns, linear->activation,
      call->threads);
  call->memory = rest;
}

static void add_norm(Call *call, const LayerNorm *norm, void *states, const void *residual, long width) {
  KERNEL(add_norm)(
      states, residual, call->format, norm->weight, norm->bias, norm->epsilon, call->rows, width,
      call->threads);
}

/* Compute self-attention over query, key and value side by side; rows behind all sequences are 0. */
static void attend(
    Call *call, const EncoderLayer *layer, const char *projected, char *attended,
    const int64_t *offsets, long sequences) {
  const long width = layer->from_attended.columns, head = width / layer->heads;
  const long real = offsets[sequences];
  memset(
      attended + bytes_of(call, real * width), 0, (size_t)bytes_of(call, (call->rows - real) * width));
  KERNEL(attention)(
      projected, projected + bytes_of(call, width), projected + bytes_of(call, 2 * width), attended,
      call->format, 3 * width, head, 3 * width, head, width, head, offsets, sequences,
      layer->heads, 1, head, layer->scale, -1, -1, call->threads);
}

static void compute_attention(
    Call *call, const EncoderLayer *layer, const void *states, char *attended,
    const int64_t *offsets, long sequences) {
  char *const rest = call->memory;
  char *projected = take(call, bytes_of(call, 3 * layer->from_attended.columns));
  multiply(call, &layer->to_query_key_value, states, projected);
  attend(call, layer, projected, attended, offsets, sequences);
  call->memory = rest;
}

static void compute_feed_forward(
    Call *call, const EncoderLayer *layer, const void *attended, const void *states, void *output) {
  const long width = layer->from_attended.columns;
  char *normed = take(call, bytes_of(call, width));
  char *inner = take(call, bytes_of(call, layer->to_inner.columns));
  multiply(call, &layer->from_attended, attended, normed);
  add_norm(call, &layer->attention_norm, normed, states, width);
  multiply(call, &layer->to_inner, normed, inner);
  multiply(call, &layer->from_inner, inner, output);
  add_norm(call, &layer->output_norm, output, normed, width);
}

static Call call_of(const EncoderLayer *layer, void *memory, long rows, int threads) {
  return (Call){rows, (Format)layer->format, threads, memory};
}

/* `states`, `attended` and `output` are `[rows, width]` in the layer's format. `offsets` are those of
 * `attention`. `memory` is aligned to 64 bytes. */

void KERNEL(encoder_attention)(
    const void *layer, const void *states, void *attended, void *memory, const int64_t *offsets,
    long sequences, long rows, int threads) {
  Call call = call_of(layer, memory, rows, threads);
  compute_attention(&call, layer, states, attended, offsets, sequences);
}

void KERNEL(encoder_feed_forward)(
    const void *layer, const void *attended, const void *states, void *output, void *memory,
    long rows, int threads) {
  Call call = call_of(layer, memory, rows, threads);
  compute_feed_forward(&call, layer, attended, states, output);
}

void KERNEL(encoder_layer)(
    const void *layer, const void *states, void *output, void *memory, const int64_t *offsets,
    long sequences, long rows, int threads) {
  const EncoderLayer *each = layer;
  Call call = call_of(each, memory, rows, threads);
  char *attended = take(&call, bytes_of(&call, each->from_attended.columns));
  compute_attention(&call, each, states, attended, offsets, sequences);
  compute_feed_forward(&call, each, attended, states, output);
}
