/* Attention within each sequence of a packed batch, in float32 or bfloat16, with sums in float32.
 *
 * As in FlashAttention (Dao et al. 2022), scores never leave the cache. A task is a few hundred
 * queries of one head. It goes through the keys that these queries attend to block by block: it packs
 * a block for the processor's instructions, and then, for six queries at a time, multiplies them with
 * the keys, updates an online softmax, and multiplies the weights with the values. */
#include <assert.h>
#include <limits.h>
#include <math.h>

#include "kernels.h"
#include "threads.h"
#include "tile.h"

enum {
  BLOCK = 256,    /* words of keys at a time: with their values 128 KiB in bfloat16, 64 wide */
  MAX_KEYS = 2 * BLOCK,
  QUERIES = 512,  /* queries of a task */
  WIDTH = 128,    /* width of a head; wider ones have half as many keys and queries at a time */
  MAX_WIDTH = 2 * WIDTH,
};

/* Strides in bytes. */
typedef struct {
  long token, head;
} Strides;

typedef struct {
  const char *query, *key, *value;
  char *output;
  Strides query_strides, key_strides, output_strides; /* the values have the keys' strides */
  const int64_t *offsets;            /* the first token of each sequence, and the end of the last */
  long sequences, heads, group;      /* group: query heads for each key head */
  long width, words;                 /* the width of a head in numbers and in words */
  long block, queries;               /* words of keys at a time, and queries of a task */
  float scale; /* of the scores, for powers of 2 */
  long before, after; /* the number of keys before and after its own that a query attends to */
  atomic_long next;
} Batch;

/* Queries of one head of one sequence, and the keys that they attend to. The first query and the key
 * number `own` belong to the same token. */
typedef struct {
  const char *query, *key, *value;
  char *output;
  long own, queries, keys;
} Task;

/* Memory of one thread. */
typedef struct {
  Word keys[BLOCK * WIDTH];   /* panels of TILE keys, as wide as a head */
  Word values[BLOCK * WIDTH]; /* panels of TILE numbers, a block deep */
  float scores[ROWS][MAX_KEYS];
  Word weights[ROWS][BLOCK];
  Word query[ROWS][MAX_WIDTH];
  float sums[(QUERIES + 2 * ROWS) * WIDTH]; /* as wide as a head */
  float max[QUERIES + ROWS], total[QUERIES + ROWS]; /* the softmax's maximum and total */
} Scratch;
static_assert(sizeof(Scratch) <= SCRATCH_BYTES, "a thread has less memory");

/* Multiply a tile of ROWS rows and `columns` columns, rounded up to registers. */
ALWAYS_INLINE void multiply(const Format format, long columns, const Tile tile) {
  switch (ceil_div(columns, LANES)) {
    case 1: multiply_tile(format, ROWS, 1, tile); return;
    case 2: multiply_tile(format, ROWS, 2, tile); return;
    case 3: multiply_tile(format, ROWS, REGISTERS < 3 ? REGISTERS : 3, tile); return;
    default: multiply_tile(format, ROWS, REGISTERS, tile);
  }
}

/* Pack the values of a block. In bfloat16 a word has those of two tokens, or of the last one and 0. */
ALWAYS_INLINE void pack_values(
    const Format format, const Batch *batch, const char *value, long count, Scratch *scratch) {
  const long stride = batch->key_strides.token, tokens = numbers_of_word(format);
  for (long first = 0; first < count; first += tokens)
    for (long place = 0; place < batch->width; place += LANES) {
      const char *token = value + first * stride;
      Words words = (Words)load(format, token, place);
      if (format == BFLOAT16) {
        words >>= 16;
        if (first + 1 < count) words |= (Words)load(format, token + stride, place);
      }
      Word *panel = scratch->values + place / TILE * batch->block * TILE;
      store_words(panel + first / tokens * TILE + place % TILE, words);
    }
}

/* Lay the packed block of `count` keys out for matrix instructions, if there are any. */
ALWAYS_INLINE void pair_block(
    const Format format, const Batch *batch, long count, Scratch *scratch) {
  if (rows_at_once(format) == 1) return;
  pair_words(scratch->keys, ceil_div(count, TILE) * batch->words);
  for (long place = 0; place < batch->width; place += TILE)
    pair_words(scratch->values + place * batch->block, ceil_div(count, numbers_of_word(format)));
}

/* Find the maximum score of each row, of all rows in one loop, so that their instructions overlap. */
static void find_max(Scratch *scratch, long count, float max[ROWS]) {
  const Floats none = -INFINITY;
  const long last = (count - 1) / LANES * LANES;
  const Ints within = lane_numbers() < (Ints)(int)(count - last);
  Floats found[ROWS];
  for (int row = 0; row < ROWS; row++) {
    float *end = scratch->scores[row] + last;
    found[row] = within ? load_floats(end) : none;
    store_floats(end, found[row]);
  }
  for (long key = 0; key < last; key += LANES)
    for (int row = 0; row < ROWS; row++)
      found[row] = max_floats(load_floats(scratch->scores[row] + key), found[row]);
  for (int row = 0; row < ROWS; row++) max[row] = reduce_max(found[row]);
}

