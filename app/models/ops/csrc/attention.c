/* Attention within each sequence of a packed batch, in bfloat16, with sums in float32.
 *
 * What FlashAttention does (Dao et al. 2022): scores never leave the cache. A share of the work is
 * a few hundred queries of one head of one sequence. For one block of keys after another, laid out
 * for the processor's instruction, six queries at a time are multiplied with the keys, weighed, and
 * multiplied with the values; the sums are scaled down whenever a greater score is met.
 */
#include <math.h>
#include <stdatomic.h>

#include "bfloat16.h"
#include "power.h"
#include "threads.h"
#include "tile.h"

enum {
  KEYS = 512,    /* of a block: with their values 128 KiB where a head is 64 wide */
  QUERIES = 512, /* of a share of the work */
  WIDEST = 128,  /* a head; also a multiple of LANES */
};

/* From one to the next, in numbers. */
typedef struct {
  long token, head;
} Steps;

typedef struct {
  const bfloat16 *query, *key, *value;
  bfloat16 *output;
  Steps of_query, of_key, of_output; /* those of the values are of_key */
  const int64_t *offsets;            /* where sequences begin; one more for the end */
  long sequences, heads, group;      /* group: heads that read the same keys */
  long width;
  float scale; /* of scores, which are powers of two */
  int causal;  /* whether a query sees no key behind it */
  atomic_long next;
} Batch;

/* What a thread works on: queries of one head of one sequence, from its `first` on, and the keys
 * that they see. */
typedef struct {
  const bfloat16 *query, *key, *value;
  bfloat16 *output;
  long first, queries, keys;
} Share;

/* A thread's own memory. */
typedef struct {
  _Alignas(64) Word keys[KEYS / TILE][WIDEST / 2][TILE];
  Word values[WIDEST / TILE][KEYS / 2][TILE];
  float scores[ROWS][KEYS];
  bfloat16 weights[ROWS][KEYS];
  bfloat16 query[ROWS][WIDEST];
  float sums[QUERIES + ROWS][WIDEST];
  float highest[QUERIES + ROWS], total[QUERIES + ROWS];
} Room;

/* ROWS rows of `left`, `pairs` pairs wide, times `columns` columns, rounded up to registers. */
static void multiply(
    long columns, long pairs, const bfloat16 *left, long left_row, const Word *right,
    float *product, long product_row, int add) {
#define MULTIPLY(REGISTERS)                                                                      \
  multiply_tile(                                                                                 \
      ROWS, REGISTERS, 0, pairs, left, left_row / 2, right, product, product_row, add);          \
  break
  switch (whole(columns, LANES)) {
    case 1: MULTIPLY(1);
    case 2: MULTIPLY(2);
    case 3: MULTIPLY(3);
    default: MULTIPLY(4);
  }
}

/* Sixteen rows of sixteen pairs: rows become columns. */
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

/* Keys become columns; what fills the last register up is zero. */
static void lay_out_keys(const Batch *batch, const bfloat16 *key, long count, Room *room) {
  for (long first = 0; first < count; first += LANES)
    for (long place = 0; place < batch->width; place += 2 * LANES) {
      long pairs = smaller(batch->width - place, 2 * LANES) / 2;
      __mmask16 within = (__mmask16)((1u << pairs) - 1);
      __m512i rows[LANES];
      for (long i = 0; i < LANES; i++)
        rows[i] = _mm512_maskz_loadu_epi32(
            first + i < count ? within : 0, key + (first + i) * batch->of_key.token + place);
      transpose(rows);
      for (long i = 0; i < pairs; i++)
        _mm512_storeu_si512(&room->keys[first / TILE][place / 2 + i][first % TILE], rows[i]);
    }
}

static inline __m512i load_wide(const bfloat16 *numbers) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)numbers));
}

/* Values are columns already: two neighbours become pairs, the last one perhaps with zeros. */
static void lay_out_values(const Batch *batch, const bfloat16 *value, long count, Room *room) {
  for (long first = 0; first < count; first += 2)
    for (long place = 0; place < batch->width; place += LANES) {
      const bfloat16 *upper = value + first * batch->of_key.token + place;
      __m512i lower =
          first + 1 < count ? load_wide(upper + batch->of_key.token) : _mm512_setzero_si512();
      __m512i pairs = _mm512_or_si512(load_wide(upper), _mm512_slli_epi32(lower, 16));
      _mm512_storeu_si512(&room->values[place / TILE][first / 2][place % TILE], pairs);
    }
}

