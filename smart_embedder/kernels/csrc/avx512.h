/* AVX-512 with VNNI, and with or without BF16. */
#ifndef AVX512_H
#define AVX512_H

#include <immintrin.h>

ALWAYS_INLINE Floats scale(Floats x, Floats power) {
  return (Floats)_mm512_scalef_ps((__m512)x, (__m512)power);
}

ALWAYS_INLINE Floats reciprocal(Floats x) { return (Floats)_mm512_rcp14_ps((__m512)x); }

ALWAYS_INLINE float reduce_max(Floats x) { return _mm512_reduce_max_ps((__m512)x); }
ALWAYS_INLINE float reduce_sum(Floats x) { return _mm512_reduce_add_ps((__m512)x); }

ALWAYS_INLINE Words dot_bytes(Words sum, Words left, Words right) {
  return (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
}

#ifdef __AVX512BF16__
ALWAYS_INLINE Halves narrow(Floats x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }

ALWAYS_INLINE Words dot_bfloat16(Words sum, Words left, Words right) {
  return (Words)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}
#else
#include "bfloat16.h"
#endif

ALWAYS_INLINE Words load_words_up_to(const void *from, long count) {
  const __mmask16 within = (__mmask16)(count < LANES ? (1u << (count < 0 ? 0 : count)) - 1 : 0xffff);
  return (Words)_mm512_maskz_loadu_epi32(within, from);
}

ALWAYS_INLINE void transpose(Words rows[LANES]) {
  __m512i row[LANES], part[LANES];
  for (int i = 0; i < LANES; i++) row[i] = (__m512i)rows[i];
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
    rows[i] = (Words)_mm512_shuffle_i32x4(part[i], part[i + 8], 0x88);
    rows[i + 8] = (Words)_mm512_shuffle_i32x4(part[i], part[i + 8], 0xdd);
  }
}

#endif
