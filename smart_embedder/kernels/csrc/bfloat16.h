/* bfloat16 for sets without instructions for it. */
#ifndef BFLOAT16_H
#define BFLOAT16_H

ALWAYS_INLINE Halves narrow(Floats x) {
  Words bits = (Words)x;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : (Words)0x7fc0, Halves);
}

ALWAYS_INLINE Words dot_bfloat16(Words sum, Words left, Words right) {
  Floats low = fma_floats((Floats)(left << 16), (Floats)(right << 16), (Floats)sum);
  const Words upper = 0xffff0000;
  return (Words)fma_floats((Floats)(left & upper), (Floats)(right & upper), low);
}

#endif
