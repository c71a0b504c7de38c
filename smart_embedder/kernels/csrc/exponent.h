/* Powers of two from the bits of a float, for sets without an instruction for them. */
#ifndef EXPONENT_H
#define EXPONENT_H

/* For x from 1/2 to 2. Powers out of range give 0 or infinity, infinite ones too, for which x is
 * NaN. */
ALWAYS_INLINE Floats scale(Floats x, Floats power) {
  const Floats within = min_floats(max_floats(power, -127.0f), 128.0f);
  const Words bits = (Words)(__builtin_convertvector(within, Ints) + 127) << 23;
  const Floats scaled = power >= 128.0f ? (Floats)__builtin_inff() : x * (Floats)bits;
  return power <= -127.0f ? (Floats)0.0f : scaled;
}

#endif
