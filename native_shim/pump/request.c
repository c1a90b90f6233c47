/* Requests, and the completion queues where they are collected, once they are done.
 *
 * Who keeps what alive:
 *   - A request belongs to its maker until nv_request_free. Freed early (interpreter exit)
 *     it becomes an orphan, and the lane frees it once the kernel has let go of its memory.
 *   - The caller keeps tensor memory and descriptors alive until nv_is_done says 1.
 *   - Engines and completion queues count references; the last one out frees. Every request holds
 *     one of its engine and one of its completion queue.
 *
 * Nothing here knows what an engine is but for what its requests share (nv_common).
 *
 * Any function here may be called from any thread. After fork() the lanes do not exist in the
 * child, and a mutex may have been copied locked: nv_forked() turns every call there into a
 * refusal that touches nothing. */
#include "internal.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <unistd.h>

static unsigned fork_generation;

static void after_fork_in_child(void) { fork_generation++; }

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(NULL, NULL, after_fork_in_child);
}

int nv_forked(const nv_common *common) { return common->generation != fork_generation; }

/* --- what the requests of an engine share ------------------------------------------------ */

void nv_common_init(nv_common *common, void (*last_out)(nv_common *), void (*over)(nv_request *)) {
  common->generation = fork_generation;
  common->last_out = last_out;
  common->over = over;
  atomic_init(&common->refs, 1);
  pthread_mutex_init(&common->mutex, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&common->done_cond, &attributes);
  pthread_condattr_destroy(&attributes);
}

void nv_common_unref(nv_common *common) {
  if (atomic_fetch_sub(&common->refs, 1) != 1) return;
  pthread_cond_destroy(&common->done_cond);
  pthread_mutex_destroy(&common->mutex);
  common->last_out(common);
}

/* --- completion queues ------------------------------------------------------------------- */

nv_cq *nv_cq_new(nv_engine *engine) {
  nv_common *common = (nv_common *)engine;
  if (nv_forked(common)) return NULL;
  nv_cq *cq = calloc(1, sizeof *cq);
  if (!cq) return NULL;
  cq->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (cq->efd < 0) {
    free(cq);
    return NULL;
  }
  cq->common = common;
  atomic_init(&cq->refs, 1);
  atomic_fetch_add(&common->refs, 1);
  return cq;
}

int nv_cq_fd(nv_cq *cq) { return cq->efd; }

static void signal_cq(nv_cq *cq) {
  uint64_t one = 1;
  ssize_t ignored = write(cq->efd, &one, sizeof one); /* full means awake already */
  (void)ignored;
}

void nv_cq_wake(nv_cq *cq) {
  nv_common *common = cq->common;
  if (nv_forked(common)) return;
  pthread_mutex_lock(&common->mutex);
  if (!cq->closed) signal_cq(cq);
  pthread_mutex_unlock(&common->mutex);
}

static void cq_unref(nv_cq *cq) {
  if (atomic_fetch_sub(&cq->refs, 1) == 1) free(cq);
}

/* With common->mutex held: a request that was taken, or will never be, names no queue. */
static void leave_cq(nv_request *request) {
  nv_cq *cq = request->cq;
  request->cq = NULL;
  if (cq) cq_unref(cq);
}

/* With common->mutex held; whether the completion queue's eventfd has to be signalled. */
static int link_done(nv_cq *cq, nv_request *request) {
  request->linked = 1;
  request->done_prev = cq->tail;
  request->done_next = NULL;
  if (cq->tail)
    cq->tail->done_next = request;
  else
    cq->head = request;
  cq->tail = request;
  int signal = !cq->signalled;
  cq->signalled = 1;
  return signal;
}

static void unlink_done(nv_cq *cq, nv_request *request) {
  if (request->done_prev)
    request->done_prev->done_next = request->done_next;
  else
    cq->head = request->done_next;
  if (request->done_next)
    request->done_next->done_prev = request->done_prev;
  else
    cq->tail = request->done_prev;
  request->linked = 0;
}

/* With the mutex held: nothing is there. */
static void hush(nv_cq *cq) {
  uint64_t count;
  ssize_t ignored = read(cq->efd, &count, sizeof count);
  (void)ignored;
  cq->signalled = 0;
}

/* Takes up to max tokens of finished requests. All under the mutex: the descriptor's number may be
 * somebody else's once the completion queue is closed. */
