/* bfloat16: the upper half of a float. */
#ifndef BFLOAT16_H
#define BFLOAT16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bfloat16;

static inline float widen(bfloat16 number) {
  uint32_t bits = (uint32_t)number << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

/* To the nearest, ties to even; NaN stays NaN. */
static inline bfloat16 narrow(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bfloat16)(number == number ? rounded : 0x7fc0);
}

#endif
