/* Operations on rows between two matrix products: one pass where PyTorch's operators take several.
 *
 * app/models/ops/torch_backend.py says what they compute. Matrices are row-major without gaps. Every
 * row is computed by itself and by one thread, in float32.
 */
#include <math.h>

#include "bfloat16.h"
#include "exp2.h"
#include "threads.h"

enum { LANES = 16 };

static inline float min_float(float a, float b) { return a < b ? a : b; }
static inline float max_float(float a, float b) { return a > b ? a : b; }

/* Clamp to a range and truncate; `outliers` tells which rows had to be clamped. */

typedef struct {
  const float *states;
  uint8_t *values, *outliers;
  long width;
  float lowest, highest;
} Clamp;

static void clamp_row(const void *work, long row) {
  const Clamp *all = work;
  const long width = all->width;
  const float *restrict states = all->states + row * width;
  uint8_t *restrict values = all->values + row * width;
  float lowest = all->lowest, highest = all->highest;
  int is_outlier = 0;
  for (long i = 0; i < width; i++) {
    float clamped = min_float(max_float(states[i], lowest), highest);
    values[i] = (uint8_t)(int)clamped;
    is_outlier |= clamped != states[i];
  }
  all->outliers[row] = is_outlier != 0;
}

void clamp_rows(
    const float *states, uint8_t *values, uint8_t *outliers, long rows, long width, float lowest,
    float highest, int threads) {
  Clamp all = {states, values, outliers, width, lowest, highest};
  for_rows(rows, threads, clamp_row, &all);
}

/* Quantize each row to 255 steps of its own range. */

typedef struct {
  const void *states;
  uint8_t *values;
  float *scale, *minimum;
  long width;
} Quantization;

typedef float (*Read)(const void *states, long place);

/* Lane by lane, since the order in which a compiler may compare floats is fixed. */
static inline void find_range(
    const Quantization *all, Read read, long start, float *low, float *high) {
  float lows[LANES], highs[LANES];
  for (int lane = 0; lane < LANES; lane++) lows[lane] = highs[lane] = read(all->states, start);
  for (long i = start; i < start + all->width; i += LANES)
    for (int lane = 0; lane < LANES; lane++) {
      float state = read(all->states, i + lane);
      lows[lane] = min_float(state, lows[lane]);
      highs[lane] = max_float(state, highs[lane]);
    }
  *low = lows[0], *high = highs[0];
  for (int lane = 1; lane < LANES; lane++) {
    *low = min_float(lows[lane], *low);
    *high = max_float(highs[lane], *high);
  }
}

static inline void quantize_row(const Quantization *all, long row, Read read) {
  const long width = all->width, start = row * width;
  const void *states = all->states;
  uint8_t *restrict values = all->values + start;
  float low, high;
  find_range(all, read, start, &low, &high);
  float steps_per_one = high > low ? 255 / (high - low) : 0;
  for (long i = 0; i < width; i++)
    values[i] = (uint8_t)(int)((read(states, start + i) - low) * steps_per_one + 0.5f);
  all->scale[row] = (high - low) / 255;
  all->minimum[row] = low;
}

static inline float read_float(const void *states, long i) { return ((const float *)states)[i]; }
static inline float read_bfloat16(const void *states, long i) {
  return widen(((const bfloat16 *)states)[i]);
}

static void quantize_float_row(const void *work, long row) { quantize_row(work, row, read_float); }
static void quantize_bfloat16_row(const void *work, long row) {
  quantize_row(work, row, read_bfloat16);
}

void quantize_rows(
    const void *states, int is_bfloat16, uint8_t *values, float *scale, float *minimum, long rows,
    long width, int threads) {
  Quantization all = {states, values, scale, minimum, width};
  for_rows(rows, threads, is_bfloat16 ? quantize_bfloat16_row : quantize_float_row, &all);
}

/* Layer normalisation of a sum, in place of the first summand. */

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
  bfloat16 *states;
  const bfloat16 *residual;
} AddNorm;

static void add_norm_row(const void *work, long row) {
  const AddNorm *all = work;
  const long width = all->norm.width;
  bfloat16 *states = all->states + row * width;
  const bfloat16 *residual = all->residual + row * width;
  float sum[width];
  for (long i = 0; i < width; i++) sum[i] = widen(states[i]) + widen(residual[i]);
  layer_norm(&all->norm, sum);
  for (long i = 0; i < width; i++) states[i] = narrow(sum[i]);
}

void add_norm(
    bfloat16 *states, const bfloat16 *residual, const float *weight, const float *bias,
    float epsilon, long rows, long width, int threads) {
  AddNorm all = {{weight, bias, epsilon, width}, states, residual};
  for_rows(rows, threads, add_norm_row, &all);
}

/* The same for an 8-bit product and a residual that are not yet scaled. */

typedef struct {
  LayerNorm norm;
  float *product;
  const float *scale, *minimum; /* of each row */
  const float *residual;
  const float *weight_sums, *residual_scale, *constant; /* of each channel */
} Dequantization;

