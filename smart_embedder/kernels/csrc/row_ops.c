/* Operations on rows between two matrix products, each in one pass; PyTorch's operators take several.
 *
 * The fields of `Backend` in ../backend.py define them. Matrices are row-major without gaps, in
 * `format`: float32 or bfloat16. Every row is computed by itself and by one thread, in float32.
 */
#include <assert.h>
#include <float.h>
#include <math.h>

#include "activation.h"
#include "kernels.h"
#include "numbers.h"
#include "threads.h"

/* Define `TASK(format, work, row)` for each format, so that the compiler knows the format. */
#define FOR_FORMATS(TASK)                                                                        \
  static void TASK##_float32(const void *work, long row) { TASK(FLOAT32, work, row); }           \
  static void TASK##_bfloat16(const void *work, long row) { TASK(BFLOAT16, work, row); }
#define TASK_OF(TASK, FORMAT) ((FORMAT) == FLOAT32 ? TASK##_float32 : TASK##_bfloat16)

static inline float min_float(float a, float b) { return a < b ? a : b; }
static inline float max_float(float a, float b) { return a > b ? a : b; }

/* Quantize each row, with its channels multiplied by factors, to 255 steps of its own range.
 *
 * Some channels are repeated in columns at the end. Each column's offset is added before it is
 * truncated. */

typedef struct {
  const void *states;
  const float *factors;    /* [width] */
  const float *offsets;    /* [width + repeats] */
  const int32_t *repeated; /* [repeats] */
  uint8_t *values;         /* [rows, width + repeats] */
  float *scale, *minimum;
  long width, repeats;
} Quantization;

enum { AT_ONCE = 16 };

/* Find a row's range lane by lane, since the compiler must not reorder comparisons of floats. If a
 * number is NaN, which comparisons would skip, the range is NaN. */
ALWAYS_INLINE void find_range(
    const Format format, const Quantization *all, long start, float *low, float *high) {
  float lows[AT_ONCE], highs[AT_ONCE];
  int is_nan[AT_ONCE] = {0};
  const float *restrict factors = all->factors;
  for (int lane = 0; lane < AT_ONCE; lane++)
    lows[lane] = highs[lane] = read(format, all->states, start) * factors[0];
  for (long i = 0; i < all->width; i += AT_ONCE)
    for (int lane = 0; lane < AT_ONCE; lane++) {
      float state = read(format, all->states, start + i + lane) * factors[i + lane];
      lows[lane] = min_float(state, lows[lane]);
      highs[lane] = max_float(state, highs[lane]);
      is_nan[lane] |= state != state;
    }
  int has_nan = is_nan[0];
  *low = lows[0], *high = highs[0];
  for (int lane = 1; lane < AT_ONCE; lane++) {
    *low = min_float(lows[lane], *low);
    *high = max_float(highs[lane], *high);
    has_nan |= is_nan[lane];
  }
  if (has_nan) *low = *high = NAN;
}

ALWAYS_INLINE void quantize_row(const Format format, const void *work, long row) {
  const Quantization *all = work;
  const long width = all->width, start = row * width;
  const void *states = all->states;
  const float *restrict factors = all->factors, *restrict offsets = all->offsets;
  uint8_t *restrict values = all->values + row * (width + all->repeats);
  float low, high;
  find_range(format, all, start, &low, &high);
  const float range = high - low;
  const float steps_per_one = range > 0 ? min_float(255 / range, FLT_MAX) : 0;
  all->scale[row] = range / 255;
  all->minimum[row] = low;
  if (!isfinite(range)) { /* The row's scale is not finite either, so its result is not. */
    memset(values, 0, (size_t)(width + all->repeats));
    return;
  }
  for (long i = 0; i < width; i++) {
    float steps = (read(format, states, start + i) * factors[i] - low) * steps_per_one;
    values[i] = (uint8_t)(int)max_float(steps + offsets[i], 0); /* NaN becomes 0 */
  }
  for (long repeat = 0; repeat < all->repeats; repeat++) {
    const long i = all->repeated[repeat];
    float steps = (read(format, states, start + i) * factors[i] - low) * steps_per_one;
    values[width + repeat] = (uint8_t)(int)max_float(steps + offsets[width + repeat], 0);
  }
}
FOR_FORMATS(quantize_row)

/* `width` is a multiple of 16. */
void KERNEL(quantize_rows)(
    const void *states, int format, const float *factors, const float *offsets,
    const int32_t *repeated, uint8_t *values, float *scale, float *minimum, long rows, long width,
    long repeats, int threads) {
  assert(width % AT_ONCE == 0);
  Quantization all = {
      states, factors, offsets, repeated, values, scale, minimum, width, repeats};
  for_rows(rows, width, threads, TASK_OF(quantize_row, format), &all);
}

/* Layer normalisation of a sum, which overwrites the first summand. */

typedef struct {
  const float *weight, *bias;
  float epsilon;
  long width;
} LayerNorm;

static inline void layer_norm(const LayerNorm *norm, float *row) {
  float total = 0, squares = 0;
  for (long i = 0; i < norm->width; i++) total += row[i];
  float mean = total / norm->width;
  for (long i = 0; i < norm->width; i++) squares += (row[i] - mean) * (row[i] - mean);
  float by = 1 / sqrtf(squares / norm->width + norm->epsilon);
  for (long i = 0; i < norm->width; i++)
    row[i] = (row[i] - mean) * by * norm->weight[i] + norm->bias[i];
}

