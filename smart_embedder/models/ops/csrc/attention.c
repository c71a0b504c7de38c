/* Attention within each sequence of a packed batch, in float32 or bfloat16, with sums in float32.
 *
 * As in FlashAttention (Dao et al. 2022), scores never leave the cache. A task is a few hundred
 * queries of one head. For each block of keys, packed for the processor's instruction, six queries at
 * a time are multiplied with the keys, go through an online softmax, and multiply the values. */
#include <assert.h>
#include <math.h>

#include "kernels.h"
#include "threads.h"
#include "tile.h"

enum {
  BLOCK = 256,         /* words of keys: with their values 128 KiB in bfloat16, 64 numbers wide */
  MAX_KEYS = 2 * BLOCK,
  QUERIES = 512,       /* of a task */
  MAX_WIDTH = 128,     /* of a head; also a multiple of 16 */
};

/* In bytes. */
typedef struct {
  long token, head;
} Strides;

typedef struct {
  const char *query, *key, *value;
  char *output;
  Strides query_strides, key_strides, output_strides; /* those of the values are the keys' */
  const int64_t *offsets;            /* where sequences begin, and where the last one ends */
  long sequences, heads, group;      /* group: query heads for each key head */
  long width, words;                 /* of a head, in numbers and in words */
  float scale; /* of the scores, to base 2 */
  int causal;
  atomic_long next;
} Batch;

/* Queries of one head of one sequence, from its query `first` on, and the keys that they see. */
typedef struct {
  const char *query, *key, *value;
  char *output;
  long first, queries, keys;
} Task;

/* Memory of one thread. */
typedef struct {
  Word keys[BLOCK * MAX_WIDTH];   /* panels of TILE keys, as wide as a head */
  Word values[BLOCK * MAX_WIDTH]; /* panels of TILE numbers, BLOCK words deep */
  float scores[ROWS][MAX_KEYS];
  Word weights[ROWS][BLOCK];
  Word query[ROWS][MAX_WIDTH];
  float sums[QUERIES + ROWS][MAX_WIDTH];
  float max[QUERIES + ROWS], total[QUERIES + ROWS]; /* of the softmax */
} Scratch;
static_assert(sizeof(Scratch) <= SCRATCH_BYTES, "a thread has less memory");

/* A tile of ROWS rows and of `columns` columns, rounded up to registers. */
ALWAYS_INLINE void multiply(const Format format, long columns, const Tile tile) {
  switch (ceil_div(columns, LANES)) {
    case 1: multiply_tile(format, ROWS, 1, tile); return;
    case 2: multiply_tile(format, ROWS, 2, tile); return;
    case 3: multiply_tile(format, ROWS, REGISTERS < 3 ? REGISTERS : 3, tile); return;
    default: multiply_tile(format, ROWS, REGISTERS, tile);
  }
}

/* In bfloat16 the values of two tokens are interleaved; the last one may stand with zeros. */
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
      Word *panel = scratch->values + place / TILE * BLOCK * TILE;
      store_words(panel + first / tokens * TILE + place % TILE, words);
    }
}

/* As matrix instructions take the packed block of `count` keys. */
ALWAYS_INLINE void pair_block(
    const Format format, const Batch *batch, long count, Scratch *scratch) {
  if (rows_at_once(format) == 1) return;
  pair_words(scratch->keys, ceil_div(count, TILE) * batch->words);
  for (long place = 0; place < batch->width; place += TILE)
    pair_words(scratch->values + place * BLOCK, ceil_div(count, numbers_of_word(format)));
}

/* The maximum score of each row. All rows at once: one after the other they would wait. */
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

/* 2 to the power of each score less its row's maximum, and the total of each row. */
ALWAYS_INLINE void exponentiate(
    const Format format, Scratch *scratch, long count, float scale, const float max[ROWS],
    float total[ROWS]) {
  Floats sum[ROWS], shift[ROWS];
  for (int row = 0; row < ROWS; row++) {
    sum[row] = 0;
    shift[row] = -max[row];
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

/* The softmax of ROWS queries; what earlier blocks of keys gave is scaled to the new maximum. */
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
      float *sums = scratch->sums[query];
      for (long place = 0; place < batch->width; place++) sums[place] *= correction;
      total[row] += scratch->total[query] * correction;
    }
    scratch->max[query] = max[row];
    scratch->total[query] = total[row];
  }
}

/* Of `keys` keys the first row sees `seen` and each row after it one more. */
static void mask_later_keys(Scratch *scratch, long seen, long keys) {
  for (long row = 0; row < ROWS; row++)
    for (long key = seen + row < 0 ? 0 : seen + row; key < keys; key++)
      scratch->scores[row][key] = -INFINITY;
}