/* Compute 2 to the power of each score minus its row's maximum, and the total of each row. */
ALWAYS_INLINE void exponentiate(
    const Format format, Scratch *scratch, long count, float scale, const float max[ROWS],
    float total[ROWS]) {
  Floats sum[ROWS], shift[ROWS];
  for (int row = 0; row < ROWS; row++) {
    sum[row] = 0;
    shift[row] = max[row] == -INFINITY ? 0 : -max[row]; /* weights are 0 if all keys are masked */
  }
  for (long key = 0; key < count; key += LANES)
    for (int row = 0; row < ROWS; row++) {
      Floats score = load_floats(scratch->scores[row] + key);
      Floats weight = exp2_floats(fma_floats(score, scale, shift[row]));
      sum[row] += weight;
      store(format, scratch->weights[row], key, weight);
    }
  for (int row = 0; row < ROWS; row++) total[row] = reduce_sum(sum[row]);
}

/* Update the softmax of ROWS queries; scales the sums of earlier blocks to the new maximum. */
ALWAYS_INLINE void online_softmax(
    const Format format, const Batch *batch, Scratch *scratch, long first, long count,
    int is_first_block) {
  float max[ROWS], total[ROWS];
  find_max(scratch, count, max);
  for (int row = 0; row < ROWS; row++) {
    max[row] *= batch->scale;
    if (!is_first_block) max[row] = fmaxf(max[row], scratch->max[first + row]);
  }
  exponentiate(format, scratch, count, batch->scale, max, total);
  for (int row = 0; row < ROWS; row++) {
    long query = first + row;
    if (!is_first_block) {
      float correction = exp2f(scratch->max[query] - max[row]);
      float *sums = scratch->sums + query * batch->width;
      for (long place = 0; place < batch->width; place++) sums[place] *= correction;
      total[row] += scratch->total[query] * correction;
    }
    scratch->max[query] = max[row];
    scratch->total[query] = total[row];
  }
}

/* Mask all of `count` keys except those from `from` to `to` for the first row, and one key further
 * for each row after it. */
static void mask_keys(Scratch *scratch, long from, long to, long count) {
  for (long row = 0; row < ROWS; row++, from++, to++) {
    float *scores = scratch->scores[row];
    for (long key = 0; key < min_long(from, count); key++) scores[key] = -INFINITY;
    for (long key = max_long(to, 0); key < count; key++) scores[key] = -INFINITY;
  }
}

/* Compute the scores of the ROWS rows of `scratch->query` with `count` keys from `from` on. */
ALWAYS_INLINE void multiply_keys(
    const Format format, const Batch *batch, Scratch *scratch, long from, long count) {
  for (long key = 0; key < count; key += TILE)
    multiply(format, min_long(count - key, TILE), (Tile){
        .left = scratch->query[0],
        .left_stride = MAX_WIDTH,
        .right = scratch->keys + (from + key) * batch->words,
        .right_step = TILE,
        .half = STRIP * rows_at_once(format),
        .words = batch->words,
        .sums = (Word *)scratch->scores[0] + key,
        .sums_stride = MAX_KEYS,
    });
}

/* Sum the values with the weights of ROWS rows, which are queries from `first` on. */
ALWAYS_INLINE void multiply_values(
    const Format format, const Batch *batch, Scratch *scratch, long first, long from, long count,
    int add) {
  for (long place = 0; place < batch->width; place += TILE)
    multiply(format, min_long(batch->width - place, TILE), (Tile){
        .left = scratch->weights[0],
        .left_stride = BLOCK,
        .right = scratch->values + place * batch->block + from / numbers_of_word(format) * TILE,
        .right_step = TILE,
        .half = STRIP * rows_at_once(format),
        .words = ceil_div(count, numbers_of_word(format)),
        .sums = (Word *)scratch->sums + first * batch->width + place,
        .sums_stride = batch->width,
        .add = add,
    });
}

/* Attend with ROWS queries from `first` on to the packed block of `keys` keys behind `before` others. */
ALWAYS_INLINE void attend_rows(
    const Format format, const Batch *batch, const Task *task, Scratch *scratch, long first,
    long before, long keys) {
  const long own = task->own + first; /* the key of the first row */
  const long first_seen = max_long(own - batch->before, 0);
  const int is_first_block = first_seen >= before;
  /* The keys of the block that any row attends to, from the start of a panel on. */
  const long from = max_long(first_seen - before, 0) / TILE * TILE;
  const long count = min_long(own + ROWS + batch->after - before, keys) - from;
  if (count <= 0) return;
  for (int row = 0; row < ROWS; row++) /* rows behind the last query repeat it */
    memcpy(
        scratch->query[row],
        task->query + min_long(first + row, task->queries - 1) * batch->query_strides.token,
        sizeof(Word) * (size_t)batch->words);
  multiply_keys(format, batch, scratch, from, count);
  const long start = before + from;
  mask_keys(
      scratch, own - batch->before - start, own + batch->after + 1 - start, count);
  online_softmax(format, batch, scratch, first, count, is_first_block);
  multiply_values(format, batch, scratch, first, from, count, !is_first_block);
}

