/* The heart of every product: a few rows times 64 columns, summed up in registers.
 *
 * A word is what a lane multiplies and adds at once: two bfloat16 into a float, or four bytes into
 * an integer. Of the left matrix a row's words are neighbours; of the right one, the words of 64
 * columns, and then those below them.
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

static inline long smaller(long a, long b) { return a < b ? a : b; }
static inline long whole(long count, long of) { return (count + of - 1) / of; }

ALWAYS_INLINE __m512i multiply_and_add(const int bytes, __m512i sum, __m512i left, __m512i right) {
  if (bytes) return _mm512_dpbusd_epi32(sum, left, right);
  return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}

/* `rows` rows, `words` words wide, times `registers` registers of columns, into `sums` or, with
 * `add`, added to them. The steps from row to row are in words. `rows`, `registers` and `bytes` are
 * known when this is compiled, so that all sums are in registers. */
ALWAYS_INLINE void multiply_tile(
    const int rows, const int registers, const int bytes, long words, const void *left,
    long left_row, const Word *right, void *sums, long sums_row, int add) {
  __m512i sum[ROWS][TILE / LANES];
  for (int row = 0; row < rows; row++)
    for (int part = 0; part < registers; part++)
      sum[row][part] =
          add ? _mm512_loadu_si512((Word *)sums + row * sums_row + part * LANES)
              : _mm512_setzero_si512();
  for (long word = 0; word < words; word++) {
    __m512i columns[TILE / LANES];
    for (int part = 0; part < registers; part++)
      columns[part] = _mm512_loadu_si512(right + word * TILE + part * LANES);
    for (int row = 0; row < rows; row++) {
      int one;
      memcpy(&one, (const Word *)left + row * left_row + word, sizeof one);
      for (int part = 0; part < registers; part++)
        sum[row][part] =
            multiply_and_add(bytes, sum[row][part], _mm512_set1_epi32(one), columns[part]);
    }
  }
  for (int row = 0; row < rows; row++)
    for (int part = 0; part < registers; part++)
      _mm512_storeu_si512((Word *)sums + row * sums_row + part * LANES, sum[row][part]);
}

#endif
