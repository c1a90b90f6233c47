/* Requests from submission to release, and the completion queues where they are collected.
 *
 * Who keeps what alive:
 *   - A request belongs to its maker until nv_request_free. Freed early (interpreter exit)
 *     it becomes an orphan, and the lane frees it once the kernel has let go of its memory.
 *   - The caller keeps tensor memory and descriptors alive until nv_is_done says 1.
 *   - Engines and completion queues count references; the last one out frees. Every request holds
 *     one of its engine and one of its completion queue.
 *
 * Any function here may be called from any thread. After fork() the lanes do not exist in the
 * child, and a mutex may have been copied locked: nv_forked() turns every call there into a
 * refusal that touches nothing. */
#include "internal.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static unsigned fork_generation;

static void after_fork_in_child(void) { fork_generation++; }

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(NULL, NULL, after_fork_in_child);
}

int nv_forked(const nv_engine *engine) { return engine->generation != fork_generation; }

/* --- engine ------------------------------------------------------------------------------ */

static void engine_unref(nv_engine *engine) {
  if (atomic_fetch_sub(&engine->refs, 1) != 1) return;
  for (uint32_t i = 0; i < engine->options.lanes; i++) nv_lane_destroy(&engine->lanes[i]);
  pthread_cond_destroy(&engine->done_cond);
  pthread_mutex_destroy(&engine->mutex);
  free(engine->lanes);
  free(engine);
}

nv_engine *nv_engine_new(nv_kaio *kaio, const nv_options *options, int *error) {
  nv_engine *engine = calloc(1, sizeof *engine);
  nv_lane *lanes = calloc(options->lanes, sizeof *lanes);
  if (!engine || !lanes) {
    free(engine);
    free(lanes);
    *error = ENOMEM;
    return NULL;
  }
  engine->kaio = kaio;
  engine->options = *options;
  engine->lanes = lanes;
  engine->generation = fork_generation;
  atomic_init(&engine->refs, 1);
  pthread_mutex_init(&engine->mutex, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&engine->done_cond, &attributes);
  pthread_condattr_destroy(&attributes);
  for (uint32_t i = 0; i < options->lanes; i++) {
    int failure = nv_lane_init(&lanes[i], engine, i);
    if (failure) {
      *error = -failure;
      engine->options.lanes = i; /* those that exist */
      engine_unref(engine);
      return NULL;
    }
  }
  *error = 0;
  return engine;
}

void nv_engine_stop(nv_engine *engine) {
  if (nv_forked(engine)) return;
  atomic_store(&engine->stopping, 1);
  for (uint32_t i = 0; i < engine->options.lanes; i++) nv_lane_wake(&engine->lanes[i]);
}

/* Gives back what the kernel gave; requests and queues that are still held stay valid. */
void nv_engine_close(nv_engine *engine) {
  if (nv_forked(engine)) return;
  for (uint32_t i = 0; i < engine->options.lanes; i++) nv_lane_destroy(&engine->lanes[i]);
}

/* After the lanes have returned. */
void nv_engine_free(nv_engine *engine) {
  if (nv_forked(engine)) return;
  engine_unref(engine);
}

void nv_engine_counters(nv_engine *engine, nv_counters *out) {
  out->bytes_read = engine->bytes_read;
  out->bytes_written = engine->bytes_written;
  out->operations = engine->operations;
  out->direct_bytes = engine->direct_bytes;
  out->bounced_bytes = engine->bounced_bytes;
  out->buffered_bytes = engine->buffered_bytes;
  out->errors = engine->errors;
  out->cancelled = engine->cancelled;
  out->in_flight = engine->in_flight;
}

/* --- completion queues ------------------------------------------------------------------- */

nv_cq *nv_cq_new(nv_engine *engine) {
  if (nv_forked(engine)) return NULL;
  nv_cq *cq = calloc(1, sizeof *cq);
  if (!cq) return NULL;
  cq->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (cq->efd < 0) {
    free(cq);
    return NULL;
  }
  cq->engine = engine;
  atomic_init(&cq->refs, 1);
  atomic_fetch_add(&engine->refs, 1);
  return cq;
}

int nv_cq_fd(nv_cq *cq) { return cq->efd; }

static void signal_cq(nv_cq *cq) {
  uint64_t one = 1;
  ssize_t ignored = write(cq->efd, &one, sizeof one); /* full means awake already */
  (void)ignored;
}

