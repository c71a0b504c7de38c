/* A decoder's passes over rows between two matrix products, in bfloat16 with float32 within.
 *
 * app/models/ops/decoder_rows.py says what they compute, in PyTorch. Rows have no gaps, and each is
 * computed by itself and by one thread.
 */
#include <math.h>

#include "bfloat16.h"
#include "power.h"
#include "threads.h"

enum { LANES = 16 };

/* What a row is multiplied with, so that the mean of its squares becomes 1. */
static inline float to_unit(const bfloat16 *row, long width, float epsilon) {
  float squares = 0;
  for (long i = 0; i < width; i++) squares += widen(row[i]) * widen(row[i]);
  return 1 / sqrtf(squares / width + epsilon);
}

typedef struct {
  const bfloat16 *states, *weight;
  bfloat16 *output;
  float epsilon;
  long width;
} Norm;

static void norm_row(const void *work, long row) {
  const Norm *all = work;
  const long width = all->width;
  const bfloat16 *states = all->states + row * width;
  bfloat16 *restrict output = all->output + row * width;
  float by = to_unit(states, width, all->epsilon);
  for (long i = 0; i < width; i++) output[i] = narrow(widen(states[i]) * by * widen(all->weight[i]));
}

/* output = states, normalised and times `weight`; `[rows, width]` and `[width]`. */
void rms_norm(
    const bfloat16 *states, const bfloat16 *weight, bfloat16 *output, float epsilon, long rows,
    long width, int threads) {
  Norm all = {states, weight, output, epsilon, width};
  for_rows(rows, threads, norm_row, &all);
}

/* Heads are normalised, and turned by their token's place. */

typedef struct {
  bfloat16 *states;
  const bfloat16 *weight;
  const float *cosines, *sines; /* [rows, width / 2] */
  float epsilon;
  long step, heads, width;
} Heads;

static void turn_row(const void *work, long row) {
  const Heads *all = work;
  const long width = all->width, half = width / 2;
  const float *cosines = all->cosines + row * half, *sines = all->sines + row * half;
  for (long head = 0; head < all->heads; head++) {
    bfloat16 *restrict lower = all->states + row * all->step + head * width;
    bfloat16 *restrict upper = lower + half;
    const bfloat16 *weight = all->weight + head * width;
    float by = to_unit(lower, width, all->epsilon);
    for (long i = 0; i < half; i++) {
      float first = widen(lower[i]) * by * widen(weight[i]);
      float second = widen(upper[i]) * by * widen(weight[half + i]);
      lower[i] = narrow(first * cosines[i] - second * sines[i]);
      upper[i] = narrow(second * cosines[i] + first * sines[i]);
    }
  }
}

/* In place, the first `heads` heads of each row, whose next one is `step` numbers on; `weight` is
 * `[heads, width]`. */
void turn_heads(
    bfloat16 *states, const bfloat16 *weight, const float *cosines, const float *sines,
    float epsilon, long rows, long step, long heads, long width, int threads) {
  Heads all = {states, weight, cosines, sines, epsilon, step, heads, width};
  for_rows(rows, threads, turn_row, &all);
}

/* One half of a row lets the other through. */

typedef struct {
  const bfloat16 *states;
  bfloat16 *output;
  long width;
} Gates;

static inline __m512 load(const bfloat16 *numbers) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)numbers));
  return (__m512)_mm512_slli_epi32(wide, 16);
}

static void gate_row(const void *work, long row) {
  const Gates *all = work;
  const long width = all->width;
  const bfloat16 *gate = all->states + row * 2 * width, *through = gate + width;
  bfloat16 *output = all->output + row * width;
  const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-LOG2_E);
  for (long i = 0; i < width; i += LANES) {
    __m512 x = load(gate + i);
    __m512 below = _mm512_add_ps(one, power_of_two(_mm512_mul_ps(x, minus)));
    __m512 result = _mm512_mul_ps(_mm512_div_ps(x, below), load(through + i));
    _mm256_storeu_si256((__m256i *)(output + i), (__m256i)_mm512_cvtneps_pbh(result));
  }
}

/* output = x / (1 + exp(-x)) times y, for the halves x and y of each row; `output` is
 * `[rows, width]`, `width` a multiple of 16. */
void gate_rows(const bfloat16 *states, bfloat16 *output, long rows, long width, int threads) {
  Gates all = {states, output, width};
  for_rows(rows, threads, gate_row, &all);
}
