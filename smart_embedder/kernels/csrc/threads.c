/* A team of threads for each thread that calls kernels: quick on a quiet machine, polite on a busy
 * one.
 *
 * The regions of a forward are some tens of microseconds apart, and a sleeping thread takes hundreds
 * to wake. So a team's threads watch (spin) for the next region for a while. Beside other programs they
 * must not: a watching thread may occupy the core that the calling thread waits for. There are three
 * signs of other programs: a watching thread sees the clock leap, since it was halted; the calling
 * thread waits long at the end of a region; or a thread finds itself on the calling thread's core. Each
 * makes the whole team polite for a time: it sleeps between regions, and is woken for large ones.
 *
 * A region does not wait for threads that have not come. Threads that come enter, take parts of its
 * work and leave. The calling thread closes the region when no part is left, and waits for the threads
 * inside. So a thread that has no core delays nobody.
 *
 * Why this is correct: all atomic operations are sequentially consistent, so they have one order.
 * - No task outlives its region. A member adds itself to `inside` before it checks that `region` is
 *   still the number that it saw. If the check succeeds, it comes before the closing increment in
 *   the order, and so does the addition. The caller reads `inside` after it has closed the region, so
 *   it finds the member there until the member has returned from the task. A member that comes later
 *   fails the check, and reads neither `wanted` nor `task` nor `work`. (The numbers repeat after 2^31
 *   regions; no thread is halted that long between two instructions.)
 * - A member reads what the caller wrote: `task`, `work` and `wanted` are written before the
 *   increment that opens the region, read after the check has seen it, and not written again before
 *   `inside` was 0. The caller reads what a member wrote: it has read the subtraction behind it.
 * - No member sleeps through a call. It sets `has_sleepers`, then sleeps while `region` is what it
 *   saw last, which the kernel compares. Either the caller's exchange finds the flag, and wakes all;
 *   or the increment came before the flag, and the member does not fall asleep. A small region wakes
 *   nobody and leaves the flag as it is: that costs time, never a result.
 * - The caller does not sleep for ever. It sets `caller_sleeps`, then sleeps while `inside` is what
 *   it read, which is not 0. The last member subtracts, then reads the flag: either it finds it and
 *   wakes the caller, or the subtraction came before the flag, and the caller does not fall asleep.
 * - The memory stays. Each user of a team counts in `references`, and the last one frees it. A child
 *   process has none of the members, but may have counted them in `inside`, so it forgets the team.
 */
#define _GNU_SOURCE
#include "threads.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MICROSECOND = 1000, MAX_THREADS = 256, LOOKS_PER_TIME = 8 };

/* All times are in nanoseconds. The time that a thread watches before it sleeps: */
static _Atomic int64_t watch_for = 200 * MICROSECOND;
static const int64_t
    /* A leap of the clock that shows another program; an interrupt takes a tenth of it. */
    LEAP = 50 * MICROSECOND,
    /* The time that a team is polite. It doubles if the next sign comes soon, since a shared machine
     * halts any thread now and then. */
    SHORT_POLITENESS = 1000 * MICROSECOND,
    LONG_POLITENESS = 64000 * MICROSECOND,
    /* The time that a polite calling thread watches at the end of a region. */
    SHORT_WATCH = 5 * MICROSECOND,
    /* The work of a region for which threads are woken: threads that will watch for the next regions,
     * too, or (ONCE) threads that will sleep again. */
    WORTH_WAKING = 20 * MICROSECOND,
    WORTH_WAKING_ONCE = 200 * MICROSECOND;

typedef struct Team Team;
typedef struct {
  Team *team;
  unsigned number;
} Member;

struct Team {
  /* Those of the present or last region, valid for members that have entered. */
  void (*task)(void *);
  void *work;
  unsigned wanted; /* how many members may enter */
  /* Twice the number of the region, plus one while it is open; members sleep on it. */
  _Alignas(64) atomic_uint region;
  atomic_int has_sleepers; /* that nobody has woken yet */
  atomic_int caller_core;
  atomic_int leaving; /* The calling thread has ended. */
  atomic_uint references; /* the calling thread and each member; the last one frees the team */
  _Atomic int64_t polite_until, politeness;
  /* The number of members inside; the calling thread sleeps on it. */
  _Alignas(64) atomic_uint inside;
  atomic_int caller_sleeps;
  unsigned size;
  Member members[MAX_THREADS - 1];
};

void *thread_scratch(void) {
  static _Thread_local _Alignas(64) char memory[SCRATCH_BYTES];
  return memory;
}

/* Set the time that threads watch for the next region, in nanoseconds; with 0 they sleep at once. */
void set_watch(long nanoseconds) { atomic_store(&watch_for, nanoseconds); }

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}

