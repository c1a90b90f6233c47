/* A libaio that misbehaves on order, for tests: the four functions that nvmeio takes from libaio,
 * over the raw system calls, with the faults that a kernel may show. Blocks really move; a fault
 * changes what is asked of the kernel (fewer iocbs, fewer bytes) or what is said about it.
 *
 * The switches are exported variables, set by the test (ctypes) while the lanes run, 0 for off, and
 * the counters beside them prove that a fault did happen. One loaded copy of this library is one
 * set of switches: the fixture copies the file for every test, and dlopen tells copies apart.
 *
 * A lane sleeps on the eventfd that the kernel signals per completion. Whatever is kept from it
 * here is therefore signalled again by the same eventfd when it is to be had. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* --- switches ------------------------------------------------------------------------------ */

/* io_submit */
atomic_int submit_error;          /* the errno to refuse with */
atomic_int submit_error_first;    /* refuse this many calls, counted down */
atomic_int submit_error_every;    /* refuse every so-many-th call */
atomic_int submit_error_always;   /* refuse every call */
atomic_int submit_at_most;        /* iocbs taken in one call */
atomic_llong refuse_offset = -1;  /* refuse (EINVAL) the direct iocb at this file offset */
atomic_int refuse_direct;         /* refuse (EINVAL) every direct iocb */
atomic_int short_nbytes;          /* let the kernel move no more than this per iocb */

/* io_getevents */
atomic_int getevents_error;       /* the errno to answer with */
atomic_int getevents_error_every; /* every so-many-th call */
atomic_int getevents_at_most;     /* events handed out in one call */
atomic_int reverse;               /* hand events out in reverse order */
atomic_int hold_every;            /* hand every so-many-th event out one call later */
atomic_int gate;                  /* hand out nothing until open_gate() */

/* events */
atomic_llong event_offset = -1;   /* the block at this file offset ... */
atomic_int event_opcode = -1;     /* ... or every block of this IOCB_CMD_ ... */
atomic_int event_every;           /* ... or every so-many-th ... */
atomic_int event_error;           /* ... ends with this errno, or if -1 with no byte moved ... */
atomic_int event_times = -1;      /* ... so many times in all; -1: always */

/* --- what happened -------------------------------------------------------------------------- */

atomic_int submit_calls, submit_refusals, submit_partial, submit_shortened;
atomic_int getevents_calls, getevents_refusals, events_changed, events_held, events_reversed;
atomic_int blocks; /* taken by the kernel */

enum { HELD_MAX = 1 << 16, CONTEXTS_MAX = 64 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
  aio_context_t context;
  struct io_event event;
} held[HELD_MAX];
static unsigned nheld;
static int gated_fds[CONTEXTS_MAX];
static unsigned ngated;

static int due(atomic_int *every, atomic_int calls) { return *every && calls % *every == 0; }

static int take_one(atomic_int *left) {
  int n = *left;
  while (n > 0)
    if (atomic_compare_exchange_weak(left, &n, n - 1)) return 1;
  return 0;
}

static void signal_lane(const struct iocb *cb) {
  uint64_t one = 1;
  ssize_t ignored = write((int)cb->aio_resfd, &one, sizeof one);
  (void)ignored;
}

int io_setup(int nr_events, aio_context_t *context) {
  return syscall(SYS_io_setup, nr_events, context) < 0 ? -errno : 0;
}

int io_destroy(aio_context_t context) {
  pthread_mutex_lock(&mutex);
  unsigned kept = 0;
  for (unsigned i = 0; i < nheld; i++)
    if (held[i].context != context) held[kept++] = held[i];
  nheld = kept;
  pthread_mutex_unlock(&mutex);
  return syscall(SYS_io_destroy, context) < 0 ? -errno : 0;
}

static int is_transfer(const struct iocb *cb) {
  return cb->aio_lio_opcode == IOCB_CMD_PREAD || cb->aio_lio_opcode == IOCB_CMD_PWRITE;
}

static int refused(const struct iocb *cb) {
  if (!is_transfer(cb) || !(fcntl((int)cb->aio_fildes, F_GETFL) & O_DIRECT)) return 0;
  return refuse_direct || (refuse_offset >= 0 && cb->aio_offset == refuse_offset);
}

