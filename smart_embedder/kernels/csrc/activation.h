/* The activations of a product or of a gate. */
#ifndef ACTIVATION_H
#define ACTIVATION_H

#include "vector.h"

enum { NONE, GELU, RELU, SILU, GELU_BY_TANH };

/* x times the probability that a normal variable is below x (Hendrycks and Gimpel 2016), to 1e-6.
 *
 * Half of 1 - erf(x / sqrt(2)) by Abramowitz and Stegun 7.1.28, whose coefficients hold the root. */
ALWAYS_INLINE Floats gelu(Floats x) {
  const Floats size = abs_floats(x);
  /* Beyond 10 the tail is 0, and the power below would overflow. */
  const Floats bounded = min_floats(size, 10.0f);
  Floats root = 5.3829750e-6f;
  root = fma_floats(root, bounded, 4.8890637e-5f);
  root = fma_floats(root, bounded, 3.8003575e-5f);
  root = fma_floats(root, bounded, 3.2776263e-3f);
  root = fma_floats(root, bounded, 2.1141006e-2f);
  root = fma_floats(root, bounded, 4.9867347e-2f);
  root = fma_floats(root, bounded, 1.0f);
  for (int doubling = 0; doubling < 4; doubling++) root *= root;
  Floats tail = reciprocal(root);
  /* One step of Newton's method, and the factor of one half. */
  tail *= fma_floats(-root, tail * 0.5f, 1.0f);
  return fma_floats(-size, tail, max_floats(x, 0.0f));
}

/* x divided by 1 + exp(-y). */
ALWAYS_INLINE Floats by_logistic(Floats x, Floats y) {
  return x / (1.0f + exp2_floats(y * -LOG2_E));
}

/* GELU's approximation by tanh, which is a logistic function: 0.797885 is the root of 2 / pi. */
ALWAYS_INLINE Floats gelu_by_tanh(Floats x) {
  return by_logistic(x, 2 * 0.797884561f * x * fma_floats(x * x, 0.044715f, 1.0f));
}

ALWAYS_INLINE Floats activate(int activation, Floats x) {
  switch (activation) {
    case GELU: return gelu(x);
    case RELU: return max_floats((Floats){0}, x); /* In this order NaN stays NaN. */
    case SILU: return by_logistic(x, x);
    case GELU_BY_TANH: return gelu_by_tanh(x);
    default: return x;
  }
}

#endif