static void sleep_while(atomic_uint *word, unsigned value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(atomic_uint *word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void be_polite(Team *team) {
  const int64_t time = now(), last = atomic_load(&team->politeness);
  const int64_t since = time - atomic_load(&team->polite_until);
  if (since < 0) return; /* Another thread has seen the same. */
  int64_t politeness = SHORT_POLITENESS;
  if (since < 4 * last) politeness = last < LONG_POLITENESS ? 2 * last : last;
  atomic_store(&team->politeness, politeness);
  atomic_store(&team->polite_until, time + politeness);
}

static int may_watch(Team *team, int64_t time) {
  return atomic_load(&watch_for) > 0 && time >= atomic_load(&team->polite_until);
}

/* Watch `word`. Returns 1 as soon as it is no longer `value`, and 0 after `nanoseconds` or if another
 * program needs the core. */
static int watch(Team *team, atomic_uint *word, unsigned value, int64_t nanoseconds) {
  int64_t last = now();
  const int64_t until = last + nanoseconds;
  while (last < until) {
    for (int look = 0; look < LOOKS_PER_TIME; look++) {
      if (atomic_load(word) != value) return 1;
      relax();
    }
    const int64_t time = now();
    if (time - last > LEAP) {
      be_polite(team);
      return 0;
    }
    last = time;
  }
  return 0;
}


/* Run the region's task, unless the region has been closed. */
static void help(Team *team, const Member *member, unsigned region) {
  atomic_fetch_add(&team->inside, 1);
  if (atomic_load(&team->region) == region && member->number < team->wanted) team->task(team->work);
  if (atomic_fetch_sub(&team->inside, 1) == 1 && atomic_load(&team->caller_sleeps))
    wake_all(&team->inside);
}

static void release(Team *team) {
  if (atomic_fetch_sub(&team->references, 1) == 1) free(team);
}

static void *run_member(void *of_member) {
  const Member *member = of_member;
  Team *team = member->team;
  unsigned seen = 0;
  while (!atomic_load(&team->leaving)) {
    const unsigned region = atomic_load(&team->region);
    if (region != seen) {
      seen = region;
      if (region % 2) help(team, member, region);
      continue;
    }
    /* If both are on one core, watching would keep the calling thread from it. */
    if (sched_getcpu() == atomic_load(&team->caller_core)) be_polite(team);
    const int64_t patience = may_watch(team, now()) ? atomic_load(&watch_for) : 0;
    if (watch(team, &team->region, seen, patience)) continue;
    atomic_store(&team->has_sleepers, 1);
    if (!atomic_load(&team->leaving)) sleep_while(&team->region, seen);
  }
  release(team);
  return NULL;
}

static void disband(void *of_team) {
  Team *team = of_team;
  atomic_store(&team->leaving, 1);
  atomic_fetch_add(&team->region, 2);
  wake_all(&team->region);
  release(team);
}

static pthread_key_t team_key;
static pthread_once_t team_once = PTHREAD_ONCE_INIT;
static void forget_team(void) { pthread_setspecific(team_key, NULL); }
static void make_key(void) {
  pthread_key_create(&team_key, disband);
  pthread_atfork(NULL, NULL, forget_team);
}

/* Return the calling thread's team with `size` members, or as many as can be started; NULL if there is
 * no memory. */
static Team *team_of(unsigned size) {
  pthread_once(&team_once, make_key);
  Team *team = pthread_getspecific(team_key);
  if (team == NULL) {
    team = aligned_alloc(_Alignof(Team), sizeof *team);
    if (team == NULL) return NULL;
    *team = (Team){.references = 1};
    pthread_setspecific(team_key, team);
  }
  if (team->size >= size) return team;
  /* Members block all signals, which are for the threads of the program. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (team->size < size) {
    Member *member = team->members + team->size;
    *member = (Member){.team = team, .number = team->size};
    pthread_t thread;
    atomic_fetch_add(&team->references, 1);
    if (pthread_create(&thread, NULL, run_member, member)) {
      atomic_fetch_sub(&team->references, 1);
      break;
    }
    pthread_detach(thread);
    team->size++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return team;
}

/* Wait for the members inside, which have entered since the region `began`. */
static void wait_for_members(Team *team, int64_t began, long cost) {
  const int64_t closed = now();
  /* Their parts may be larger than the parts that this thread has done. */
  const int64_t patience = may_watch(team, closed) ? closed - began + cost + LEAP : SHORT_WATCH;
  for (unsigned inside; (inside = atomic_load(&team->inside)) != 0;) {
    const int64_t left = closed + patience - now();
    if (left > 0 && watch(team, &team->inside, inside, left)) continue;
    if (patience > SHORT_WATCH) be_polite(team);
    atomic_store(&team->caller_sleeps, 1);
    sleep_while(&team->inside, inside);
    atomic_store(&team->caller_sleeps, 0);
  }
}

void on_threads(int threads, long cost, void (*task)(void *work), void *work) {
  const unsigned others = (unsigned)(threads < MAX_THREADS ? threads : MAX_THREADS) - 1;
  Team *team = others > 0 ? team_of(others) : NULL;
  if (team == NULL) {
    task(work);
    return;
  }
  team->task = task;
  team->work = work;
  team->wanted = others;
  atomic_store(&team->caller_core, sched_getcpu());
  const int64_t began = now();
  atomic_fetch_add(&team->region, 1);
  if (cost >= (may_watch(team, began) ? WORTH_WAKING : WORTH_WAKING_ONCE) &&
      atomic_exchange(&team->has_sleepers, 0))
    wake_all(&team->region);
  task(work);
  atomic_fetch_add(&team->region, 1);
  wait_for_members(team, began, cost);
}