int nv_cq_reap(nv_cq *cq, uint64_t *tokens, int max) {
  nv_common *common = cq->common;
  if (nv_forked(common)) return 0;
  uint64_t count;
  int n = 0;
  pthread_mutex_lock(&common->mutex);
  if (!cq->closed) {
    ssize_t ignored = read(cq->efd, &count, sizeof count);
    (void)ignored;
    while (cq->head && n < max) {
      nv_request *request = cq->head;
      tokens[n++] = request->token;
      unlink_done(cq, request);
      leave_cq(request);
    }
    cq->signalled = cq->head != NULL;
    if (cq->signalled) signal_cq(cq);
  }
  pthread_mutex_unlock(&common->mutex);
  return n;
}

/* Some of what a reap would take, with how it ended. With nothing there, a late signal is used up. */
int nv_cq_peek_ends(nv_cq *cq, int64_t *ends, int max) {
  nv_common *common = cq->common;
  if (nv_forked(common)) return 0;
  int n = 0;
  pthread_mutex_lock(&common->mutex);
  if (!cq->closed) {
    for (nv_request *request = cq->head; request && n < max; request = request->done_next) {
      ends[2 * n] = (int64_t)request->token;
      ends[2 * n++ + 1] = nv_moved(request);
    }
    if (!n) hush(cq);
  }
  pthread_mutex_unlock(&common->mutex);
  return n;
}

/* The tokens alone. */
int nv_cq_peek(nv_cq *cq, uint64_t *tokens, int max) {
  nv_common *common = cq->common;
  if (nv_forked(common)) return 0;
  int n = 0;
  pthread_mutex_lock(&common->mutex);
  if (!cq->closed) {
    for (nv_request *request = cq->head; request && n < max; request = request->done_next)
      tokens[n++] = request->token;
    if (!n) hush(cq);
  }
  pthread_mutex_unlock(&common->mutex);
  return n;
}

void nv_cq_acknowledge(nv_cq *cq, const uint64_t *tokens, int n) {
  nv_common *common = cq->common;
  if (nv_forked(common)) return;
  pthread_mutex_lock(&common->mutex);
  if (!cq->closed) {
    for (int i = 0; i < n; i++) {
      nv_request *request = cq->head;
      while (request && request->token != tokens[i]) request = request->done_next;
      if (!request) continue; /* somebody else has, or it was freed */
      unlink_done(cq, request);
      leave_cq(request);
    }
    if (!cq->head) hush(cq);
  }
  pthread_mutex_unlock(&common->mutex);
}

void nv_cq_close(nv_cq *cq) {
  nv_common *common = cq->common;
  if (nv_forked(common)) return;
  pthread_mutex_lock(&common->mutex);
  int closed = cq->closed;
  cq->closed = 1;
  while (cq->head) {
    nv_request *request = cq->head;
    unlink_done(cq, request);
    leave_cq(request);
  }
  pthread_mutex_unlock(&common->mutex);
  if (closed) return;
  while (atomic_load(&cq->signalling)) sched_yield();
  close(cq->efd);
}

void nv_cq_free(nv_cq *cq) {
  nv_common *common = cq->common;
  if (nv_forked(common)) return;
  nv_cq_close(cq);
  cq_unref(cq);
  nv_common_unref(common);
}

/* --- requests ---------------------------------------------------------------------------- */

/* One that no completion queue knows, and that keeps nothing alive. */
nv_request *nv_request_alloc(nv_common *common, uint32_t nparts) {
  nv_request *request = calloc(1, sizeof *request + nparts * sizeof(nv_part));
  if (!request) return NULL;
  request->common = common;
  request->nparts = nparts;
  atomic_init(&request->parts_left, nparts);
  for (uint32_t i = 0; i < nparts; i++) request->parts[i].request = request;
  request->parts[0].starts = 1;
  return request;
}

/* It will be reported at `cq`. */
void nv_request_adopt(nv_request *request, nv_cq *cq, uint64_t token) {
  request->token = token;
  request->cq = cq;
  atomic_fetch_add(&request->common->refs, 1);
  atomic_fetch_add(&cq->refs, 1);
}

nv_request *nv_request_new(nv_common *common, nv_cq *cq, uint64_t token, uint32_t nparts) {
  nv_request *request = nv_request_alloc(common, nparts);
  if (request) nv_request_adopt(request, cq, token);
  return request;
}

static void free_batch(nv_batch *batch) {
  if (!batch) return;
  for (uint64_t i = 0; i < batch->count; i++) free(batch->members[i]);
  free(batch);
}

static void request_release(nv_request *request) {
  nv_common *common = request->common;
  nv_rows_free(request->rows);
  free_batch(request->batch);
  free(request);
  nv_common_unref(common);
}

