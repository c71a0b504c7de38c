/* The micro-kernel of every matrix product: a few rows times 64 columns, summed up in registers.
 *
 * A word is what a lane multiplies and adds at once: two bfloat16 into a float, or four bytes into
 * an integer. The left matrix is row-major in words. The right one is in panels of 64 columns, each
 * row-major in words.
 */
#ifndef TILE_H
#define TILE_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum {
  LANES = 16, /* words in a register */
  TILE = 64,  /* columns of a tile: four registers */
  ROWS = 6,   /* rows of a tile at most: 24 registers of sums */
};

typedef uint32_t Word;

#define ALWAYS_INLINE static inline __attribute__((always_inline))

static inline long min_long(long a, long b) { return a < b ? a : b; }
static inline long ceil_div(long count, long by) { return (count + by - 1) / by; }

ALWAYS_INLINE __m512i dot_words(const int bytes, __m512i sum, __m512i left, __m512i right) {
  if (bytes) return _mm512_dpbusd_epi32(sum, left, right);
  return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}

/* `rows` rows, `words` words wide, times `registers` registers of columns, into `sums` or, with
 * `add`, added to them. Strides from row to row are in words. `rows`, `registers` and `bytes` are
 * known when this is compiled, so that all sums are in registers. */
ALWAYS_INLINE void multiply_tile(
    const int rows, const int registers, const int bytes, long words, const void *left,
    long left_stride, const Word *right, void *sums, long sums_stride, int add) {
  __m512i sum[ROWS][TILE / LANES];
  for (int row = 0; row < rows; row++)
    for (int part = 0; part < registers; part++)
      sum[row][part] =
          add ? _mm512_loadu_si512((Word *)sums + row * sums_stride + part * LANES)
              : _mm512_setzero_si512();
  for (long word = 0; word < words; word++) {
    __m512i columns[TILE / LANES];
    for (int part = 0; part < registers; part++)
      columns[part] = _mm512_loadu_si512(right + word * TILE + part * LANES);
    for (int row = 0; row < rows; row++) {
      int one;
      memcpy(&one, (const Word *)left + row * left_stride + word, sizeof one);
      for (int part = 0; part < registers; part++)
        sum[row][part] =
            dot_words(bytes, sum[row][part], _mm512_set1_epi32(one), columns[part]);
    }
  }
  for (int row = 0; row < rows; row++)
    for (int part = 0; part < registers; part++)
      _mm512_storeu_si512((Word *)sums + row * sums_stride + part * LANES, sum[row][part]);
}

#endif
