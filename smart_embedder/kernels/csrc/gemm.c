/* GEMM: activations times weights, in float32, in bfloat16 or in 8 bits (u8 times s8).
 *
 * A task is PANEL columns of the weights for all rows, or, with many threads and rows, for some rows.
 * Threads take task after task. The weights of a task stay in the cache for all its rows, and the
 * epilogue (scale, bias, activation) runs on the sums of a tile.
 *
 * The weights are laid out in panels beforehand.
 *
 * A number in 8 bits is the row's scale times its byte plus the row's minimum. The minimum is
 * multiplied with the sums of the weights' columns, so the product itself only needs the scale.
 */
#include <assert.h>

#include "activation.h"
#include "kernels.h"
#include "threads.h"
#include "tile.h"

enum {
  PANEL = 64,          /* columns */
  DEPTH = 512,         /* words of a panel at a time: 128 KiB, which stay in the second-level cache */
  MAX_TASK_ROWS = 768, /* the sums of so many rows stay in that cache, too */
  MIN_TASK_ROWS = 48,
  TASKS_PER_THREAD = 4, /* at least, so that no thread waits long for another */
  FEW_ROWS = 2 * TALL_ROWS,
  AHEAD = 2048, /* words to prefetch */
};

/* How to restore a product of numbers in 8 bits. */
typedef struct {
  const float *row_scale, *row_minimum; /* [rows] */
  const float *scale;                   /* [columns], of the weights */
  const float *sums;                    /* [columns], of the scaled weights */
} Bytes;

typedef struct {
  const Word *left; /* [rows, words] */
  const Word *right; /* [columns / STRIP, words, STRIP] */
  const float *bias; /* [columns] */
  Bytes bytes;       /* for 8 bits alone */
  void *output;      /* [rows, columns], rows `output_stride` numbers apart */
  long rows, words, columns, output_stride;
  Format format, output_format;
  int activation, threads;
  long task_rows;
  atomic_long next;
} Gemm;

typedef struct {
  Word sums[MAX_TASK_ROWS * PANEL];
} Scratch;
static_assert(sizeof(Scratch) <= SCRATCH_BYTES, "a thread has less memory");

/* Restore sums of products of bytes, which are floats and scaled by column. */
ALWAYS_INLINE Floats dequantize(
    const Bytes *bytes, long row, Floats scaled, Floats column_sums, Floats bias) {
  const Floats minimum = bytes->row_minimum[row], scale = bytes->row_scale[row];
  return fma_floats(scaled, scale, fma_floats(column_sums, minimum, bias));
}

/* Apply scale, bias and activation to the sums of a tile's rows and LANES columns, and write the
 * results. */
ALWAYS_INLINE void write_sums(
    const Format format, const int activation, const Gemm *gemm, long first, int rows, long column,
    const Words *sums, long stride) {
  const Bytes *bytes = &gemm->bytes;
  const Floats bias = load_floats(gemm->bias + column);
  Floats scale = 0, column_sums = 0;
  if (format == INT8) {
    scale = load_floats(bytes->scale + column);
    column_sums = load_floats(bytes->sums + column);
  }
  for (int row = 0; row < rows; row++, sums += stride) {
    const Words sum = load_words(sums);
    const Floats scaled = __builtin_convertvector((Ints)sum, Floats) * scale;
    Floats result = format == INT8 ? dequantize(bytes, first + row, scaled, column_sums, bias)
                                   : (Floats)sum + bias;
    result = activate(activation, result);
    store(gemm->output_format, gemm->output, (first + row) * gemm->output_stride + column, result);
  }
}

/* Write the results of a tile whose sums are in memory. */
ALWAYS_INLINE void write_tile(
    const Format format, const Gemm *gemm, long first, int rows, long column, long columns,
    const Word *sums) {
  for (long place = 0; place < columns; place += LANES)
    write_sums(
        format, gemm->activation, gemm, first, rows, column + place, (const Words *)(sums + place),
        PANEL / LANES);
}

/* Multiply a whole tile, whose sums stay in registers until they are written. The compiler knows the
 * activation. */
ALWAYS_INLINE void multiply_and_write(
    const Format format, const int activation, const Tile tile, const Gemm *gemm, long first,
    long column) {
  Words sums[TALL_ROWS][REGISTERS];
  sum_tile(format, ROWS, REGISTERS, tile, sums);
  UNROLLED for (int part = 0; part < REGISTERS; part++) {
    UNROLLED for (int row = 0; row < ROWS; row++)
      write_sums(
          format, activation, gemm, first + row, 1, column + part * LANES, &sums[row][part], 1);
  }
}

