/* The passes over rows between two matrix products, each in one go where PyTorch takes several.
 *
 * app/models/ops/row_ops.py says what they compute, in PyTorch. Matrices are row-major without gaps; every
 * row is computed by itself and by one thread.
 */
#include <math.h>

#include "bfloat16.h"
#include "threads.h"

enum { LANES = 16 };

static inline float smaller(float a, float b) { return a < b ? a : b; }
static inline float larger(float a, float b) { return a > b ? a : b; }

/* Round states that are levels, and tell which rows reach beyond `lowest` and `highest`. */

typedef struct {
  const float *states;
  uint8_t *levels, *far;
  long width;
  float lowest, highest;
} Levels;

static void round_levels_of_row(const void *work, long row) {
  const Levels *all = work;
  const long width = all->width;
  const float *restrict states = all->states + row * width;
  uint8_t *restrict levels = all->levels + row * width;
  float lowest = all->lowest, highest = all->highest;
  int far = 0;
  for (long i = 0; i < width; i++) {
    float within = smaller(larger(states[i], lowest), highest);
    levels[i] = (uint8_t)(int)within;
    far |= within != states[i];
  }
  all->far[row] = far != 0;
}

void round_levels(
    const float *states, uint8_t *levels, uint8_t *far, long rows, long width, float lowest,
    float highest, int threads) {
  Levels all = {states, levels, far, width, lowest, highest};
  for_rows(rows, threads, round_levels_of_row, &all);
}

/* Round each row to 255 levels of its own range. */

typedef struct {
  const void *states;
  uint8_t *levels;
  float *scale, *minimum;
  long width;
} Ranges;

typedef float (*Read)(const void *states, long place);

/* Lane by lane, since the order in which a compiler may compare floats is fixed. */
static inline void find_range(
    const Ranges *all, Read read, long start, float *low, float *high) {
  float lows[LANES], highs[LANES];
  for (int lane = 0; lane < LANES; lane++) lows[lane] = highs[lane] = read(all->states, start);
  for (long i = start; i < start + all->width; i += LANES)
    for (int lane = 0; lane < LANES; lane++) {
      float state = read(all->states, i + lane);
      lows[lane] = smaller(state, lows[lane]);
      highs[lane] = larger(state, highs[lane]);
    }
  *low = lows[0], *high = highs[0];
  for (int lane = 1; lane < LANES; lane++) {
    *low = smaller(lows[lane], *low);
    *high = larger(highs[lane], *high);
  }
}

static inline void round_row(const Ranges *all, long row, Read read) {
  const long width = all->width, start = row * width;
  const void *states = all->states;
  uint8_t *restrict levels = all->levels + start;
  float low, high;
  find_range(all, read, start, &low, &high);
  float levels_in_one = high > low ? 255 / (high - low) : 0;
  for (long i = 0; i < width; i++)
    levels[i] = (uint8_t)(int)((read(states, start + i) - low) * levels_in_one + 0.5f);
  all->scale[row] = (high - low) / 255;
  all->minimum[row] = low;
}

static inline float read_float(const void *states, long i) { return ((const float *)states)[i]; }
static inline float read_bfloat16(const void *states, long i) {
  return widen(((const bfloat16 *)states)[i]);
}

static void round_row_of_float(const void *work, long row) { round_row(work, row, read_float); }
static void round_row_of_bfloat16(const void *work, long row) {
  round_row(work, row, read_bfloat16);
}

void round_rows(
    const void *states, int is_bfloat16, uint8_t *levels, float *scale, float *minimum, long rows,
    long width, int threads) {
  Ranges all = {states, levels, scale, minimum, width};
  for_rows(rows, threads, is_bfloat16 ? round_row_of_bfloat16 : round_row_of_float, &all);
}

/* Layer normalisation of a sum, which is written over the first of its parts. */

typedef struct {
  const float *weight, *bias;
  float epsilon;
  long width;
} Norm;

static inline void normalise(const Norm *norm, float *row) {
  float total = 0, squares = 0;
  for (long i = 0; i < norm->width; i++) total += row[i];
  float mean = total / norm->width;
  for (long i = 0; i < norm->width; i++) squares += (row[i] - mean) * (row[i] - mean);
  float by = 1 / sqrtf(squares / norm->width + norm->epsilon);
  for (long i = 0; i < norm->width; i++)
    row[i] = (row[i] - mean) * by * norm->weight[i] + norm->bias[i];
}

typedef struct {
  Norm norm;
  bfloat16 *states;
  const bfloat16 *residual;
} Sum;

static void norm_sum_of_row(const void *work, long row) {
  const Sum *all = work;
  const long width = all->norm.width;
  bfloat16 *states = all->states + row * width;
  const bfloat16 *residual = all->residual + row * width;
  float sum[width];
  for (long i = 0; i < width; i++) sum[i] = widen(states[i]) + widen(residual[i]);
  normalise(&all->norm, sum);
  for (long i = 0; i < width; i++) states[i] = narrow(sum[i]);
}

void norm_sum(
    bfloat16 *states, const bfloat16 *residual, const float *weight, const float *bias,
    float epsilon, long rows, long width, int threads) {
  Sum all = {{weight, bias, epsilon, width}, states, residual};
  for_rows(rows, threads, norm_sum_of_row, &all);
}

/* The same for a product of levels, and a residual given as levels. */

typedef struct {
  Norm norm;
  float *product;
  const float *scale, *minimum;        /* of each row */
  const float *residual;
  const float *sums, *unit, *constant; /* of each channel */
} Product;

static void norm_product_of_row(const void *work, long row) {
  const Product *all = work;
  const long width = all->norm.width;
  float *product = all->product + row * width;
  const float *residual = all->residual + row * width;
  const float *sums = all->sums, *unit = all->unit, *constant = all->constant;
  float scale = all->scale[row], minimum = all->minimum[row];
  for (long i = 0; i < width; i++)
    product[i] = product[i] * scale + sums[i] * minimum + residual[i] * unit[i] + constant[i];
  normalise(&all->norm, product);
}

void norm_product(
    float *product, const float *scale, const float *minimum, const float *residual,
    const float *sums, const float *unit, const float *constant, const float *weight,
    const float *bias, float epsilon, long rows, long width, int threads) {
  Product all = {
      {weight, bias, epsilon, width}, product, scale, minimum, residual, sums, unit, constant};
  for_rows(rows, threads, norm_product_of_row, &all);
}
