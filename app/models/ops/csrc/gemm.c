/* GEMM: activations times weights, in bfloat16 or in bytes (u8 times s8).
 *
 * Weights are packed in panels of 64 columns. A task is a panel, or with many threads and rows a
 * part of its rows; threads take one task after another. A panel is read from memory once and stays
 * in the cache for all rows; the epilogue (scale, bias, activation) runs on the sums of a tile.
 */
#include <stdatomic.h>

#include "bfloat16.h"
#include "threads.h"
#include "tile.h"

enum {
  DEPTH = 512,     /* words of a panel at once: 128 KiB, which the second cache keeps */
  MAX_TASK_ROWS = 768, /* their sums have to stay in that cache, too */
  MIN_TASK_ROWS = 48,
  TASKS_PER_THREAD = 4, /* at least, so that no thread waits long for another */
};

enum { NONE, GELU, RELU };

typedef struct {
  const Word *left, *right; /* [rows, words] and [columns / TILE, words, TILE] */
  const float *scale;       /* [columns]; of bytes alone */
  const float *bias;        /* [columns] */
  void *output;             /* [rows, columns] */
  long rows, words, columns;
  int bytes, activation, is_output_float;
  long task_rows;
  atomic_long next;
} Gemm;

/* x times the probability that a normal variable is below x (Hendrycks and Gimpel 2016), to 1e-6.
 *
 * Half of 1 - erf(x / sqrt(2)) by Abramowitz and Stegun 7.1.28, whose coefficients hold the root. */
static inline __m512 gelu(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f);
  /* Beyond 10 it is 0, and the power below would leave the floats. */
  const __m512 bounded = _mm512_min_ps(size, _mm512_set1_ps(10.0f));
  __m512 root = _mm512_set1_ps(5.3829750e-6f);
  root = _mm512_fmadd_ps(root, bounded, _mm512_set1_ps(4.8890637e-5f));
  root = _mm512_fmadd_ps(root, bounded, _mm512_set1_ps(3.8003575e-5f));
  root = _mm512_fmadd_ps(root, bounded, _mm512_set1_ps(3.2776263e-3f));
  root = _mm512_fmadd_ps(root, bounded, _mm512_set1_ps(2.1141006e-2f));
  root = _mm512_fmadd_ps(root, bounded, _mm512_set1_ps(4.9867347e-2f));
  root = _mm512_fmadd_ps(root, bounded, one);
  for (int doubling = 0; doubling < 4; doubling++) root = _mm512_mul_ps(root, root);
  __m512 tail = _mm512_rcp14_ps(root);
  /* One step of Newton's, and the half. */
  tail = _mm512_mul_ps(tail, _mm512_fnmadd_ps(root, _mm512_mul_ps(tail, _mm512_set1_ps(0.5f)), one));
  return _mm512_fnmadd_ps(size, tail, _mm512_max_ps(x, _mm512_setzero_ps()));
}

static inline __m512 activate(int activation, __m512 x) {
  if (activation == GELU) return gelu(x);
  return activation == RELU ? _mm512_max_ps(x, _mm512_setzero_ps()) : x;
}

/* Write a tile of sums with scale, bias and activation. */
static void write_tile(const Gemm *gemm, long first, int rows, long column, const Word *sums) {
  for (long place = 0; place < TILE; place += LANES) {
    const __m512 bias = _mm512_loadu_ps(gemm->bias + column + place);
    __m512 scale = _mm512_setzero_ps();
    if (gemm->bytes) scale = _mm512_loadu_ps(gemm->scale + column + place);
    for (int row = 0; row < rows; row++) {
      __m512i sum = _mm512_loadu_si512(sums + row * TILE + place);
      __m512 result = gemm->bytes ? _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, bias)
                                     : _mm512_add_ps((__m512)sum, bias);
      result = activate(gemm->activation, result);
      long at = (first + row) * gemm->columns + column + place;
      if (gemm->is_output_float)
        _mm512_storeu_ps((float *)gemm->output + at, result);
      else
        _mm256_storeu_si256(
            (__m256i *)((bfloat16 *)gemm->output + at), (__m256i)_mm512_cvtneps_pbh(result));
    }
  }
}

