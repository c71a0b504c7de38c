/* Calls the kernels for ARM, for a test on another machine; emulated_arm.py starts it under qemu.
 *
 * A call comes on the standard input: the kernel's number, its whole numbers and its floats, and the
 * memory of those that are addresses. That memory comes back on the standard output. It ends where a
 * page begins that nobody may touch, so a kernel that reads or writes past its end is killed.
 *
 * There is no C library, which the compiler would take a minute to make, nor one of its own, which
 * takes ten seconds.
 */
#include <linux/mman.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>

#include "threads.h"

enum { WHOLE = 24, FLOATS = 2, PAGE = 4096 };

typedef int64_t Number;

typedef struct {
  Number kernel;
  Number whole[WHOLE];
  Number bytes[WHOLE]; /* of the memory that the address is replaced by; -1 where it is none */
  float floats[FLOATS];
} Call;

static Number linux_call(Number number, Number a, Number b, Number c, Number d, Number e) {
  register Number x8 __asm__("x8") = number;
  register Number x0 __asm__("x0") = a;
  register Number x1 __asm__("x1") = b;
  register Number x2 __asm__("x2") = c;
  register Number x3 __asm__("x3") = d;
  register Number x4 __asm__("x4") = e;
  register Number x5 __asm__("x5") = 0;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}

static _Noreturn void leave(int status) {
  for (;;) linux_call(SYS_exit_group, status, 0, 0, 0, 0);
}

_Noreturn void __assert_fail(const char *what, const char *file, int line, const char *function) {
  (void)what, (void)file, (void)line, (void)function;
  leave(134);
}

/* What functions end with whose stack is watched, in a build that checks itself. */
uintptr_t __stack_chk_guard = 0x5AFE;
_Noreturn void __stack_chk_fail(void) { leave(134); }

/* What the kernels call of a C library, and what the compiler makes of loops. */
void *memset(void *to, int byte, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) ((char *)to)[i] = (char)byte;
  return to;
}
void *memcpy(void *restrict to, const void *restrict from, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) ((char *)to)[i] = ((const char *)from)[i];
  return to;
}
float exp2f(float x) {
  if (!(x > -200)) return x != x ? x : 0;
  if (x > 200) return __builtin_inff();
  const int64_t whole = (int64_t)(x + 200) - 200;
  const double part = (x - whole) * 0.693147180559945309;
  double sum = 1, term = 1;
  for (int i = 1; i < 16; i++) sum += term *= part / i;
  const union {
    int64_t bits;
    double value;
  } power = {(whole + 1023) << 52};
  return (float)(sum * power.value);
}

/* All of `bytes` bytes from the standard input, or to the standard output. */
static void transfer(Number call, char *memory, Number bytes) {
  while (bytes > 0) {
    const Number done = linux_call(call, call == SYS_write, (Number)memory, bytes, 0, 0);
    if (done <= 0) leave(done == 0 ? 0 : 1);
    memory += done, bytes -= done;
  }
}

/* One thread takes all parts of the work. */
void on_threads(int threads, long cost, void (*task)(void *), void *work) {
  (void)threads, (void)cost;
  task(work);
}
void *thread_scratch(void) {
  static _Alignas(64) char memory[SCRATCH_BYTES];
  return memory;
}

/* KERNELS is a list of K(name). */
#define K(name) void name(void);
KERNELS
#undef K
#define K(name) (void *)name,
static void *const kernels[] = {KERNELS};

/* In the calling convention of 64-bit ARM, whole numbers and addresses take registers and places on
 * the stack in their order, and floats other registers in theirs: one type of call fits all. */
#define EIGHT Number, Number, Number, Number, Number, Number, Number, Number
typedef void Kernel(EIGHT, EIGHT, EIGHT, float, float);

static Number pages(Number bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static char *allocate(Number bytes) {
  const Number all = pages(bytes) + PAGE;
  const Number start = linux_call(
      SYS_mmap, 0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  if (start < 0 || linux_call(SYS_mprotect, start + pages(bytes), PAGE, PROT_NONE, 0, 0)) leave(1);
  return (char *)start + pages(bytes) - bytes;
}

static void release(char *memory, Number bytes) {
  linux_call(SYS_munmap, (Number)memory + bytes - pages(bytes), pages(bytes) + PAGE, 0, 0, 0);
}

void _start(void) {
  for (Call call;;) {
    transfer(SYS_read, (char *)&call, sizeof call);
    Number *w = call.whole;
    for (int i = 0; i < WHOLE; i++)
      if (call.bytes[i] >= 0) {
        w[i] = (Number)allocate(call.bytes[i]);
        transfer(SYS_read, (char *)w[i], call.bytes[i]);
      }
    ((Kernel *)kernels[call.kernel])(
        w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13],
        w[14], w[15], w[16], w[17], w[18], w[19], w[20], w[21], w[22], w[23], call.floats[0],
        call.floats[1]);
    for (int i = 0; i < WHOLE; i++)
      if (call.bytes[i] >= 0) {
        transfer(SYS_write, (char *)w[i], call.bytes[i]);
        release((char *)w[i], call.bytes[i]);
      }
  }
}
