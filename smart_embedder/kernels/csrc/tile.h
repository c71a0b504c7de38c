/* The micro-kernel of all matrix products: a few rows times TILE columns, or half as many columns, with
 * the sums in registers.
 *
 * The left matrix is row-major in words. The columns of the right one are in two halves, each
 * row-major in words. (For matrix instructions, two words of each column are side by side:
 * MATRIX_ROWS.)
 */
#ifndef TILE_H
#define TILE_H

#include "vector.h"

enum {
  TILE = REGISTERS * LANES, /* columns */
  STRIP = TILE / 2,
  ROWS = 6, /* at most: the sums, the columns and a word of the left matrix fill the registers */
  /* At most in a tile with half as many columns. */
  TALL_ROWS = 2 * ROWS,
  HALF = REGISTERS / 2,
  SECOND_CACHE = 2, /* of the prefetch instruction's levels */
};

/* Rows of `left`, `words` words wide, times columns of `right`. The products replace `sums`, or are
 * added to them if `add` is set. Strides from row to row are in words. */
typedef struct {
  const Word *left;
  long left_stride;
  const Word *right;
  long right_step, half; /* from one row of it to the next, and from one half of its columns */
  long words;
  /* Memory to prefetch into the second-level cache, `vectors_ahead` vectors for each word of the left
   * matrix; NULL for none. */
  const Word *ahead;
  int vectors_ahead;
  Word *sums;
  long sums_stride;
  int add;
} Tile;

/* The vector number `part` of the columns of a word, or of two words with matrix instructions. */
ALWAYS_INLINE const Word *column_words(const Format format, const Tile tile, long word, int part) {
  const int parts = HALF * rows_at_once(format); /* of half of the columns */
  return tile.right + part / parts * tile.half + word * tile.right_step + part % parts * LANES;
}

/* Two words of each of two rows. */
ALWAYS_INLINE Words load_pair(const Word *row, const Word *next) {
  Words words;
  memcpy(&words, row, sizeof words / 2);
  memcpy((char *)&words + sizeof words / 2, next, sizeof words / 2);
  return words;
}

/* Turn two vectors of one row each into one with the lower columns of both rows and one with the upper
 * columns, and back. */
ALWAYS_INLINE void exchange_halves(Words *first, Words *second) {
  const Words upper = *second;
  second->lo = first->hi;
  first->hi = upper.lo;
}

/* Add the products of a tile with instructions that multiply two rows and two words at a time. */
ALWAYS_INLINE void add_matrix_products(
    const Format format, const int rows, const int registers, const Tile tile,
    Words sum[TALL_ROWS][REGISTERS]) {
  for (int part = 0; rows % 2 && part < registers; part++) sum[rows][part] = 0;
  for (int row = 0; row < rows; row += 2)
    for (int part = 0; part < registers; part++) exchange_halves(sum[row] + part, sum[row + 1] + part);
  for (long word = 0; word < tile.words; word += 2) {
    Words left[TALL_ROWS / 2];
    for (int row = 0; row < rows; row += 2) {
      const Word *first = tile.left + row * tile.left_stride + word;
      left[row / 2] = load_pair(first, row + 1 < rows ? first + tile.left_stride : first);
    }
    for (int part = 0; part < 2 * registers; part++) {
      const Words columns = load_words(column_words(format, tile, word, part));
      for (int row = 0; row < rows; row += 2) {
        Words *sums = &sum[row + part % 2][part / 2];
        *sums = dot_words(format, *sums, left[row / 2], columns);
      }
    }
  }
  for (int row = 0; row < rows; row += 2)
    for (int part = 0; part < registers; part++) exchange_halves(sum[row] + part, sum[row + 1] + part);
}

/* Compute the sums of a tile. The compiler knows `format`, `rows` and `registers`, so all sums are in
 * registers. */
ALWAYS_INLINE void sum_tile(
    const Format format, const int rows, const int registers, const Tile tile,
    Words sum[TALL_ROWS][REGISTERS]) {
  UNROLLED for (int row = 0; row < rows; row++)
    UNROLLED for (int part = 0; part < registers; part++)
      sum[row][part] =
          tile.add ? load_words(tile.sums + row * tile.sums_stride + part * LANES) : (Words)0;
  const int is_matrix = rows_at_once(format) > 1;
  if (is_matrix) add_matrix_products(format, rows, registers, tile, sum);
  for (long word = 0; !is_matrix && word < tile.words; word++) {
    Words columns[REGISTERS];
    UNROLLED for (int part = 0; part < registers; part++)
      columns[part] = load_words(column_words(format, tile, word, part));
    for (int vector = 0; tile.ahead && vector < tile.vectors_ahead; vector++)
      __builtin_prefetch(tile.ahead + (word * tile.vectors_ahead + vector) * LANES, 0, SECOND_CACHE);
    UNROLLED for (int row = 0; row < rows; row++) {
      const Words left = tile.left[row * tile.left_stride + word];
      UNROLLED for (int part = 0; part < registers; part++)
        sum[row][part] = dot_words(format, sum[row][part], (Words)left, columns[part]);
    }
  }
}

/* Compute the sums of a tile and store them in memory. */
ALWAYS_INLINE void multiply_tile(
    const Format format, const int rows, const int registers, const Tile tile) {
  Words sum[TALL_ROWS][REGISTERS];
  sum_tile(format, rows, registers, tile, sum);
  UNROLLED for (int row = 0; row < rows; row++)
    UNROLLED for (int part = 0; part < registers; part++)
      store_words(tile.sums + row * tile.sums_stride + part * LANES, sum[row][part]);
}

/* Transpose `count` rows of words, which are `stride` apart, to the columns of panels, which are
 * `panel_stride` apart. Zeros fill the last register up. */
ALWAYS_INLINE void pack_columns(
    const Word *rows, long stride, long count, long words, Word *panels, long panel_stride) {
  for (long first = 0; first < count; first += LANES)
    for (long word = 0; word < words; word += LANES) {
      Words block[LANES];
      const int is_whole = first + LANES <= count && word + LANES <= words;
      for (long i = 0; i < LANES; i++) {
        const Word *row = rows + (first + i) * stride + word;
        block[i] = is_whole ? load_words(row)
                            : load_words_up_to(row, first + i < count ? words - word : 0);
      }
      transpose(block);
      Word *panel = panels + first / TILE * panel_stride + word * TILE + first % TILE;
      for (long i = 0; i < min_long(words - word, LANES); i++)
        store_words(panel + i * TILE, block[i]);
    }
}

/* Put the words of two subsequent rows of a panel side by side for each column; `words` are rows. */
static inline void pair_words(Word *panel, long words) {
  for (long word = 0; word < words; word += 2, panel += 2 * TILE) {
    Word rows[2][TILE] = {0};
    memcpy(rows, panel, sizeof(Word) * TILE * (word + 1 < words ? 2 : 1));
    for (int column = 0; column < TILE; column++)
      for (int row = 0; row < 2; row++) panel[2 * column + row] = rows[row][column];
  }
}

#endif
