/* Vectors as wide as the registers of the instruction set that this is compiled for.
 *
 * Their operators are the compiler's. Operations with special instructions in some sets are in the
 * headers of the sets. A word is what a lane multiplies and adds at a time: one float, two bfloat16,
 * or four bytes (unsigned in the left matrix, signed in the right one).
 */
#ifndef VECTOR_H
#define VECTOR_H

#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))
/* Before a loop over registers: with an index unknown to the compiler they would be in memory. */
#define UNROLLED _Pragma("clang loop unroll(full)")

/* REGISTERS hold the columns of a tile (tile.h), and leave room for its other operands. */
#if defined(__AVX512F__)
enum { LANES = 16, REGISTERS = 4 };
#elif defined(__ARM_NEON)
enum { LANES = 4, REGISTERS = 4 };
#else
enum { LANES = 8, REGISTERS = 2 };
#endif

/* Rows of the left matrix that one instruction multiplies. With two, a vector holds two words of each
 * of two rows or columns, or the sums of two rows times two columns. */
#ifdef __ARM_FEATURE_MATMUL_INT8
enum { MATRIX_ROWS = 2 };
#else
enum { MATRIX_ROWS = 1 };
#endif

typedef uint32_t Word;
typedef uint16_t bfloat16; /* the upper half of a float */
typedef enum { FLOAT32, BFLOAT16, INT8 } Format;

typedef float Floats __attribute__((ext_vector_type(LANES)));
typedef int32_t Ints __attribute__((ext_vector_type(LANES)));
typedef uint32_t Words __attribute__((ext_vector_type(LANES)));
typedef uint16_t Halves __attribute__((ext_vector_type(LANES)));

static inline long min_long(long a, long b) { return a < b ? a : b; }
static inline long max_long(long a, long b) { return a > b ? a : b; }
static inline long ceil_div(long count, long by) { return (count + by - 1) / by; }

ALWAYS_INLINE long numbers_of_word(Format format) {
  return format == FLOAT32 ? 1 : format == BFLOAT16 ? 2 : 4;
}

ALWAYS_INLINE int rows_at_once(Format format) { return format == FLOAT32 ? 1 : MATRIX_ROWS; }

ALWAYS_INLINE Words load_words(const void *from) {
  Words words;
  memcpy(&words, from, sizeof words);
  return words;
}
ALWAYS_INLINE void store_words(void *to, Words words) { memcpy(to, &words, sizeof words); }
ALWAYS_INLINE Floats load_floats(const float *from) { return (Floats)load_words(from); }
ALWAYS_INLINE void store_floats(float *to, Floats floats) { store_words(to, (Words)floats); }

/* b if a or b is NaN. */
ALWAYS_INLINE Floats max_floats(Floats a, Floats b) { return a > b ? a : b; }
ALWAYS_INLINE Floats min_floats(Floats a, Floats b) { return a < b ? a : b; }
/* a b + c, rounded once. */
ALWAYS_INLINE Floats fma_floats(Floats a, Floats b, Floats c) {
  return __builtin_elementwise_fma(a, b, c);
}
ALWAYS_INLINE Ints lane_numbers(void) {
  Ints lanes;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
  return lanes;
}
ALWAYS_INLINE Floats abs_floats(Floats x) { return (Floats)((Words)x & 0x7fffffff); }

/* Each instruction set defines: narrow (to the nearest bfloat16, ties to even; NaN stays NaN), scale
 * (x times 2 to the power of a whole number; 0 for the power of -infinity), reciprocal (to 12 bits
 * at least), reduce_max, reduce_sum, dot_bfloat16, dot_bytes, load_words_up_to (zeros behind the
 * first `count`) and transpose (of LANES rows of LANES words). */
#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__ARM_NEON)
#include "neon.h"
#else
#include "avx2.h"
#endif

ALWAYS_INLINE Floats widen(Halves numbers) {
  return (Floats)(__builtin_convertvector(numbers, Words) << 16);
}

/* Load and store vectors of float or bfloat16 from the number at `index` on. */
ALWAYS_INLINE Floats load(Format format, const void *numbers, long index) {
  if (format == FLOAT32) return load_floats((const float *)numbers + index);
  Halves halves;
  memcpy(&halves, (const bfloat16 *)numbers + index, sizeof halves);
  return widen(halves);
}
ALWAYS_INLINE void store(Format format, void *numbers, long index, Floats floats) {
  if (format == FLOAT32) {
    store_floats((float *)numbers + index, floats);
  } else {
    Halves halves = narrow(floats);
    memcpy((bfloat16 *)numbers + index, &halves, sizeof halves);
  }
}

/* Add the products of each lane's words, or, with matrix instructions, those of rows and columns. */
ALWAYS_INLINE Words dot_words(Format format, Words sum, Words left, Words right) {
  switch (format) {
    case FLOAT32: return (Words)fma_floats((Floats)left, (Floats)right, (Floats)sum);
    case BFLOAT16: return dot_bfloat16(sum, left, right);
    default: return dot_bytes(sum, left, right);
  }
}

static const float LOG2_E = 1.44269504f;

/* 2 to the power of `x`, with a relative error of 2e-7; 0 for -infinity, the score of masked keys. */
ALWAYS_INLINE Floats exp2_floats(Floats x) {
  Floats nearest = __builtin_elementwise_roundeven(x);
  Floats rest = x - nearest;
  /* The Taylor series of 2^rest for -0.5 to 0.5: ln(2)^n / n!. */
  Floats power = 1.33335581e-3f;
  power = fma_floats(power, rest, 9.61812911e-3f);
  power = fma_floats(power, rest, 5.55041087e-2f);
  power = fma_floats(power, rest, 2.40226507e-1f);
  power = fma_floats(power, rest, 6.93147181e-1f);
  power = fma_floats(power, rest, 1.0f);
  return scale(power, nearest);
}

#endif
