/* The micro-kernel of every matrix product: a few rows times TILE columns, summed up in registers.
 *
 * The left matrix is row-major in words. The right one is in panels of TILE columns, each row-major
 * in words.
 */
#ifndef TILE_H
#define TILE_H

#include "vector.h"

enum {
  TILE = REGISTERS * LANES, /* columns */
  ROWS = 6,                 /* at most: sums, columns and one of the left matrix fill the registers */
};

/* Rows of `left`, `words` words wide, times columns of `right`, into `sums` or, with `add`, added
 * to them. Strides from row to row are in words. */
typedef struct {
  const Word *left;
  long left_stride;
  const Word *right;
  long words;
  Word *sums;
  long sums_stride;
  int add;
} Tile;

/* `format`, `rows` and `registers` are known when this is compiled, so that all sums are in
 * registers. */
ALWAYS_INLINE void multiply_tile(
    const Format format, const int rows, const int registers, const Tile tile) {
  Words sum[ROWS][REGISTERS];
  for (int row = 0; row < rows; row++)
    for (int part = 0; part < registers; part++)
      sum[row][part] =
          tile.add ? load_words(tile.sums + row * tile.sums_stride + part * LANES) : (Words)0;
  for (long word = 0; word < tile.words; word++) {
    Words columns[REGISTERS];
    for (int part = 0; part < registers; part++)
      columns[part] = load_words(tile.right + word * TILE + part * LANES);
    for (int row = 0; row < rows; row++) {
      const Words left = tile.left[row * tile.left_stride + word];
      for (int part = 0; part < registers; part++)
        sum[row][part] = dot_words(format, sum[row][part], (Words)left, columns[part]);
    }
  }
  for (int row = 0; row < rows; row++)
    for (int part = 0; part < registers; part++)
      store_words(tile.sums + row * tile.sums_stride + part * LANES, sum[row][part]);
}

/* Lay `count` rows of words, which are `stride` apart, out as the columns of panels that are
 * `panel_stride` apart; what fills the last register up is zero. */
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

#endif