/* The scores of the ROWS rows of `scratch->query`. */
ALWAYS_INLINE void multiply_keys(
    const Format format, const Batch *batch, Scratch *scratch, long keys) {
  for (long key = 0; key < keys; key += TILE)
    multiply(format, min_long(keys - key, TILE), (Tile){
        .left = scratch->query[0],
        .left_stride = MAX_WIDTH,
        .right = scratch->keys + key * batch->words,
        .right_step = TILE,
        .half = STRIP * rows_at_once(format),
        .words = batch->words,
        .sums = (Word *)scratch->scores[0] + key,
        .sums_stride = MAX_KEYS,
    });
}

/* The sums of the values by the weights of ROWS rows, which are queries from `first` on. */
ALWAYS_INLINE void multiply_values(
    const Format format, const Batch *batch, Scratch *scratch, long first, long keys, int add) {
  for (long place = 0; place < batch->width; place += TILE)
    multiply(format, min_long(batch->width - place, TILE), (Tile){
        .left = scratch->weights[0],
        .left_stride = BLOCK,
        .right = scratch->values + place * BLOCK,
        .right_step = TILE,
        .half = STRIP * rows_at_once(format),
        .words = ceil_div(keys, numbers_of_word(format)),
        .sums = (Word *)scratch->sums[first] + place,
        .sums_stride = MAX_WIDTH,
        .add = add,
    });
}

/* ROWS queries from `first` on with the packed block of keys, which has `before` keys before it. */
ALWAYS_INLINE void attend_rows(
    const Format format, const Batch *batch, const Task *task, Scratch *scratch, long first,
    long before, long keys) {
  const int is_first_block = before == 0;
  const long seen = task->first + first + 1 - before; /* of the block, by the first row */
  if (batch->causal) keys = min_long(keys, seen + ROWS - 1);
  if (keys <= 0) return;
  for (int row = 0; row < ROWS; row++) /* the last one stands for those behind it */
    memcpy(
        scratch->query[row],
        task->query + min_long(first + row, task->queries - 1) * batch->query_strides.token,
        sizeof(Word) * (size_t)batch->words);
  multiply_keys(format, batch, scratch, keys);
  if (batch->causal) mask_later_keys(scratch, seen, keys);
  online_softmax(format, batch, scratch, first, keys, is_first_block);
  multiply_values(format, batch, scratch, first, keys, !is_first_block);
}

ALWAYS_INLINE void write_output(
    const Format format, const Batch *batch, const Task *task, const Scratch *scratch) {
  for (long query = 0; query < task->queries; query++) {
    char *output = task->output + query * batch->output_strides.token;
    const Floats by = 1 / scratch->total[query];
    for (long place = 0; place < batch->width; place += LANES)
      store(format, output, place, load_floats(scratch->sums[query] + place) * by);
  }
}

ALWAYS_INLINE void run_task(
    const Format format, const Batch *batch, const Task *task, Scratch *scratch) {
  const long block = BLOCK * numbers_of_word(format), stride = batch->key_strides.token;
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
  long queries = min_long(length - first, QUERIES);
  long key = offset_of(batch->key_strides, start, head / batch->group);
  return (Task){
      .query = batch->query + offset_of(batch->query_strides, start + first, head),
      .key = batch->key + key,
      .value = batch->value + key,
      .output = batch->output + offset_of(batch->output_strides, start + first, head),
      .first = first,
      .queries = queries,
      .keys = batch->causal ? first + queries : length,
  };
}

/* Every thread counts all tasks, and takes the next that no other has. */
ALWAYS_INLINE void run_tasks(const Format format, Batch *batch) {
  long mine = atomic_fetch_add(&batch->next, 1), index = 0;
  for (long sequence = 0; sequence < batch->sequences; sequence++) {
    long length = batch->offsets[sequence + 1] - batch->offsets[sequence];
    for (long first = 0; first < length; first += QUERIES)
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

/* Strides from token to token and from head to head are in numbers, those of keys a whole number of
 * words; a head is contiguous. `group` heads of the query share one of the keys, `width` is a
 * multiple of 16, at most 128. */
void KERNEL(attention)(
    const void *query, const void *key, const void *value, void *output, int format,
    long query_token, long query_head, long key_token, long key_head, long output_token,
    long output_head, const int64_t *offsets, long sequences, long heads, long group, long width,
    float scale, int causal, int threads) {
  const long bytes = (long)sizeof(Word) / numbers_of_word(format);
  assert(width % 16 == 0 && width <= MAX_WIDTH && key_token % numbers_of_word(format) == 0);
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
      .scale = scale * LOG2_E,
      .causal = causal,
  };
  double scores = 0;
  for (long sequence = 0; sequence < sequences; sequence++) {
    const double length = (double)(offsets[sequence + 1] - offsets[sequence]);
    scores += length * length;
  }
  const long cost = (long)(scores * heads * width / 8);
  on_threads(threads, cost, format == FLOAT32 ? run_float32 : run_bfloat16, &batch);
}