int io_submit(aio_context_t context, long nr, struct iocb **iocbs) {
  int call = atomic_fetch_add(&submit_calls, 1) + 1;
  if (submit_error &&
      (submit_error_always || take_one(&submit_error_first) || due(&submit_error_every, call))) {
    submit_refusals++;
    return -submit_error;
  }
  long n = nr;
  if (submit_at_most && n > submit_at_most) n = submit_at_most;
  /* As the kernel does it: blocks before the bad one are taken, and the next call fails. */
  for (long i = 0; i < n; i++)
    if (refused(iocbs[i])) {
      if (i == 0) {
        submit_refusals++;
        return -EINVAL;
      }
      n = i;
    }
  if (n < nr) submit_partial++;
  for (long i = 0; i < n; i++)
    if (short_nbytes && is_transfer(iocbs[i]) && iocbs[i]->aio_nbytes > (uint64_t)short_nbytes) {
      iocbs[i]->aio_nbytes = (uint64_t)short_nbytes;
      submit_shortened++;
    }
  long taken = syscall(SYS_io_submit, context, n, iocbs);
  if (taken < 0) return -errno;
  blocks += (int)taken;
  return (int)taken;
}

static void change(struct io_event *event) {
  const struct iocb *cb = (const struct iocb *)(uintptr_t)event->obj;
  static atomic_int seen;
  int nth = atomic_fetch_add(&seen, 1) + 1;
  if (!event_error) return;
  if (!((event_offset >= 0 && is_transfer(cb) && cb->aio_offset == event_offset) ||
        (event_opcode >= 0 && cb->aio_lio_opcode == event_opcode) || due(&event_every, nth)))
    return;
  if (event_times >= 0 && !take_one(&event_times)) return;
  event->res = event_error < 0 ? 0 : -event_error;
  events_changed++;
}

/* With the mutex held. */
static void hold(aio_context_t context, const struct io_event *event) {
  held[nheld].context = context;
  held[nheld++].event = *event;
  events_held++;
}

static int from_held(aio_context_t context, long nr, struct io_event *events) {
  int n = 0;
  unsigned kept = 0;
  for (unsigned i = 0; i < nheld; i++) {
    if (held[i].context == context && n < nr)
      events[n++] = held[i].event;
    else
      held[kept++] = held[i];
  }
  nheld = kept;
  return n;
}

static void remember_gated(int fd) {
  for (unsigned i = 0; i < ngated; i++)
    if (gated_fds[i] == fd) return;
  if (ngated < CONTEXTS_MAX) gated_fds[ngated++] = fd;
}

int io_getevents(aio_context_t context, long min_nr, long nr, struct io_event *events,
                 struct timespec *timeout) {
  int call = atomic_fetch_add(&getevents_calls, 1) + 1;
  if (getevents_error && due(&getevents_error_every, call)) {
    getevents_refusals++;
    return -getevents_error;
  }
  pthread_mutex_lock(&mutex);
  int n = gate ? 0 : from_held(context, nr, events);
  pthread_mutex_unlock(&mutex);
  if (n) return n; /* each was changed, and signalled anew, when it was held */

  if (getevents_at_most && nr > getevents_at_most) nr = getevents_at_most;
  long taken = syscall(SYS_io_getevents, context, min_nr, nr, events, timeout);
  if (taken < 0) return -errno;
  static atomic_int seen;
  pthread_mutex_lock(&mutex);
  for (long i = 0; i < taken; i++) {
    const struct iocb *cb = (const struct iocb *)(uintptr_t)events[i].obj;
    change(&events[i]);
    int nth = atomic_fetch_add(&seen, 1) + 1;
    if (gate && nheld < HELD_MAX) {
      remember_gated((int)cb->aio_resfd);
      hold(context, &events[i]);
    } else if (due(&hold_every, nth) && nheld < HELD_MAX) {
      hold(context, &events[i]);
      signal_lane(cb);
    } else {
      events[n++] = events[i];
    }
  }
  pthread_mutex_unlock(&mutex);
  if (reverse && n > 1) {
    for (int i = 0; i < n / 2; i++) {
      struct io_event other = events[i];
      events[i] = events[n - 1 - i];
      events[n - 1 - i] = other;
    }
    events_reversed += n;
  }
  return n;
}

/* Hands out what the gate has kept, at once. */
void open_gate(void) {
  uint64_t one = 1;
  pthread_mutex_lock(&mutex);
  gate = 0;
  for (unsigned i = 0; i < ngated; i++) {
    ssize_t ignored = write(gated_fds[i], &one, sizeof one);
    (void)ignored;
  }
  ngated = 0;
  pthread_mutex_unlock(&mutex);
}