void nv_cq_wake(nv_cq *cq) {
  nv_engine *engine = cq->engine;
  if (nv_forked(engine)) return;
  pthread_mutex_lock(&engine->mutex);
  if (!cq->closed) signal_cq(cq);
  pthread_mutex_unlock(&engine->mutex);
}

static void cq_unref(nv_cq *cq) {
  if (atomic_fetch_sub(&cq->refs, 1) == 1) free(cq);
}

/* With engine->mutex held: a request that was taken, or will never be, names no queue. */
static void leave_cq(nv_request *request) {
  nv_cq *cq = request->cq;
  request->cq = NULL;
  if (cq) cq_unref(cq);
}

/* With engine->mutex held; whether the completion queue's eventfd has to be signalled. */
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

/* Takes up to max tokens of finished requests. All under the mutex: the descriptor's number may be
 * somebody else's once the completion queue is closed. */
int nv_cq_reap(nv_cq *cq, uint64_t *tokens, int max) {
  nv_engine *engine = cq->engine;
  if (nv_forked(engine)) return 0;
  uint64_t count;
  int n = 0;
  pthread_mutex_lock(&engine->mutex);
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
  pthread_mutex_unlock(&engine->mutex);
  return n;
}

void nv_cq_close(nv_cq *cq) {
  nv_engine *engine = cq->engine;
  if (nv_forked(engine)) return;
  pthread_mutex_lock(&engine->mutex);
  int closed = cq->closed;
  cq->closed = 1;
  while (cq->head) {
    nv_request *request = cq->head;
    unlink_done(cq, request);
    leave_cq(request);
  }
  pthread_mutex_unlock(&engine->mutex);
  if (closed) return;
  while (atomic_load(&cq->signalling)) sched_yield();
  close(cq->efd);
}

void nv_cq_free(nv_cq *cq) {
  nv_engine *engine = cq->engine;
  if (nv_forked(engine)) return;
  nv_cq_close(cq);
  cq_unref(cq);
  engine_unref(engine);
}

/* --- requests ---------------------------------------------------------------------------- */

/* A request is split over the lanes where every lane gets at least two blocks of it; smaller ones
 * go to the lanes in turn. Cuts fall on whole blocks, so alignment survives. */
static uint32_t share(const nv_options *options, uint64_t span, uint64_t *step) {
  uint64_t blocks = (span + options->block_size - 1) / options->block_size;
  uint64_t parts = options->lanes;
  if (blocks < 2 * parts) parts = 1;
  *step = (blocks + parts - 1) / parts * options->block_size;
  return (uint32_t)parts;
}

nv_request *nv_prepare(nv_engine *engine, nv_cq *cq, uint64_t token, int opcode, int direct_fd,
                       int buffered_fd, uint64_t address, uint64_t nbytes, uint64_t file_offset,
                       uint64_t span_start, uint64_t span_end, uint32_t offset_alignment,
                       uint32_t memory_alignment, int bounce, int preallocate, int foreign) {
  if (nv_forked(engine)) return NULL;
  uint64_t step = 0;
  int sync = opcode == NV_FSYNC || opcode == NV_FDATASYNC;
  uint32_t nparts = sync ? 1 : share(&engine->options, span_end - span_start, &step);
  nv_request *request = calloc(1, sizeof *request + nparts * sizeof(nv_part));
  if (!request) return NULL;
  request->engine = engine;
  request->token = token;
  request->cq = cq;
  request->opcode = opcode;
  request->direct_fd = direct_fd;
  request->buffered_fd = buffered_fd;
  request->bounce = bounce;
  request->preallocate = preallocate;
  request->foreign = foreign;
  request->address = (char *)(uintptr_t)address;
  request->nbytes = nbytes;
  request->file_offset = file_offset;
  request->span_start = span_start;
  request->span_end = span_end;
  request->offset_alignment = offset_alignment;
  request->memory_alignment = memory_alignment;
  request->nparts = nparts;
  atomic_init(&request->parts_left, nparts);
  uint64_t start = span_start;
  for (uint32_t i = 0; i < nparts; i++) {
    nv_part *part = &request->parts[i];
    part->request = request;
    part->next = start;
    part->end = (sync || span_end - start <= step) ? span_end : start + step;
    start = part->end;
  }
  if (sync) request->parts[0].end = span_start + 1; /* one block of no bytes */
  request->parts[0].starts = 1;

  atomic_fetch_add(&engine->refs, 1);
  atomic_fetch_add(&cq->refs, 1);
  return request;
}

