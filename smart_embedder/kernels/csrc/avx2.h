/* AVX2 and FMA, and with or without AVX-VNNI. */
#ifndef AVX2_H
#define AVX2_H

#include <immintrin.h>

#include "bfloat16.h"
#include "exponent.h"

ALWAYS_INLINE Floats reciprocal(Floats x) { return (Floats)_mm256_rcp_ps((__m256)x); }

ALWAYS_INLINE float reduce_max(Floats x) {
  __m128 max = _mm_max_ps((__m128)x.lo, (__m128)x.hi);
  max = _mm_max_ps(max, _mm_movehl_ps(max, max));
  return _mm_cvtss_f32(_mm_max_ss(max, _mm_movehdup_ps(max)));
}

ALWAYS_INLINE float reduce_sum(Floats x) {
  __m128 sum = _mm_add_ps((__m128)x.lo, (__m128)x.hi);
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

ALWAYS_INLINE Words dot_bytes(Words sum, Words left, Words right) {
#ifdef __AVXVNNI__
  return (Words)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)left, (__m256i)right);
#else
  /* Pairs are summed in 16 bits, which holds 2 x 255 x 63: weights have 7 bits here. */
  __m256i pairs = _mm256_maddubs_epi16((__m256i)left, (__m256i)right);
  return sum + (Words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

ALWAYS_INLINE Words load_words_up_to(const void *from, long count) {
  const Ints within = lane_numbers() < (Ints)(int)min_long(count, LANES);
  return (Words)_mm256_maskload_epi32(from, (__m256i)within);
}

ALWAYS_INLINE void transpose(Words rows[LANES]) {
  __m256i row[LANES], part[LANES];
  for (int i = 0; i < LANES; i++) row[i] = (__m256i)rows[i];
  for (int i = 0; i < LANES; i += 2) {
    part[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
    part[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    row[i] = _mm256_unpacklo_epi64(part[i], part[i + 2]);
    row[i + 1] = _mm256_unpackhi_epi64(part[i], part[i + 2]);
    row[i + 2] = _mm256_unpacklo_epi64(part[i + 1], part[i + 3]);
    row[i + 3] = _mm256_unpackhi_epi64(part[i + 1], part[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = (Words)_mm256_permute2x128_si256(row[i], row[i + 4], 0x20);
    rows[i + 4] = (Words)_mm256_permute2x128_si256(row[i], row[i + 4], 0x31);
  }
}

#endif
