/* Attention within each sequence of a packed batch, in bfloat16, with sums in float32.
 *
 * As in FlashAttention (Dao et al. 2022), scores never leave the cache. A task is a few hundred
 * queries of one head. For each block of keys, packed for the processor's instruction, six queries at
 * a time are multiplied with the keys, go through an online softmax, and multiply the values. */
#include <math.h>
#include <stdatomic.h>

#include "bfloat16.h"
#include "exp2.h"
#include "threads.h"
#include "tile.h"

enum {
  KEYS = 512,      /* of a block: with their values 128 KiB where a head is 64 wide */
  QUERIES = 512,   /* of a task */
  MAX_WIDTH = 128, /* of a head; also a multiple of LANES */
};

/* In numbers. */
typedef struct {
  long token, head;
} Strides;

typedef struct {
  const bfloat16 *query, *key, *value;
  bfloat16 *output;
  Strides query_strides, key_strides, output_strides; /* those of the values are the keys' */
  const int64_t *offsets;            /* where sequences begin, and where the last one ends */
  long sequences, heads, group;      /* group: query heads for each key head */
  long width;
  float scale; /* of the scores, to base 2 */
  int causal;
  atomic_long next;
} Batch;

/* Queries of one head of one sequence, from its query `first` on, and the keys that they see. */
typedef struct {
  const bfloat16 *query, *key, *value;
  bfloat16 *output;
  long first, queries, keys;
} Task;

/* Memory of one thread. */
typedef struct {
  _Alignas(64) Word keys[KEYS / TILE][MAX_WIDTH / 2][TILE];
  Word values[MAX_WIDTH / TILE][KEYS / 2][TILE];
  float scores[ROWS][KEYS];
  bfloat16 weights[ROWS][KEYS];
  bfloat16 query[ROWS][MAX_WIDTH];
  float sums[QUERIES + ROWS][MAX_WIDTH];
  float max[QUERIES + ROWS], total[QUERIES + ROWS]; /* of the softmax */
} Scratch;

/* ROWS rows of `left`, `pairs` pairs wide, times `columns` columns, rounded up to registers. */
static void multiply(
    long columns, long pairs, const bfloat16 *left, long left_stride, const Word *right,
    float *product, long product_stride, int add) {
#define MULTIPLY(REGISTERS)                                                                      \
  multiply_tile(                                                                                 \
      ROWS, REGISTERS, 0, pairs, left, left_stride / 2, right, product, product_stride, add);          \
  break
  switch (ceil_div(columns, LANES)) {
    case 1: MULTIPLY(1);
    case 2: MULTIPLY(2);
    case 3: MULTIPLY(3);
    default: MULTIPLY(4);
  }
}

