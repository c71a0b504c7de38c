/* Read and write single numbers of either format as float; the compiler vectorises loops over them. */
#ifndef NUMBERS_H
#define NUMBERS_H

#include "vector.h"

ALWAYS_INLINE float read(Format format, const void *numbers, long index) {
  if (format == FLOAT32) return ((const float *)numbers)[index];
  uint32_t bits = (uint32_t)((const bfloat16 *)numbers)[index] << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

/* Rounds to the nearest, ties to even; NaN stays NaN. */
ALWAYS_INLINE void write(Format format, void *numbers, long index, float number) {
  if (format == FLOAT32) {
    ((float *)numbers)[index] = number;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  ((bfloat16 *)numbers)[index] = (bfloat16)(number == number ? rounded : 0x7fc0);
}

#endif