/* The highest score of each row. All rows at a time: one after the other they would wait. */
static void find_highest(Room *room, long count, float highest[ROWS]) {
  const __m512 none = _mm512_set1_ps(-INFINITY);
  const long last = (count - 1) / LANES * LANES;
  const __mmask16 within = (__mmask16)(0xffffu >> (LANES - (count - last)));
  __m512 found[ROWS];
  for (int row = 0; row < ROWS; row++) {
    float *end = room->scores[row] + last;
    found[row] = _mm512_mask_blend_ps(within, none, _mm512_loadu_ps(end));
    _mm512_storeu_ps(end, found[row]);
  }
  for (long key = 0; key < last; key += LANES)
    for (int row = 0; row < ROWS; row++)
      found[row] = _mm512_max_ps(_mm512_loadu_ps(room->scores[row] + key), found[row]);
  for (int row = 0; row < ROWS; row++) highest[row] = _mm512_reduce_max_ps(found[row]);
}

/* The weights of each row's scores relative to its highest, and their total. */
static void weigh(Room *room, long count, float scale, const float highest[ROWS], float total[ROWS]) {
  const __m512 by = _mm512_set1_ps(scale);
  __m512 sum[ROWS], shift[ROWS];
  for (int row = 0; row < ROWS; row++) {
    sum[row] = _mm512_setzero_ps();
    shift[row] = _mm512_set1_ps(-highest[row]);
  }
  for (long key = 0; key < count; key += LANES)
    for (int row = 0; row < ROWS; row++) {
      __m512 score = _mm512_loadu_ps(room->scores[row] + key);
      __m512 weight = power_of_two(_mm512_fmadd_ps(score, by, shift[row]));
      sum[row] = _mm512_add_ps(sum[row], weight);
      _mm256_storeu_si256(
          (__m256i *)(room->weights[row] + key), (__m256i)_mm512_cvtneps_pbh(weight));
    }
  for (int row = 0; row < ROWS; row++) total[row] = _mm512_reduce_add_ps(sum[row]);
}

/* Weigh the scores of ROWS queries, and scale down what earlier blocks of keys gave. */
static void weigh_rows(const Batch *batch, Room *room, long first, long count, int is_first_block) {
  float highest[ROWS], total[ROWS];
  find_highest(room, count, highest);
  for (int row = 0; row < ROWS; row++) {
    highest[row] *= batch->scale;
    if (!is_first_block) highest[row] = fmaxf(highest[row], room->highest[first + row]);
  }
  weigh(room, count, batch->scale, highest, total);
  for (int row = 0; row < ROWS; row++) {
    long query = first + row;
    if (!is_first_block) {
      float shrunk = exp2f(room->highest[query] - highest[row]);
      for (long place = 0; place < batch->width; place++) room->sums[query][place] *= shrunk;
      total[row] += room->total[query] * shrunk;
    }
    room->highest[query] = highest[row];
    room->total[query] = total[row];
  }
}

/* Of `keys` keys the first row sees `seen` and each row after it one more. */
static void hide_later_keys(Room *room, long seen, long keys) {
  for (long row = 0; row < ROWS; row++)
    for (long key = seen + row < 0 ? 0 : seen + row; key < keys; key++)
      room->scores[row][key] = -INFINITY;
}

/* ROWS queries from `first` on with the block of keys that is laid out, `before` keys behind the
 * first one of the sequence. */