/* Sixteen rows of sixteen pairs. */
static inline void transpose(__m512i row[LANES]) {
  __m512i part[LANES];
  for (int i = 0; i < LANES; i += 2) {
    part[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    part[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    row[i] = _mm512_unpacklo_epi64(part[i], part[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(part[i], part[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(part[i + 1], part[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(part[i + 1], part[i + 3]);
  }
  for (int i = 0; i < 4; i++)
    for (int half = 0; half < LANES; half += 8) {
      part[half + i] = _mm512_shuffle_i32x4(row[half + i], row[half + i + 4], 0x88);
      part[half + i + 4] = _mm512_shuffle_i32x4(row[half + i], row[half + i + 4], 0xdd);
    }
  for (int i = 0; i < 8; i++) {
    row[i] = _mm512_shuffle_i32x4(part[i], part[i + 8], 0x88);
    row[i + 8] = _mm512_shuffle_i32x4(part[i], part[i + 8], 0xdd);
  }
}

/* Transpose the keys; what fills the last register up is zero. */
static void pack_keys(const Batch *batch, const bfloat16 *key, long count, Scratch *scratch) {
  for (long first = 0; first < count; first += LANES)
    for (long place = 0; place < batch->width; place += 2 * LANES) {
      long pairs = min_long(batch->width - place, 2 * LANES) / 2;
      __mmask16 within = (__mmask16)((1u << pairs) - 1);
      __m512i rows[LANES];
      for (long i = 0; i < LANES; i++)
        rows[i] = _mm512_maskz_loadu_epi32(
            first + i < count ? within : 0, key + (first + i) * batch->key_strides.token + place);
      transpose(rows);
      for (long i = 0; i < pairs; i++)
        _mm512_storeu_si512(&scratch->keys[first / TILE][place / 2 + i][first % TILE], rows[i]);
    }
}

static inline __m512i load_wide(const bfloat16 *numbers) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)numbers));
}

/* Interleave the values of two tokens; the last one may stand with zeros. */
static void pack_values(const Batch *batch, const bfloat16 *value, long count, Scratch *scratch) {
  for (long first = 0; first < count; first += 2)
    for (long place = 0; place < batch->width; place += LANES) {
      const bfloat16 *upper = value + first * batch->key_strides.token + place;
      __m512i lower =
          first + 1 < count ? load_wide(upper + batch->key_strides.token) : _mm512_setzero_si512();
      __m512i pairs = _mm512_or_si512(load_wide(upper), _mm512_slli_epi32(lower, 16));
      _mm512_storeu_si512(&scratch->values[place / TILE][first / 2][place % TILE], pairs);
    }
}

/* The maximum score of each row. All rows at once: one after the other they would wait. */
static void find_max(Scratch *scratch, long count, float max[ROWS]) {
  const __m512 none = _mm512_set1_ps(-INFINITY);
  const long last = (count - 1) / LANES * LANES;
  const __mmask16 within = (__mmask16)(0xffffu >> (LANES - (count - last)));
  __m512 found[ROWS];
  for (int row = 0; row < ROWS; row++) {
    float *end = scratch->scores[row] + last;
    found[row] = _mm512_mask_blend_ps(within, none, _mm512_loadu_ps(end));
    _mm512_storeu_ps(end, found[row]);
  }
  for (long key = 0; key < last; key += LANES)
    for (int row = 0; row < ROWS; row++)
      found[row] = _mm512_max_ps(_mm512_loadu_ps(scratch->scores[row] + key), found[row]);
  for (int row = 0; row < ROWS; row++) max[row] = _mm512_reduce_max_ps(found[row]);
}

/* 2 to the power of each score less its row's maximum, and the total of each row. */
static void exponentiate(
    Scratch *scratch, long count, float scale, const float max[ROWS], float total[ROWS]) {
  const __m512 by = _mm512_set1_ps(scale);
  __m512 sum[ROWS], shift[ROWS];
  for (int row = 0; row < ROWS; row++) {
    sum[row] = _mm512_setzero_ps();
    shift[row] = _mm512_set1_ps(-max[row]);
  }
  for (long key = 0; key < count; key += LANES)
    for (int row = 0; row < ROWS; row++) {
      __m512 score = _mm512_loadu_ps(scratch->scores[row] + key);
      __m512 weight = exp2_ps(_mm512_fmadd_ps(score, by, shift[row]));
      sum[row] = _mm512_add_ps(sum[row], weight);
      _mm256_storeu_si256(
          (__m256i *)(scratch->weights[row] + key), (__m256i)_mm512_cvtneps_pbh(weight));
    }
  for (int row = 0; row < ROWS; row++) total[row] = _mm512_reduce_add_ps(sum[row]);
}

/* The softmax of ROWS queries; what earlier blocks of keys gave is scaled to the new maximum. */
static void online_softmax(
    const Batch *batch, Scratch *scratch, long first, long count, int is_first_block) {
  float max[ROWS], total[ROWS];
  find_max(scratch, count, max);
  for (int row = 0; row < ROWS; row++) {
    max[row] *= batch->scale;
    if (!is_first_block) max[row] = fmaxf(max[row], scratch->max[first + row]);
  }
  exponentiate(scratch, count, batch->scale, max, total);
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

/* ROWS queries from `first` on with the packed block of keys, which has `before` keys before it. */
static void attend_rows(
    const Batch *batch, const Task *task, Scratch *scratch, long first, long before, long keys) {
  const int is_first_block = before == 0;
  const long seen = task->first + first + 1 - before; /* of the block, by the first row */
  if (batch->causal) keys = min_long(keys, seen + ROWS - 1);
  if (keys <= 0) return;
  for (int row = 0; row < ROWS; row++) /* the last one stands for those behind it */
    memcpy(
        scratch->query[row],
        task->query + min_long(first + row, task->queries - 1) * batch->query_strides.token,
        sizeof(bfloat16) * (size_t)batch->width);
  for (long key = 0; key < keys; key += TILE)
    multiply(
        min_long(keys - key, TILE), batch->width / 2, scratch->query[0], MAX_WIDTH,
        scratch->keys[key / TILE][0], scratch->scores[0] + key, KEYS, 0);
  if (batch->causal) mask_later_keys(scratch, seen, keys);
  online_softmax(batch, scratch, first, keys, is_first_block);
  for (long place = 0; place < batch->width; place += TILE)
    multiply(
        min_long(batch->width - place, TILE), ceil_div(keys, 2), scratch->weights[0], KEYS,
        scratch->values[place / TILE][0], scratch->sums[first] + place, MAX_WIDTH, !is_first_block);
}

static void write_output(const Batch *batch, const Task *task, const Scratch *scratch) {
  for (long query = 0; query < task->queries; query++) {
    bfloat16 *output = task->output + query * batch->output_strides.token;
    __m512 by = _mm512_set1_ps(1 / scratch->total[query]);
    for (long place = 0; place < batch->width; place += LANES) {
      __m512 mean = _mm512_mul_ps(_mm512_loadu_ps(scratch->sums[query] + place), by);
      _mm256_storeu_si256((__m256i *)(output + place), (__m256i)_mm512_cvtneps_pbh(mean));
    }
  }
}

static void run_task(const Batch *batch, const Task *task, Scratch *scratch) {
  for (long key = 0; key < task->keys; key += KEYS) {
    long keys = min_long(task->keys - key, KEYS);
    pack_keys(batch, task->key + key * batch->key_strides.token, keys, scratch);
    pack_values(batch, task->value + key * batch->key_strides.token, keys, scratch);
    for (long query = 0; query < task->queries; query += ROWS)
      attend_rows(batch, task, scratch, query, key, keys);
  }
  write_output(batch, task, scratch);
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
static void run_tasks(void *work) {
  static _Thread_local Scratch scratch;
  Batch *batch = work;
  long mine = atomic_fetch_add(&batch->next, 1), index = 0;
  for (long sequence = 0; sequence < batch->sequences; sequence++) {
    long length = batch->offsets[sequence + 1] - batch->offsets[sequence];
    for (long first = 0; first < length; first += QUERIES)
      for (long head = 0; head < batch->heads; head++)
        if (index++ == mine) {
          Task task = task_of(batch, sequence, head, first);
          run_task(batch, &task, &scratch);
          mine = atomic_fetch_add(&batch->next, 1);
        }
  }
}

/* Strides from token to token and from head to head are in numbers; a head is contiguous. `group`
 * heads of the query share one of the keys, `width` is a multiple of 16, at most 128. */
void attention(
    const bfloat16 *query, const bfloat16 *key, const bfloat16 *value, bfloat16 *output,
    long query_token, long query_head, long key_token, long key_head, long output_token,
    long output_head, const int64_t *offsets, long sequences, long heads, long group, long width,
    float scale, int causal, int threads) {
  Batch batch = {
      .query = query,
      .key = key,
      .value = value,
      .output = output,
      .query_strides = {query_token, query_head},
      .key_strides = {key_token, key_head},
      .output_strides = {output_token, output_head},
      .offsets = offsets,
      .sequences = sequences,
      .heads = heads,
      .group = group,
      .width = width,
      .scale = scale * LOG2_E,
      .causal = causal,
  };
  on_threads(threads, run_tasks, &batch);
}