ALWAYS_INLINE void multiply_rows(const Format format, int rows, const Tile tile) {
  switch (rows) {
    case 1: multiply_tile(format, 1, REGISTERS, tile); return;
    case 2: multiply_tile(format, 2, REGISTERS, tile); return;
    case 3: multiply_tile(format, 3, REGISTERS, tile); return;
    case 4: multiply_tile(format, 4, REGISTERS, tile); return;
    case 5: multiply_tile(format, 5, REGISTERS, tile); return;
    default: multiply_tile(format, ROWS, REGISTERS, tile);
  }
}

/* 13 rows have the smallest tile: one of 7 and one of 6 rows. */
ALWAYS_INLINE void multiply_tall(const Format format, int rows, const Tile tile) {
  switch (rows) {
    case 6: multiply_tile(format, 6, HALF, tile); return;
    case 7: multiply_tile(format, 7, HALF, tile); return;
    case 8: multiply_tile(format, 8, HALF, tile); return;
    case 9: multiply_tile(format, 9, HALF, tile); return;
    case 10: multiply_tile(format, 10, HALF, tile); return;
    case 11: multiply_tile(format, 11, HALF, tile); return;
    default: multiply_tile(format, TALL_ROWS, HALF, tile);
  }
}

/* Multiply rows from `top` to `bottom` with a panel, in parts of DEPTH words. With `is_followed` this
 * thread also has the next panel, which is prefetched while the first rows are computed. */
ALWAYS_INLINE void multiply_panel(
    const Format format, const Gemm *gemm, long panel, long top, long bottom, int is_followed,
    Scratch *scratch) {
  const int is_deep = gemm->words > DEPTH;
  for (long word = 0; word < gemm->words; word += DEPTH) {
    const long words = min_long(gemm->words - word, DEPTH);
    const Word *right = gemm->right + panel * PANEL * gemm->words + word * STRIP;
    const Word *next = gemm->right + (panel + 1) * PANEL * gemm->words + word * PANEL;
    for (long row = top; row < bottom; row += ROWS) {
      const int rows = (int)min_long(bottom - row, ROWS);
      for (long column = 0; column < PANEL; column += TILE) {
        const long part = (row - top) / ROWS * (PANEL / TILE) + column / TILE; /* of the next panel */
        Word *sums = scratch->sums + (is_deep ? (row - top) * PANEL : 0) + column;
        const int is_last = word + words == gemm->words;
        const Tile tile = {
            .left = gemm->left + row * gemm->words + word,
            .left_stride = gemm->words,
            .right = right + column * gemm->words,
            .right_step = STRIP,
            .half = gemm->words * STRIP,
            .words = words,
            .ahead = is_followed && part < PANEL / LANES ? next + part * words * LANES : NULL,
            .vectors_ahead = 1,
            .sums = sums,
            .sums_stride = PANEL,
            .add = word > 0,
        };
        if (is_last && rows == ROWS && gemm->activation == NONE) {
          multiply_and_write(format, NONE, tile, gemm, row, panel * PANEL + column);
        } else if (is_last && rows == ROWS && gemm->activation == GELU) {
          multiply_and_write(format, GELU, tile, gemm, row, panel * PANEL + column);
        } else {
          multiply_rows(format, rows, tile);
          if (is_last) write_tile(format, gemm, row, rows, panel * PANEL + column, TILE, sums);
        }
      }
    }
  }
}

/* Multiply few rows with a panel. Its weights come from memory, and the tile is so tall that all
 * arithmetic on them overlaps with the reading. Prefetching continues into the next panel if this
 * thread has it, too (`is_followed`). */
ALWAYS_INLINE void multiply_few_rows(
    const Format format, const Gemm *gemm, long panel, int is_followed, Scratch *scratch) {
  const long tile_rows = ceil_div(gemm->rows, ceil_div(gemm->rows, TALL_ROWS));
  for (long column = panel * PANEL; column < (panel + 1) * PANEL; column += STRIP) {
    const int is_last = column + STRIP == (panel + 1) * PANEL && !is_followed;
    const Word *right = gemm->right + column * gemm->words;
    for (long row = 0; row < gemm->rows; row += tile_rows) {
      const int rows = (int)min_long(gemm->rows - row, tile_rows);
      multiply_tall(format, rows, (Tile){
          .left = gemm->left + row * gemm->words,
          .left_stride = gemm->words,
          .right = right,
          .right_step = STRIP,
          .words = gemm->words,
          .ahead = row > 0 || is_last ? NULL : right + AHEAD,
          .vectors_ahead = HALF,
          .sums = scratch->sums,
          .sums_stride = PANEL,
      });
      write_tile(format, gemm, row, rows, column, STRIP, scratch->sums);
    }
  }
}

/* Take the next tasks: many at first, whose weights are contiguous in memory, and few at the end, so
 * that no thread waits long for another. */