ALWAYS_INLINE void write_output(
    const Format format, const Batch *batch, const Task *task, const Scratch *scratch) {
  for (long query = 0; query < task->queries; query++) {
    char *output = task->output + query * batch->output_strides.token;
    const float *sums = scratch->sums + query * batch->width;
    const Floats by = 1 / scratch->total[query];
    for (long place = 0; place < batch->width; place += LANES)
      store(format, output, place, load_floats(sums + place) * by);
  }
}

ALWAYS_INLINE void run_task(
    const Format format, const Batch *batch, const Task *task, Scratch *scratch) {
  const long block = batch->block * numbers_of_word(format), stride = batch->key_strides.token;
  for (long key = 0; key < task->keys; key += block) {
    const long keys = min_long(task->keys - key, block);
    pack_columns(
        (const Word *)(task->key + key * stride), stride / (long)sizeof(Word), keys, batch->words,
        scratch->keys, batch->words * TILE);
    pack_values(format, batch, task->value + key * stride, keys, scratch);
    pair_block(format, batch, keys, scratch);
    for (long query = 0; query < task->queries; query += ROWS)
      attend_rows(format, batch, task, scratch, query, key, keys);
  }
  write_output(format, batch, task, scratch);
}

static inline long offset_of(Strides strides, long token, long head) {
  return token * strides.token + head * strides.head;
}

static Task task_of(const Batch *batch, long sequence, long head, long first) {
  long start = batch->offsets[sequence], length = batch->offsets[sequence + 1] - start;
  long queries = min_long(length - first, batch->queries);
  long seen = max_long(first - batch->before, 0);
  long key = offset_of(batch->key_strides, start + seen, head / batch->group);
  return (Task){
      .query = batch->query + offset_of(batch->query_strides, start + first, head),
      .key = batch->key + key,
      .value = batch->value + key,
      .output = batch->output + offset_of(batch->output_strides, start + first, head),
      .own = first - seen,
      .queries = queries,
      .keys = min_long(first + queries + batch->after, length) - seen,
  };
}

/* Each thread counts all tasks, and takes the next task that no other thread has. */
ALWAYS_INLINE void run_tasks(const Format format, Batch *batch) {
  long mine = atomic_fetch_add(&batch->next, 1), index = 0;
  for (long sequence = 0; sequence < batch->sequences; sequence++) {
    long length = batch->offsets[sequence + 1] - batch->offsets[sequence];
    for (long first = 0; first < length; first += batch->queries)
      for (long head = 0; head < batch->heads; head++)
        if (index++ == mine) {
          Task task = task_of(batch, sequence, head, first);
          run_task(format, batch, &task, thread_scratch());
          mine = atomic_fetch_add(&batch->next, 1);
        }
  }
}

static void run_float32(void *work) { run_tasks(FLOAT32, work); }
static void run_bfloat16(void *work) { run_tasks(BFLOAT16, work); }

/* Strides from token to token and from head to head are in numbers, those of keys in whole words; a
 * head is contiguous. `group` query heads share one key head, and `width` is a multiple of 16, at
 * most 256. A query attends to `before` keys before its own and to `after` keys behind it; a negative
 * number means all. */
void KERNEL(attention)(
    const void *query, const void *key, const void *value, void *output, int format,
    long query_token, long query_head, long key_token, long key_head, long output_token,
    long output_head, const int64_t *offsets, long sequences, long heads, long group, long width,
    float scale, long before, long after, int threads) {
  const long bytes = (long)sizeof(Word) / numbers_of_word(format);
  assert(width % 16 == 0 && width <= MAX_WIDTH && key_token % numbers_of_word(format) == 0);
  const long parts = width > WIDTH ? 2 : 1, far = LONG_MAX / 4;
  Batch batch = {
      .query = query,
      .key = key,
      .value = value,
      .output = output,
      .query_strides = {query_token * bytes, query_head * bytes},
      .key_strides = {key_token * bytes, key_head * bytes},
      .output_strides = {output_token * bytes, output_head * bytes},
      .offsets = offsets,
      .sequences = sequences,
      .heads = heads,
      .group = group,
      .width = width,
      .words = width / numbers_of_word(format),
      .block = BLOCK / parts,
      .queries = QUERIES / parts,
      .scale = scale * LOG2_E,
      .before = before < 0 ? far : before,
      .after = after < 0 ? far : after,
  };
  double scores = 0;
  for (long sequence = 0; sequence < sequences; sequence++) {
    const double length = (double)(offsets[sequence + 1] - offsets[sequence]);
    const double seen = (double)batch.before + (double)batch.after + 1;
    scores += length * (seen < length ? seen : length);
  }
  const long cost = (long)(scores * heads * width / 8);
  on_threads(threads, cost, format == FLOAT32 ? run_float32 : run_bfloat16, &batch);
}