static void dequantize_add_norm_row(const void *work, long row) {
  const Dequantization *all = work;
  const long width = all->norm.width;
  float *product = all->product + row * width;
  const float *residual = all->residual + row * width;
  const float *weight_sums = all->weight_sums, *residual_scale = all->residual_scale,
              *constant = all->constant;
  float scale = all->scale[row], minimum = all->minimum[row];
  for (long i = 0; i < width; i++)
    product[i] = product[i] * scale + weight_sums[i] * minimum + residual[i] * residual_scale[i] +
                 constant[i];
  layer_norm(&all->norm, product);
}

void dequantize_add_norm(
    float *product, const float *scale, const float *minimum, const float *residual,
    const float *weight_sums, const float *residual_scale, const float *constant,
    const float *weight, const float *bias, float epsilon, long rows, long width, int threads) {
  const LayerNorm norm = {weight, bias, epsilon, width};
  Dequantization all = {
      norm, product, scale, minimum, residual, weight_sums, residual_scale, constant};
  for_rows(rows, threads, dequantize_add_norm_row, &all);
}

/* RMS normalisation. */

/* The factor that makes the mean of a row's squares 1. */
static inline float rms_factor(const bfloat16 *row, long width, float epsilon) {
  float squares = 0;
  for (long i = 0; i < width; i++) squares += widen(row[i]) * widen(row[i]);
  return 1 / sqrtf(squares / width + epsilon);
}

typedef struct {
  const bfloat16 *states, *weight;
  bfloat16 *output;
  float epsilon;
  long width;
} RmsNorm;

static void rms_norm_row(const void *work, long row) {
  const RmsNorm *all = work;
  const long width = all->width;
  const bfloat16 *states = all->states + row * width;
  bfloat16 *restrict output = all->output + row * width;
  float factor = rms_factor(states, width, all->epsilon);
  for (long i = 0; i < width; i++)
    output[i] = narrow(widen(states[i]) * factor * widen(all->weight[i]));
}

/* output = states, normalised and times `weight`; `[rows, width]` and `[width]`. */
void rms_norm(
    const bfloat16 *states, const bfloat16 *weight, bfloat16 *output, float epsilon, long rows,
    long width, int threads) {
  RmsNorm all = {states, weight, output, epsilon, width};
  for_rows(rows, threads, rms_norm_row, &all);
}

/* RMS norm and rotary embedding of heads. */

typedef struct {
  bfloat16 *states;
  const bfloat16 *weight;
  const float *cosines, *sines; /* [rows, width / 2] */
  float epsilon;
  long stride, heads, width;
} Rotary;

static void rotary_row(const void *work, long row) {
  const Rotary *all = work;
  const long width = all->width, half = width / 2;
  const float *cosines = all->cosines + row * half, *sines = all->sines + row * half;
  for (long head = 0; head < all->heads; head++) {
    bfloat16 *restrict lower = all->states + row * all->stride + head * width;
    bfloat16 *restrict upper = lower + half;
    const bfloat16 *weight = all->weight + head * width;
    float factor = rms_factor(lower, width, all->epsilon);
    for (long i = 0; i < half; i++) {
      float first = widen(lower[i]) * factor * widen(weight[i]);
      float second = widen(upper[i]) * factor * widen(weight[half + i]);
      lower[i] = narrow(first * cosines[i] - second * sines[i]);
      upper[i] = narrow(second * cosines[i] + first * sines[i]);
    }
  }
}

/* In place, the first `heads` heads of each row, which are `stride` numbers apart; `weight` is
 * `[heads, width]`. */
void rotary(
    bfloat16 *states, const bfloat16 *weight, const float *cosines, const float *sines,
    float epsilon, long rows, long stride, long heads, long width, int threads) {
  Rotary all = {states, weight, cosines, sines, epsilon, stride, heads, width};
  for_rows(rows, threads, rotary_row, &all);
}

/* SwiGLU: the SiLU of one half of a row gates the other. */

typedef struct {
  const bfloat16 *states;
  bfloat16 *output;
  long width;
} Gate;

static inline __m512 load(const bfloat16 *numbers) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)numbers));
  return (__m512)_mm512_slli_epi32(wide, 16);
}

static void gate_row(const void *work, long row) {
  const Gate *all = work;
  const long width = all->width;
  const bfloat16 *x = all->states + row * 2 * width, *y = x + width;
  bfloat16 *output = all->output + row * width;
  const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-LOG2_E);
  for (long i = 0; i < width; i += LANES) {
    __m512 gate = load(x + i);
    __m512 below = _mm512_add_ps(one, exp2_ps(_mm512_mul_ps(gate, minus)));
    __m512 result = _mm512_mul_ps(_mm512_div_ps(gate, below), load(y + i));
    _mm256_storeu_si256((__m256i *)(output + i), (__m256i)_mm512_cvtneps_pbh(result));
  }
}

/* output = x / (1 + exp(-x)) times y, for the halves x and y of each row; `output` is
 * `[rows, width]`, `width` a multiple of 16. */
void gate(const bfloat16 *states, bfloat16 *output, long rows, long width, int threads) {
  Gate all = {states, output, width};
  for_rows(rows, threads, gate_row, &all);
}