/* --- what a request moves ----------------------------------------------------------------- */

/* A request is split over the lanes where every lane gets at least two blocks of it; smaller ones
 * go to the lanes in turn. Cuts fall on whole blocks, so alignment survives. */
static uint32_t share(const nv_options *options, uint64_t span, uint64_t *step) {
  uint64_t blocks = (span + options->block_size - 1) / options->block_size;
  uint64_t parts = options->lanes;
  if (blocks < 2 * parts) parts = 1;
  *step = (blocks + parts - 1) / parts * options->block_size;
  return (uint32_t)parts;
}

/* With all its parts, of `step` bytes each. */
void nv_fill_in(nv_request *request, const nv_transfer *transfer, uint64_t step) {
  uint64_t start = transfer->span_start, end = transfer->span_end;
  int sync = transfer->opcode == NV_FSYNC || transfer->opcode == NV_FDATASYNC;
  request->opcode = transfer->opcode;
  request->direct_fd = transfer->direct_fd;
  request->buffered_fd = transfer->buffered_fd;
  request->bounce = transfer->bounce;
  request->preallocate = transfer->preallocate;
  request->foreign = transfer->foreign;
  request->address = (char *)(uintptr_t)transfer->address;
  request->nbytes = transfer->nbytes;
  request->file_offset = request->grow_from = transfer->file_offset;
  request->grow_end = transfer->file_offset + transfer->nbytes;
  request->span_start = start;
  request->span_end = end;
  request->offset_alignment = transfer->offset_alignment;
  request->memory_alignment = transfer->memory_alignment;
  for (uint32_t i = 0; i < request->nparts; i++) {
    nv_part *part = &request->parts[i];
    part->next = start;
    part->end = (sync || end - start <= step) ? end : start + step;
    start = part->end;
  }
  if (sync) request->parts[0].end = end + 1; /* one block of no bytes */
}

/* A transfer as a request, which is nobody's yet. */
nv_request *nv_lay_out(nv_common *common, const nv_options *options,
                       const nv_transfer *transfer) {
  uint64_t step = 0;
  int sync = transfer->opcode == NV_FSYNC || transfer->opcode == NV_FDATASYNC;
  uint64_t span = transfer->span_end - transfer->span_start;
  uint32_t nparts = sync ? 1 : share(options, span, &step);
  nv_request *request = nv_request_alloc(common, nparts);
  if (request) nv_fill_in(request, transfer, step);
  return request;
}

/* Sorts the rows, unless that is done; leaves parts without blocks empty. */
void nv_rows_begin(nv_request *request) {
  if (request->planned) return;
  request->planned = 1;
  if (request->stop) return;
  int failure = -nv_rows_plan(request->rows);
  if (failure) {
    int none = 0;
    atomic_compare_exchange_strong(&request->error, &none, failure);
    atomic_store(&request->stop, 1);
    return;
  }
  int fd = request->direct_fd >= 0 ? request->direct_fd : request->buffered_fd;
  request->result.preallocated = nv_rows_preallocate(request->rows, fd);
  for (uint32_t i = 0; i < request->nparts; i++)
    request->parts[i].end = nv_rows_more(request->rows, i) != 0;
}

/* Whether an error in a block concerns its rows only; else nothing more is begun. EINVAL is a file
 * that refuses direct I/O: all of it is done again, without. */
int nv_rows_is_theirs(const nv_request *request, int error) {
  return request->rows && error != ECANCELED && !(error == EINVAL && request->direct_fd >= 0);
}

/* --- its end ------------------------------------------------------------------------------- */

/* Called once, by the lane that finished the last part: the kernel holds nothing any more. Whether
 * nothing is in flight now. */
int nv_count(nv_request *request) {
  nv_common *common = request->common;
  nv_result *result = &request->result;
  result->transferred = request->transferred;
  result->direct_bytes = request->direct_bytes;
  result->bounced_bytes = request->bounced_bytes;
  result->buffered_bytes = request->buffered_bytes;
  int whole = request->transferred >= request->nbytes;
  if (request->error)
    result->error = request->error;
  else if (request->cancelled && !whole)
    result->error = ECANCELED;

  atomic_fetch_add(request->opcode == NV_READ ? &common->bytes_read : &common->bytes_written,
                   result->transferred);
  atomic_fetch_add(&common->direct_bytes, result->direct_bytes);
  atomic_fetch_add(&common->bounced_bytes, result->bounced_bytes);
  atomic_fetch_add(&common->buffered_bytes, result->buffered_bytes);
  atomic_fetch_add(&common->operations, 1);
  if (result->error == ECANCELED)
    atomic_fetch_add(&common->cancelled, 1);
  else if (result->error || !whole)
    atomic_fetch_add(&common->errors, 1);
  return atomic_fetch_sub(&common->in_flight, 1) == 1;
}

