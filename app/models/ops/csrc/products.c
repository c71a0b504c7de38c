/* Products of activations with weights: bfloat16, or bytes (u8 with s8).
 *
 * Weights lie in panels of 64 columns. Threads take panels, of a large batch with many threads parts
 * of their rows, one after another as they get done. A panel is read from the memory once and stays
 * in the cache for all rows; scale, bias and activation are computed on what was summed up last.
 */
#include <stdatomic.h>

#include "bfloat16.h"
#include "threads.h"
#include "tile.h"

enum {
  DEPTH = 512,     /* words of a panel at once: 128 KiB, which the second cache keeps */
  MOST_ROWS = 768, /* of a share of the work: their sums have to stay there, too */
  FEWEST_ROWS = 48,
  SHARES = 4, /* of each thread at least, so that none waits long for another */
};

enum { NONE, GELU, RELU };

typedef struct {
  const Word *left, *right; /* [rows, words] and [columns / TILE, words, TILE] */
  const float *scale;       /* [columns]; of bytes alone */
  const float *bias;        /* [columns] */
  void *output;             /* [rows, columns] */
  long rows, words, columns;
  int bytes, activation, is_output_float;
  long share_rows;
  atomic_long next;
} Product;

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

/* Write a tile of sums as they are wanted. */
static void finish(const Product *product, long first, int rows, long column, const Word *sums) {
  for (long place = 0; place < TILE; place += LANES) {
    const __m512 bias = _mm512_loadu_ps(product->bias + column + place);
    __m512 scale = _mm512_setzero_ps();
    if (product->bytes) scale = _mm512_loadu_ps(product->scale + column + place);
    for (int row = 0; row < rows; row++) {
      __m512i sum = _mm512_loadu_si512(sums + row * TILE + place);
      __m512 result = product->bytes ? _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, bias)
                                     : _mm512_add_ps((__m512)sum, bias);
      result = activate(product->activation, result);
      long at = (first + row) * product->columns + column + place;
      if (product->is_output_float)
        _mm512_storeu_ps((float *)product->output + at, result);
      else
        _mm256_storeu_si256(
            (__m256i *)((bfloat16 *)product->output + at), (__m256i)_mm512_cvtneps_pbh(result));
    }
  }
}

#define MULTIPLY(ROWS_NOW, BYTES)                                                                \
  multiply_tile(                                                                                 \
      ROWS_NOW, TILE / LANES, BYTES, words, left, product->words, right, sums, TILE, add);       \
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
    const Product *product, int rows, long words, const Word *left, const Word *right, Word *sums,
    int add) {
  if (product->bytes)
    MULTIPLY_ROWS(1)
  else
    MULTIPLY_ROWS(0)
}

/* Rows from `top` to `bottom` of a panel, in parts of DEPTH where it is deep. */
static void multiply_panel(
    const Product *product, long panel, long top, long bottom, Word sums[MOST_ROWS * TILE]) {
  for (long word = 0; word < product->words; word += DEPTH) {
    long words = smaller(product->words - word, DEPTH);
    const Word *right = product->right + (panel * product->words + word) * TILE;
    for (long row = top; row < bottom; row += ROWS) {
      int rows = (int)smaller(bottom - row, ROWS);
      Word *tile = product->words > DEPTH ? sums + (row - top) * TILE : sums;
      const Word *left = product->left + row * product->words + word;
      multiply_rows(product, rows, words, left, right, tile, word > 0);
      if (word + words == product->words) finish(product, row, rows, panel * TILE, tile);
    }
  }
}

static void multiply_my_shares(void *work) {
  static _Thread_local _Alignas(64) Word sums[MOST_ROWS * TILE];
  Product *product = work;
  long parts = whole(product->rows, product->share_rows);
  long shares = product->columns / TILE * parts;
  for (long share; (share = atomic_fetch_add(&product->next, 1)) < shares;) {
    long top = share % parts * product->share_rows;
    long bottom = smaller(top + product->share_rows, product->rows);
    multiply_panel(product, share / parts, top, bottom, sums);
  }
}

static long share_rows_of(long rows, long panels, int threads) {
  long wanted = whole(rows, whole((long)SHARES * threads, panels));
  wanted = whole(wanted < FEWEST_ROWS ? FEWEST_ROWS : wanted, ROWS) * ROWS;
  return smaller(wanted, MOST_ROWS);
}

static void run(Product product, int threads) {
  product.share_rows = share_rows_of(product.rows, product.columns / TILE, threads);
  on_threads(threads, multiply_my_shares, &product);
}

/* output = activation(left x right + bias), all but the bias bfloat16; `depth` is even and `columns`
 * a multiple of 64. */
void multiply_bfloat16(
    const Word *left, const Word *right, const float *bias, bfloat16 *output, long rows, long depth,
    long columns, int activation, int threads) {
  Product product = {
      .left = left,
      .right = right,
      .bias = bias,
      .output = output,
      .rows = rows,
      .words = depth / 2,
      .columns = columns,
      .activation = activation,
  };
  run(product, threads);
}

/* output = activation(scale x (left x right) + bias), left u8 and right s8, output float or bfloat16;
 * `depth` is a multiple of 4 and `columns` one of 64. */
void multiply_levels(
    const Word *left, const Word *right, const float *scale, const float *bias, void *output,
    int is_output_float, long rows, long depth, long columns, int activation, int threads) {
  Product product = {
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
  run(product, threads);
}
