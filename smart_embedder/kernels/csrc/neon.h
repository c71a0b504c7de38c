/* NEON with dot products of bytes, and with or without the matrix instructions (bf16, i8mm). */
#ifndef NEON_H
#define NEON_H

#include <arm_neon.h>

#include "exponent.h"

ALWAYS_INLINE Floats reciprocal(Floats x) {
  const float32x4_t estimate = vrecpeq_f32((float32x4_t)x); /* to 8 bits */
  return (Floats)(estimate * vrecpsq_f32((float32x4_t)x, estimate));
}

ALWAYS_INLINE float reduce_max(Floats x) { return vmaxvq_f32((float32x4_t)x); }
ALWAYS_INLINE float reduce_sum(Floats x) { return vaddvq_f32((float32x4_t)x); }

#ifdef __ARM_FEATURE_MATMUL_INT8
ALWAYS_INLINE Halves narrow(Floats x) {
  return (Halves)vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x));
}

ALWAYS_INLINE Words dot_bfloat16(Words sum, Words left, Words right) {
  return (Words)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)left, (bfloat16x8_t)right);
}

ALWAYS_INLINE Words dot_bytes(Words sum, Words left, Words right) {
  return (Words)vusmmlaq_s32((int32x4_t)sum, (uint8x16_t)left, (int8x16_t)right);
}
#else
#include "bfloat16.h"

/* Both sides are signed here: subtracts 128 from the left one, and adds 128 times the right one. */
ALWAYS_INLINE Words dot_bytes(Words sum, Words left, Words right) {
  const int8x16_t columns = (int8x16_t)right;
  const int32x4_t missing = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), columns);
  return (Words)vdotq_s32((int32x4_t)sum, (int8x16_t)(left ^ 0x80808080), columns) - (Words)missing;
}
#endif

ALWAYS_INLINE Words load_words_up_to(const Word *from, long count) {
  Words words = 0;
  for (int lane = 0; lane < LANES; lane++)
    if (lane < count) words[lane] = from[lane];
  return words;
}

ALWAYS_INLINE void transpose(Words rows[LANES]) {
  Words part[LANES];
  for (int i = 0; i < 2; i++) {
    part[i] = (Words)vzip1q_u32((uint32x4_t)rows[i], (uint32x4_t)rows[i + 2]);
    part[i + 2] = (Words)vzip2q_u32((uint32x4_t)rows[i], (uint32x4_t)rows[i + 2]);
  }
  for (int i = 0; i < LANES; i += 2) {
    rows[i] = (Words)vzip1q_u32((uint32x4_t)part[i], (uint32x4_t)part[i + 1]);
    rows[i + 1] = (Words)vzip2q_u32((uint32x4_t)part[i], (uint32x4_t)part[i + 1]);
  }
}

#endif