/* Tells whoever waits for it. */
void nv_report(nv_request *request) {
  nv_common *common = request->common;
  /* Its owner keeps the storage until it is done. What was refused is done again. */
  if (request->holds && request->result.error != EINVAL) nv_unhold(&request->hold);
  pthread_mutex_lock(&common->mutex);
  int orphan = request->orphan;
  nv_cq *cq = request->cq, *signal = NULL;
  if (cq && !orphan && !cq->closed) {
    if (link_done(cq, request)) {
      signal = cq;
      atomic_fetch_add(&cq->signalling, 1); /* nv_cq_close waits for us */
    }
  } else {
    leave_cq(request);
  }
  request->done = 1; /* from the unlock on, the request is its owner's to free */
  if (common->waiters) pthread_cond_broadcast(&common->done_cond);
  pthread_mutex_unlock(&common->mutex);
  if (orphan) request_release(request);
  if (signal) {
    /* Outside of the mutex: whoever wakes up wants it at once. */
    signal_cq(signal);
    atomic_fetch_sub(&signal->signalling, 1);
  }
}

void nv_cancel(nv_request *request) {
  if (nv_forked(request->common)) return;
  atomic_store(&request->cancelled, 1);
  atomic_store(&request->stop, 1);
  if (request->rows) nv_rows_stop(request->rows);
  for (uint64_t i = 0; request->batch && i < request->batch->count; i++)
    nv_cancel(request->batch->members[i]);
}

int nv_is_started(nv_request *request) { return request->started; }

int nv_is_done(nv_request *request) {
  nv_common *common = request->common;
  if (nv_forked(common)) return 0;
  return request->done;
}

#define MOST_WAIT_S 1e9 /* 31 years: their nanoseconds fit into a long long, infinity's do not */

int nv_wait(nv_request *request, double timeout_s) {
  nv_common *common = request->common;
  if (nv_forked(common)) return 0;
  if (request->done || !(timeout_s > 0)) return request->done;
  if (timeout_s > MOST_WAIT_S) timeout_s = MOST_WAIT_S;
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  long long ns = until.tv_nsec + (long long)(timeout_s * 1e9);
  until.tv_sec += ns / 1000000000;
  until.tv_nsec = ns % 1000000000;
  pthread_mutex_lock(&common->mutex);
  common->waiters++;
  while (!request->done &&
         pthread_cond_timedwait(&common->done_cond, &common->mutex, &until) != ETIMEDOUT) {
  }
  common->waiters--;
  int done = request->done;
  pthread_mutex_unlock(&common->mutex);
  return done;
}

/* From now on (or, if it is done and not yet reaped, at once) the request completes at `cq`. */
void nv_move(nv_request *request, nv_cq *cq) {
  nv_common *common = request->common;
  if (nv_forked(common)) return;
  pthread_mutex_lock(&common->mutex);
  nv_cq *old = request->cq;
  if (old != cq && (!request->done || request->linked)) {
    if (request->linked) unlink_done(old, request);
    leave_cq(request);
    request->cq = cq;
    atomic_fetch_add(&cq->refs, 1);
    if (request->done && !cq->closed && link_done(cq, request)) signal_cq(cq);
  }
  pthread_mutex_unlock(&common->mutex);
}

int64_t nv_moved(nv_request *request) {
  const nv_result *result = &request->result;
  return result->error ? -(int64_t)result->error : (int64_t)result->transferred;
}

nv_rows *nv_request_rows(nv_request *request) { return request->rows; }

_Static_assert(offsetof(nv_request, result) == 0, "Python reads it there, without a call");
const nv_result *nv_request_result(nv_request *request) { return &request->result; }

/* NULL is what an allocation that failed left to be freed. */
void nv_request_free(nv_request *request) {
  if (!request) return;
  nv_common *common = request->common;
  if (request->holds) nv_unhold(&request->hold); /* the storage may be gone before an orphan is */
  if (nv_forked(common)) return;
  pthread_mutex_lock(&common->mutex);
  int done = request->done || !request->started;
  if (done) {
    if (request->linked) unlink_done(request->cq, request);
    leave_cq(request);
  } else {
    request->orphan = 1;
  }
  pthread_mutex_unlock(&common->mutex);
  if (done) request_release(request);
}
