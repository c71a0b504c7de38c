/* A layer of an encoder for a small batch in one call: families/bert.py has the same layer as single
 * operations. Between two of them Python takes as long as some of them do.
 *
 * The operations are those of the other files, one after the other, so that the result has the same
 * bits. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "vector.h"

/* A product of states with weights, plus the bias, through the activation: as in gemm.c. */
typedef struct {
  const void *weights;
  const float *bias;
  const float *scale, *sums;       /* of weights in bytes; otherwise NULL */
  const float *factors, *offsets;  /* how states become bytes, as in row_ops.c */
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

/* The rows of a batch, and memory that is handed out from its beginning on. */
typedef struct {
  long rows;
  Format format;
  int threads;
  char *memory;
} Call;

enum { ALIGNMENT = 64 };

/* Memory for each row, which is rounded up; the caller of `encoder_layer` has counted the same. */
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

/* Self-attention over query, key and value side by side; zeros for the rows behind all sequences. */
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

/* `states` and `output` are `[rows, width]` of the layer's format; `offsets` as of `attention`.
 * `memory` is aligned to 64 bytes. */
void KERNEL(encoder_layer)(
    const void *layer, const void *states, void *output, void *memory, const int64_t *offsets,
    long sequences, long rows, int threads) {
  const EncoderLayer *each = layer;
  const long width = each->from_attended.columns, inner_width = each->to_inner.columns;
  Call call = {rows, (Format)each->format, threads, memory};
  char *projected = take(&call, bytes_of(&call, 3 * width));
  char *attended = take(&call, bytes_of(&call, width));
  char *inner = take(&call, bytes_of(&call, inner_width));

  multiply(&call, &each->to_query_key_value, states, projected);
  attend(&call, each, projected, attended, offsets, sequences);
  char *normed = projected; /* which nobody reads any more */
  multiply(&call, &each->from_attended, attended, normed);
  add_norm(&call, &each->attention_norm, normed, states, width);
  multiply(&call, &each->to_inner, normed, inner);
  multiply(&call, &each->from_inner, inner, output);
  add_norm(&call, &each->output_norm, output, normed, width);
}
