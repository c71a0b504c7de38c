/* Threads for the kernels: see threads.c. */
#ifndef THREADS_H
#define THREADS_H

#include <stdatomic.h>

enum { SCRATCH_BYTES = 560 * 1024 };

/* SCRATCH_BYTES of memory of the calling thread, for one kernel at a time; aligned to 64 bytes. */
void *thread_scratch(void);

/* Run `task(work)` on the calling thread, and on up to `threads` - 1 other threads of its team that
 * come in time. Returns when all have returned. So `task` has to take parts of the work until none are
 * left, and must not wait for another thread. `cost` is the time, in nanoseconds, that one thread
 * would take for all the work: if it is large enough, sleeping threads are woken. */
void on_threads(int threads, long cost, void (*task)(void *work), void *work);

typedef struct {
  long rows, step;
  void (*task)(const void *work, long row);
  const void *work;
  atomic_long next;
} RowLoop;

static void run_rows(void *shared) {
  RowLoop *loop = shared;
  for (long row; (row = atomic_fetch_add(&loop->next, loop->step)) < loop->rows;) {
    const long stop = row + loop->step < loop->rows ? row + loop->step : loop->rows;
    for (; row < stop; row++) loop->task(loop->work, row);
  }
}

/* Run `task(work, row)` for each of `rows` rows of `width` numbers, on up to `threads` threads. */
static inline void for_rows(
    long rows, long width, int threads, void (*task)(const void *work, long row),
    const void *work) {
  enum { PARTS_PER_THREAD = 4, NUMBERS_PER_NANOSECOND = 2 };
  const long step = rows / (PARTS_PER_THREAD * (long)threads);
  RowLoop loop = {rows, step > 0 ? step : 1, task, work, 0};
  on_threads(threads, rows * width / NUMBERS_PER_NANOSECOND, run_rows, &loop);
}

#endif