void nv_start(nv_request *request) {
  nv_engine *engine = request->engine;
  if (nv_forked(engine)) return;
  request->started = 1;
  atomic_fetch_add(&engine->in_flight, 1);
  uint32_t lane = atomic_fetch_add(&engine->next_lane, 1) % engine->options.lanes;
  nv_lane_push(&engine->lanes[lane], &request->parts[0]);
}

int nv_is_started(nv_request *request) { return request->started; }

static void request_release(nv_request *request) {
  nv_engine *engine = request->engine;
  free(request);
  engine_unref(engine);
}

/* Called once, by the lane that finished the last part: the kernel holds nothing any more. */
void nv_complete(nv_request *request) {
  nv_engine *engine = request->engine;
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

  atomic_fetch_add(request->opcode == NV_READ ? &engine->bytes_read : &engine->bytes_written,
                   result->transferred);
  atomic_fetch_add(&engine->direct_bytes, result->direct_bytes);
  atomic_fetch_add(&engine->bounced_bytes, result->bounced_bytes);
  atomic_fetch_add(&engine->buffered_bytes, result->buffered_bytes);
  atomic_fetch_add(&engine->operations, 1);
  if (result->error == ECANCELED)
    atomic_fetch_add(&engine->cancelled, 1);
  else if (result->error || !whole)
    atomic_fetch_add(&engine->errors, 1);
  if (atomic_fetch_sub(&engine->in_flight, 1) == 1 && engine->stopping) nv_engine_stop(engine);

  pthread_mutex_lock(&engine->mutex);
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
  if (engine->waiters) pthread_cond_broadcast(&engine->done_cond);
  pthread_mutex_unlock(&engine->mutex);
  if (orphan) request_release(request);
  if (signal) {
    /* Outside of the mutex: whoever wakes up wants it at once. */
    signal_cq(signal);
    atomic_fetch_sub(&signal->signalling, 1);
  }
}

void nv_cancel(nv_request *request) {
  if (nv_forked(request->engine)) return;
  atomic_store(&request->cancelled, 1);
  atomic_store(&request->stop, 1);
}

int nv_is_done(nv_request *request) {
  nv_engine *engine = request->engine;
  if (nv_forked(engine)) return 0;
  return request->done;
}

int nv_wait(nv_request *request, double timeout_s) {
  nv_engine *engine = request->engine;
  if (nv_forked(engine)) return 0;
  if (request->done || timeout_s <= 0) return request->done;
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  long long ns = until.tv_nsec + (long long)(timeout_s * 1e9);
  until.tv_sec += ns / 1000000000;
  until.tv_nsec = ns % 1000000000;
  pthread_mutex_lock(&engine->mutex);
  engine->waiters++;
  while (!request->done &&
         pthread_cond_timedwait(&engine->done_cond, &engine->mutex, &until) != ETIMEDOUT) {
  }
  engine->waiters--;
  int done = request->done;
  pthread_mutex_unlock(&engine->mutex);
  return done;
}

/* From now on (or, if it is done and not yet reaped, at once) the request completes at `cq`. */
void nv_move(nv_request *request, nv_cq *cq) {
  nv_engine *engine = request->engine;
  if (nv_forked(engine)) return;
  pthread_mutex_lock(&engine->mutex);
  nv_cq *old = request->cq;
  if (old != cq && (!request->done || request->linked)) {
    if (request->linked) unlink_done(old, request);
    leave_cq(request);
    request->cq = cq;
    atomic_fetch_add(&cq->refs, 1);
    if (request->done && !cq->closed && link_done(cq, request)) signal_cq(cq);
  }
  pthread_mutex_unlock(&engine->mutex);
}

int64_t nv_moved(nv_request *request) {
  const nv_result *result = &request->result;
  return result->error ? -(int64_t)result->error : (int64_t)result->transferred;
}

const nv_result *nv_request_result(nv_request *request) { return &request->result; }

void nv_request_free(nv_request *request) {
  nv_engine *engine = request->engine;
  if (nv_forked(engine)) return;
  pthread_mutex_lock(&engine->mutex);
  int done = request->done || !request->started;
  if (done) {
    if (request->linked) unlink_done(request->cq, request);
    leave_cq(request);
  } else {
    request->orphan = 1;
  }
  pthread_mutex_unlock(&engine->mutex);
  if (done) request_release(request);
}
