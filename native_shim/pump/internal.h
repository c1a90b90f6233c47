/* Structures shared by the pump's own files. */
#ifndef NVMEIO_PUMP_INTERNAL_H
#define NVMEIO_PUMP_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "../common/decl.h"
#include "decl.h"

/* --- kaio.c ------------------------------------------------------------------------------ */

/* libaio's functions return -errno; so do ours. libaio's iocb and io_event have the kernel's
 * layout (aio_abi.h), which is why the kernel's header is all that is needed to build. */
struct nv_kaio {
  int (*setup)(int nr_events, aio_context_t *);
  int (*destroy)(aio_context_t);
  int (*submit)(aio_context_t, long nr, struct iocb **);
  int (*getevents)(aio_context_t, long min_nr, long nr, struct io_event *, struct timespec *);
  char path[512];
};

/* --- requests ---------------------------------------------------------------------------- */

enum { NV_READ = 0, NV_WRITE = 1, NV_FSYNC = 2, NV_FDATASYNC = 3 };

/* One lane's share of a request: the file range [next, end) that is still to be issued. */
typedef struct nv_part {
  nv_request *request;
  struct nv_part *prev, *following; /* in the lane's ring or inbox */
  uint64_t next, end;
  uint32_t inflight; /* blocks issued and not yet completed */
  int starts;        /* the first part: its lane starts the request */
  nv_block block;    /* of rows: the next one, if it is known; then `next` and `end` are 0 and 1 */
  int has_block;
} nv_part;

/* The members of a batch. */
typedef struct {
  uint64_t count;
  atomic_ullong next; /* the members before it were given to lanes */
  atomic_ullong left; /* members that are not over */
  nv_request *members[];
} nv_batch;

/* What the requests and completion queues of one engine share; its first member. */
typedef struct nv_common {
  unsigned generation; /* of forks: another one means that our threads do not exist here */
  atomic_uint refs;    /* the engine's owner, every request, every completion queue */
  void (*last_out)(struct nv_common *);
  void (*over)(nv_request *); /* by a lane: all its blocks are done */
  pthread_mutex_t mutex;
  pthread_cond_t done_cond;
  uint32_t waiters;
  atomic_ullong bytes_read, bytes_written, operations, direct_bytes, bounced_bytes,
      buffered_bytes, errors, cancelled, in_flight, rows, row_blocks, row_bytes_saved;
} nv_common;

struct nv_request {
  nv_result result; /* valid once done is set */
  nv_common *common;
  uint64_t token;

  /* guarded by common->mutex */
  nv_cq *cq;
  nv_request *done_prev, *done_next;
  int linked; /* in completion queue's done list */
  int orphan; /* freed by its owner before it was done: the lane frees it */
  atomic_int started;
  atomic_int done; /* written with the mutex held, looked at without */

  /* the transfer, constant after nv_prepare */
  int opcode, direct_fd, buffered_fd, bounce, preallocate, foreign;
  char *address;
  uint64_t nbytes, file_offset, span_start, span_end;
  uint32_t offset_alignment, memory_alignment;
  uint64_t grow_from, grow_end; /* what is allocated for the file to grow */
  nv_batch *batch;              /* its members; NULL: it is no batch */
  nv_request *whole;            /* the batch that it is a member of, or NULL */
  nv_hold hold;  /* of the memory */
  int holds;     /* there may be one */
  nv_rows *rows; /* NULL: one span */
  int planned;   /* the rows are sorted, or it is known why not */

  /* written by several lanes */
  atomic_int stop; /* issue no further block: cancelled or failed */
  atomic_int cancelled;
  atomic_int error;
  atomic_uint parts_left;
  atomic_ullong transferred, direct_bytes, bounced_bytes, buffered_bytes;

  uint32_t nparts;
  nv_part parts[];
};

/* Where finished requests wait to be reaped by one consumer, who sleeps on an eventfd. */
struct nv_cq {
  nv_common *common;
  int efd;
  atomic_uint refs;       /* the owner, and every request that names this queue */
  atomic_uint signalling; /* lanes that are about to write to efd */
  /* guarded by common->mutex */
  nv_request *head, *tail;
  int signalled;
  int closed;
};

/* --- lanes ------------------------------------------------------------------------------- */

/* One block in the kernel (or about to be): an iocb and what it moves. */
typedef struct {
  struct iocb cb;
  nv_part *part;
  uint64_t offset;
  char *memory;
  uint32_t nbytes;
  uint32_t done;   /* of nbytes, by earlier short transfers */
  int32_t bounce;  /* index of the bounce block, or -1 */
  nv_block block;  /* of rows */
} nv_slot;

typedef struct {
  nv_engine *engine;
  uint32_t index;
  aio_context_t context;
  atomic_int efd;    /* signalled by the kernel per completion, and by whoever fills the inbox */
  atomic_int waking; /* who is about to signal it, for whoever closes it */

  _Atomic(nv_part *) inbox; /* pushed by anybody, taken whole by the lane: latest first */
  atomic_int asleep;

  /* only the lane's thread touches what follows */
  nv_part *ring; /* circular; the next part to issue a block */
  nv_slot *slots;
  uint32_t *free_slots, nfree;
  struct iocb **pending; /* prepared, not yet taken by io_submit */
  uint32_t npending, inflight;
  struct io_event *events;
  char *bounce_base;
  void *bounce_mapping;
  uint64_t bounce_mapped;
  uint32_t *free_bounce, nfree_bounce;
  struct timespec refused_since; /* io_submit says EAGAIN with nothing in flight */
  uint64_t last_event_ns, gap_ns; /* the usual time between completions, a moving average */
} nv_lane;

struct nv_engine {
  nv_common common;
  const nv_kaio *kaio;
  nv_options options;
  nv_lane *lanes;
  atomic_uint next_lane;
  atomic_int stopping;
};

/* The files in their order: each calls functions of files above it only (tests/native checks it). A lane
 * reports a finished request through `nv_common.over`. decl.h has the functions that Python calls too. */

/* kaio.c, own_fds.c, replace.c and hold.c call none of ours. */
/* file_facts.c */
int nv_allocate(int fd, uint64_t from, uint64_t end);
/* copy.c */
/* rows.c */
uint64_t nv_rows_count(const nv_rows *);
/* request.c */
int nv_forked(const nv_common *);
void nv_common_init(nv_common *, void (*last_out)(nv_common *), void (*over)(nv_request *));
void nv_common_unref(nv_common *);
nv_request *nv_request_alloc(nv_common *, uint32_t nparts);
void nv_request_adopt(nv_request *, nv_cq *, uint64_t token);
nv_request *nv_request_new(nv_common *, nv_cq *, uint64_t token, uint32_t nparts);
void nv_fill_in(nv_request *, const nv_transfer *, uint64_t step);
nv_request *nv_lay_out(nv_common *, const nv_options *, const nv_transfer *);
void nv_rows_begin(nv_request *);
int nv_rows_is_theirs(const nv_request *, int error);
int nv_count(nv_request *);
void nv_report(nv_request *);
/* lane.c */
int nv_lane_init(nv_lane *, nv_engine *, uint32_t index);
void nv_lane_destroy(nv_lane *);
void nv_lane_push(nv_lane *, nv_part *);
void nv_lane_push_all(nv_lane *, nv_part *earliest, nv_part *latest);
void nv_lanes_wake(nv_engine *);
/* batch.c */
void nv_batch_start(nv_engine *, nv_request *);
void nv_finish(nv_request *);
/* rows_request.c */
int nv_rows_plan_aside(nv_request *, nv_lane *);
void nv_rows_end(nv_request *);
/* engine.c */

#endif