typedef struct {
  LayerNorm norm;
  void *states;
  const void *residual;
} AddNorm;

ALWAYS_INLINE void add_norm_row(const Format format, const void *work, long row) {
  const AddNorm *all = work;
  const long width = all->norm.width, start = row * width;
  float *sum = format == FLOAT32 ? (float *)all->states + start : thread_scratch();
  for (long i = 0; i < width; i++)
    sum[i] = read(format, all->states, start + i) + read(format, all->residual, start + i);
  layer_norm(&all->norm, sum);
  if (format != FLOAT32)
    for (long i = 0; i < width; i++) write(format, all->states, start + i, sum[i]);
}
FOR_FORMATS(add_norm_row)

void KERNEL(add_norm)(
    void *states, const void *residual, int format, const float *weight, const float *bias,
    float epsilon, long rows, long width, int threads) {
  assert(width * (long)sizeof(float) <= SCRATCH_BYTES);
  AddNorm all = {{weight, bias, epsilon, width}, states, residual};
  for_rows(rows, width, threads, TASK_OF(add_norm_row, format), &all);
}

/* RMS normalisation. */

/* Return the factor that makes the mean of a row's squares 1. */
ALWAYS_INLINE float rms_factor(
    const Format format, const void *states, long start, long width, float epsilon) {
  float squares = 0;
  for (long i = start; i < start + width; i++)
    squares += read(format, states, i) * read(format, states, i);
  return 1 / sqrtf(squares / width + epsilon);
}

typedef struct {
  const void *states, *weight;
  void *output;
  float epsilon;
  long width;
} RmsNorm;

ALWAYS_INLINE void rms_norm_row(const Format format, const void *work, long row) {
  const RmsNorm *all = work;
  const long width = all->width, start = row * width;
  const void *states = all->states, *weight = all->weight;
  void *restrict output = all->output;
  float factor = rms_factor(format, states, start, width, all->epsilon);
  for (long i = 0; i < width; i++)
    write(
        format, output, start + i,
        read(format, states, start + i) * factor * read(format, weight, i));
}
FOR_FORMATS(rms_norm_row)

/* output = states, normalised and times `weight`; `[rows, width]` and `[width]`. */
void KERNEL(rms_norm)(
    const void *states, const void *weight, void *output, int format, float epsilon, long rows,
    long width, int threads) {
  RmsNorm all = {states, weight, output, epsilon, width};
  for_rows(rows, width, threads, TASK_OF(rms_norm_row, format), &all);
}

/* RMS norm and rotary embedding of heads. */

typedef struct {
  void *states;
  const void *weight;
  const float *cosines, *sines; /* [rows, width / 2] */
  float epsilon;
  long stride, heads, width;
} Rotary;

ALWAYS_INLINE void rotary_row(const Format format, const void *work, long row) {
  const Rotary *all = work;
  const long width = all->width, half = width / 2;
  const float *cosines = all->cosines + row * half, *sines = all->sines + row * half;
  const void *weight = all->weight;
  void *restrict states = all->states;
  for (long head = 0; head < all->heads; head++) {
    const long lower = row * all->stride + head * width, upper = lower + half;
    float factor = rms_factor(format, states, lower, width, all->epsilon);
    for (long i = 0; i < half; i++) {
      float first = read(format, states, lower + i) * factor * read(format, weight, head * width + i);
      float second =
          read(format, states, upper + i) * factor * read(format, weight, head * width + half + i);
      write(format, states, lower + i, first * cosines[i] - second * sines[i]);
      write(format, states, upper + i, second * cosines[i] + first * sines[i]);
    }
  }
}
FOR_FORMATS(rotary_row)

/* Normalise and rotate the first `heads` heads of each row in place. Rows are `stride` numbers apart;
 * `weight` is `[heads, width]`. */
void KERNEL(rotary)(
    void *states, const void *weight, int format, const float *cosines, const float *sines,
    float epsilon, long rows, long stride, long heads, long width, int threads) {
  Rotary all = {states, weight, cosines, sines, epsilon, stride, heads, width};
  for_rows(rows, heads * width, threads, TASK_OF(rotary_row, format), &all);
}

/* A gate: the activation of one half of a row times the other half, as in SwiGLU and GEGLU. */

typedef struct {
  const void *states;
  void *output;
  long width;
  int activation;
} Gate;

ALWAYS_INLINE void gate_row(const Format format, const void *work, long row) {
  const Gate *all = work;
  const long width = all->width, x = row * 2 * width, y = x + width;
  for (long i = 0; i < width; i += LANES) {
    const Floats gate = activate(all->activation, load(format, all->states, x + i));
    store(format, all->output, row * width + i, gate * load(format, all->states, y + i));
  }
}
FOR_FORMATS(gate_row)

/* output = activation(x) y for the halves x and y of each row; `output` is `[rows, width]`, `width`
 * a multiple of 16. */
void KERNEL(gate)(
    const void *states, void *output, int format, long rows, long width, int activation,
    int threads) {
  assert(width % 16 == 0);
  Gate all = {states, output, width, activation};
  for_rows(rows, width, threads, TASK_OF(gate_row, format), &all);
}
