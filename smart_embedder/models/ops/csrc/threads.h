/* Work for the threads of PyTorch's own pool: a second pool would fight it for the cores.
 *
 * PyTorch for Linux computes with GNU OpenMP. These are the entry points that GCC emits for a
 * parallel region; in this process they are those of the library that PyTorch brought.
 */
#ifndef THREADS_H
#define THREADS_H

enum { SCRATCH_BYTES = 560 * 1024 };

/* SCRATCH_BYTES of the calling thread's own, for one kernel at a time; aligned to 64. */
void *thread_scratch(void);

void GOMP_parallel(void (*task)(void *), void *work, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

/* `task(work)` on each of `threads` threads. */
static inline void on_threads(int threads, void (*task)(void *), void *work) {
  GOMP_parallel(task, work, (unsigned)threads, 0);
}

typedef struct {
  long rows;
  void (*task)(const void *work, long row);
  const void *work;
} RowLoop;

static void run_rows_of_thread(void *shared) {
  const RowLoop *loop = shared;
  long part = omp_get_thread_num(), parts = omp_get_num_threads();
  long stop = loop->rows * (part + 1) / parts;
  for (long row = loop->rows * part / parts; row < stop; row++) loop->task(loop->work, row);
}

/* `task(work, row)` for each of `rows` rows, divided among `threads` threads. */
static inline void for_rows(
    long rows, int threads, void (*task)(const void *work, long row), const void *work) {
  RowLoop loop = {rows, task, work};
  on_threads(threads, run_rows_of_thread, &loop);
}

#endif
