/* One memory for the kernels of all instruction sets: a thread that calls any has all of it. */
#include "threads.h"

void *thread_scratch(void) {
  static _Thread_local _Alignas(64) char memory[SCRATCH_BYTES];
  return memory;
}