#define MULTIPLY(ROWS_NOW, BYTES)                                                                \
  multiply_tile(                                                                                 \
      ROWS_NOW, TILE / LANES, BYTES, words, left, gemm->words, right, sums, TILE, add);       \
  break
#define MULTIPLY_ROWS(BYTES)                                                                     \
  switch (rows) {                                                                                \
    case 1: MULTIPLY(1, BYTES);                                                                  \
    case 2: MULTIPLY(2, BYTES);                                                                  \
    case 3: MULTIPLY(3, BYTES);                                                                  \
    case 4: MULTIPLY(4, BYTES);                                                                  \
    case 5: MULTIPLY(5, BYTES);                                                                  \
    default: MULTIPLY(ROWS, BYTES);                                                              \
  }

static void multiply_rows(
    const Gemm *gemm, int rows, long words, const Word *left, const Word *right, Word *sums,
    int add) {
  if (gemm->bytes)
    MULTIPLY_ROWS(1)
  else
    MULTIPLY_ROWS(0)
}

/* Rows from `top` to `bottom` of a panel, in parts of DEPTH where it is deep. */
static void multiply_panel(
    const Gemm *gemm, long panel, long top, long bottom, Word sums[MAX_TASK_ROWS * TILE]) {
  for (long word = 0; word < gemm->words; word += DEPTH) {
    long words = min_long(gemm->words - word, DEPTH);
    const Word *right = gemm->right + (panel * gemm->words + word) * TILE;
    for (long row = top; row < bottom; row += ROWS) {
      int rows = (int)min_long(bottom - row, ROWS);
      Word *tile = gemm->words > DEPTH ? sums + (row - top) * TILE : sums;
      const Word *left = gemm->left + row * gemm->words + word;
      multiply_rows(gemm, rows, words, left, right, tile, word > 0);
      if (word + words == gemm->words) write_tile(gemm, row, rows, panel * TILE, tile);
    }
  }
}

static void run_tasks(void *work) {
  static _Thread_local _Alignas(64) Word sums[MAX_TASK_ROWS * TILE];
  Gemm *gemm = work;
  long parts = ceil_div(gemm->rows, gemm->task_rows);
  long tasks = gemm->columns / TILE * parts;
  for (long task; (task = atomic_fetch_add(&gemm->next, 1)) < tasks;) {
    long top = task % parts * gemm->task_rows;
    long bottom = min_long(top + gemm->task_rows, gemm->rows);
    multiply_panel(gemm, task / parts, top, bottom, sums);
  }
}

static long task_rows_of(long rows, long panels, int threads) {
  long rows_of_task = ceil_div(rows, ceil_div((long)TASKS_PER_THREAD * threads, panels));
  rows_of_task = ceil_div(rows_of_task < MIN_TASK_ROWS ? MIN_TASK_ROWS : rows_of_task, ROWS) * ROWS;
  return min_long(rows_of_task, MAX_TASK_ROWS);
}

static void run(Gemm gemm, int threads) {
  gemm.task_rows = task_rows_of(gemm.rows, gemm.columns / TILE, threads);
  on_threads(threads, run_tasks, &gemm);
}

/* output = activation(left right + bias), all but the bias bfloat16; `depth` is even and `columns`
 * a multiple of 64. */
void gemm_bfloat16(
    const Word *left, const Word *right, const float *bias, bfloat16 *output, long rows, long depth,
    long columns, int activation, int threads) {
  Gemm gemm = {
      .left = left,
      .right = right,
      .bias = bias,
      .output = output,
      .rows = rows,
      .words = depth / 2,
      .columns = columns,
      .activation = activation,
  };
  run(gemm, threads);
}

/* output = activation(scale (left right) + bias), left u8 and right s8, output float or bfloat16;
 * `depth` is a multiple of 4 and `columns` one of 64. */
void gemm_int8(
    const Word *left, const Word *right, const float *scale, const float *bias, void *output,
    int is_output_float, long rows, long depth, long columns, int activation, int threads) {
  Gemm gemm = {
      .left = left,
      .right = right,
      .scale = scale,
      .bias = bias,
      .output = output,
      .rows = rows,
      .words = depth / 4,
      .columns = columns,
      .bytes = 1,
      .activation = activation,
      .is_output_float = is_output_float,
  };
  run(gemm, threads);
}