static void attend_rows(
    const Batch *batch, const Share *share, Room *room, long first, long before, long keys) {
  const int is_first_block = before == 0;
  const long seen = share->first + first + 1 - before; /* of the block, by the first row */
  if (batch->causal) keys = smaller(keys, seen + ROWS - 1);
  if (keys <= 0) return;
  for (int row = 0; row < ROWS; row++) /* behind the last query it stands again */
    memcpy(
        room->query[row],
        share->query + smaller(first + row, share->queries - 1) * batch->of_query.token,
        sizeof(bfloat16) * (size_t)batch->width);
  for (long key = 0; key < keys; key += TILE)
    multiply(
        smaller(keys - key, TILE), batch->width / 2, room->query[0], WIDEST,
        room->keys[key / TILE][0], room->scores[0] + key, KEYS, 0);
  if (batch->causal) hide_later_keys(room, seen, keys);
  weigh_rows(batch, room, first, keys, is_first_block);
  for (long place = 0; place < batch->width; place += TILE)
    multiply(
        smaller(batch->width - place, TILE), whole(keys, 2), room->weights[0], KEYS,
        room->values[place / TILE][0], room->sums[first] + place, WIDEST, !is_first_block);
}

static void write_output(const Batch *batch, const Share *share, const Room *room) {
  for (long query = 0; query < share->queries; query++) {
    bfloat16 *output = share->output + query * batch->of_output.token;
    __m512 by = _mm512_set1_ps(1 / room->total[query]);
    for (long place = 0; place < batch->width; place += LANES) {
      __m512 mean = _mm512_mul_ps(_mm512_loadu_ps(room->sums[query] + place), by);
      _mm256_storeu_si256((__m256i *)(output + place), (__m256i)_mm512_cvtneps_pbh(mean));
    }
  }
}

static void attend_share(const Batch *batch, const Share *share, Room *room) {
  for (long key = 0; key < share->keys; key += KEYS) {
    long keys = smaller(share->keys - key, KEYS);
    lay_out_keys(batch, share->key + key * batch->of_key.token, keys, room);
    lay_out_values(batch, share->value + key * batch->of_key.token, keys, room);
    for (long query = 0; query < share->queries; query += ROWS)
      attend_rows(batch, share, room, query, key, keys);
  }
  write_output(batch, share, room);
}

static inline long place_of(Steps steps, long token, long head) {
  return token * steps.token + head * steps.head;
}

static Share share_of(const Batch *batch, long sequence, long head, long first) {
  long start = batch->offsets[sequence], length = batch->offsets[sequence + 1] - start;
  long queries = smaller(length - first, QUERIES);
  long key = place_of(batch->of_key, start, head / batch->group);
  return (Share){
      .query = batch->query + place_of(batch->of_query, start + first, head),
      .key = batch->key + key,
      .value = batch->value + key,
      .output = batch->output + place_of(batch->of_output, start + first, head),
      .first = first,
      .queries = queries,
      .keys = batch->causal ? first + queries : length,
  };
}

/* Every thread counts all shares, and takes the next that no other has. */
static void attend_my_shares(void *work) {
  static _Thread_local Room room;
  Batch *batch = work;
  long mine = atomic_fetch_add(&batch->next, 1), index = 0;
  for (long sequence = 0; sequence < batch->sequences; sequence++) {
    long length = batch->offsets[sequence + 1] - batch->offsets[sequence];
    for (long first = 0; first < length; first += QUERIES)
      for (long head = 0; head < batch->heads; head++)
        if (index++ == mine) {
          Share share = share_of(batch, sequence, head, first);
          attend_share(batch, &share, &room);
          mine = atomic_fetch_add(&batch->next, 1);
        }
  }
}

/* Steps from token to token and from head to head are in numbers; a head's numbers are neighbours.
 * `group` heads of the query read one of the keys, `width` is a multiple of 16, at most 128. */
void attend(
    const bfloat16 *query, const bfloat16 *key, const bfloat16 *value, bfloat16 *output,
    long query_token, long query_head, long key_token, long key_head, long output_token,
    long output_head, const int64_t *offsets, long sequences, long heads, long group, long width,
    float scale, int causal, int threads) {
  Batch batch = {
      .query = query,
      .key = key,
      .value = value,
      .output = output,
      .of_query = {query_token, query_head},
      .of_key = {key_token, key_head},
      .of_output = {output_token, output_head},
      .offsets = offsets,
      .sequences = sequences,
      .heads = heads,
      .group = group,
      .width = width,
      .scale = scale * LOG2_E,
      .causal = causal,
  };
  on_threads(threads, attend_my_shares, &batch);
}