static long take_tasks(Gemm *gemm, long tasks, long *first) {
  long taken;
  *first = atomic_load(&gemm->next);
  do {
    if (*first >= tasks) return 0;
    taken = ceil_div(tasks - *first, 2 * gemm->threads);
  } while (!atomic_compare_exchange_weak(&gemm->next, first, *first + taken));
  return taken;
}

ALWAYS_INLINE void run_tasks(const Format format, Gemm *gemm) {
  const int is_tall = gemm->rows > ROWS && gemm->rows <= FEW_ROWS;
  const long parts = ceil_div(gemm->rows, gemm->task_rows);
  const long tasks = gemm->columns / PANEL * parts;
  for (long first, count; (count = take_tasks(gemm, tasks, &first)) > 0;)
    for (long task = first; task < first + count; task++) {
      if (is_tall) {
        multiply_few_rows(format, gemm, task, task + 1 < first + count, thread_scratch());
        continue;
      }
      const long top = task % parts * gemm->task_rows;
      const long bottom = min_long(top + gemm->task_rows, gemm->rows);
      const int is_followed = task + 1 < first + count && (task + 1) % parts == 0;
      multiply_panel(format, gemm, task / parts, top, bottom, is_followed, thread_scratch());
    }
}

static void run_float32(void *work) { run_tasks(FLOAT32, work); }
static void run_bfloat16(void *work) { run_tasks(BFLOAT16, work); }
static void run_int8(void *work) { run_tasks(INT8, work); }

static long task_rows_of(long rows, long panels, int threads) {
  long rows_of_task = ceil_div(rows, ceil_div((long)TASKS_PER_THREAD * threads, panels));
  rows_of_task = ceil_div(rows_of_task < MIN_TASK_ROWS ? MIN_TASK_ROWS : rows_of_task, ROWS) * ROWS;
  return min_long(rows_of_task, MAX_TASK_ROWS);
}

/* output = activation(left right + bias). The bias is float32. Left and right are in `format`, and so
 * is the output, except for 8 bits. Scales, minimum and sums are used for 8 bits alone (see `Bytes`).
 * Rows of the output are `output_stride` numbers apart. `depth` is a multiple of 16, `columns` of
 * 64. */
void KERNEL(gemm)(
    const void *left, const void *right, const float *row_scale, const float *row_minimum,
    const float *scale, const float *sums, const float *bias, void *output, int format,
    int output_format, long rows, long depth, long columns, long output_stride, int activation,
    int threads) {
  assert(depth % 16 == 0 && columns % PANEL == 0 && output_format != INT8);
  Gemm gemm = {
      .left = left,
      .right = right,
      .bias = bias,
      .bytes = {row_scale, row_minimum, scale, sums},
      .output = output,
      .rows = rows,
      .words = depth / numbers_of_word(format),
      .columns = columns,
      .output_stride = output_stride,
      .format = format,
      .output_format = output_format,
      .activation = activation,
      .threads = threads,
      .task_rows = task_rows_of(rows, columns / PANEL, threads),
  };
  static void (*const run[])(void *) = {
      [FLOAT32] = run_float32, [BFLOAT16] = run_bfloat16, [INT8] = run_int8};
  /* The time to read the weights, plus that of the arithmetic. */
  const long words = gemm.words * columns, cost = words / 4 + rows * words / 32;
  on_threads(threads, cost, run[format], &gemm);
}

/* The epilogue for sums of products of bytes that another library has computed and scaled by column. */

typedef struct {
  const float *product; /* [rows, columns] */
  Bytes bytes;
  const float *bias;
  void *output;
  long columns;
  Format output_format;
  int activation;
} Dequantization;

static void dequantize_row(const void *work, long row) {
  const Dequantization *all = work;
  for (long column = 0; column < all->columns; column += LANES) {
    const long index = row * all->columns + column;
    const Floats scaled = load_floats(all->product + index);
    const Floats column_sums = load_floats(all->bytes.sums + column);
    const Floats bias = load_floats(all->bias + column);
    const Floats result = dequantize(&all->bytes, row, scaled, column_sums, bias);
    store(all->output_format, all->output, index, activate(all->activation, result));
  }
}

/* `columns` is a multiple of 16. */
void KERNEL(dequantize)(
    const float *product, const float *row_scale, const float *row_minimum, const float *sums,
    const float *bias, void *output, int output_format, long rows, long columns, int activation,
    int threads) {
  assert(columns % LANES == 0);
  const Dequantization all = {
      product, {row_scale, row_minimum, NULL, sums}, bias, output, columns, output_format,
      activation};
  for_rows(rows, columns, threads, dequantize_row, &all);
}
