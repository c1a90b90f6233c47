/* A gather or scatter as a request: what it asks for beside what a lane does for any other.
 *
 * Sorting a million rows takes tens of milliseconds, and writing their edges waits for the page cache;
 * neither the caller's thread nor a lane, which has other requests to serve, has that time. So both
 * are done by a thread of their own: the first hands the request to its lane, the second ends it.
 * Like every request such a thread holds a reference to the engine. After fork() it does not exist. */
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>

/* So many rows are sorted in less time than a thread needs to begin. */
#define FEW 2048
/* A lane is not woken for less. */
#define ROWS_PER_LANE 64

nv_request *nv_prepare_rows(nv_engine *engine, nv_cq *cq, uint64_t token, int opcode, int direct_fd,
                            int buffered_fd, uint64_t address, uint64_t count, uint64_t row_bytes,
                            uint64_t offsets, uint32_t offset_alignment, uint32_t memory_alignment,
                            int foreign) {
  if (nv_forked(&engine->common)) return NULL;
  uint32_t nparts = count < ROWS_PER_LANE * engine->options.lanes ? 1 : engine->options.lanes;
  nv_rows *rows =
      nv_rows_new(opcode, address, count, row_bytes, offsets, engine->options.block_size,
                  offset_alignment, memory_alignment, direct_fd >= 0, foreign, nparts);
  if (!rows) return NULL;
  nv_request *request = nv_request_new(&engine->common, cq, token, nparts);
  if (!request) {
    nv_rows_free(rows);
    return NULL;
  }
  request->rows = rows;
  request->opcode = opcode;
  request->direct_fd = direct_fd;
  request->buffered_fd = buffered_fd;
  request->foreign = foreign;
  request->nbytes = count * row_bytes;
  request->offset_alignment = offset_alignment;
  request->memory_alignment = memory_alignment;
  return request;
}

/* Has a thread do it; 0 if there is none to be had. */
static int aside(void *(*work)(void *), void *argument) {
  pthread_attr_t attributes;
  pthread_t thread;
  sigset_t all, before;
  if (pthread_attr_init(&attributes)) return 0;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigfillset(&all); /* signals are for threads that know what to do with them */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failure = pthread_create(&thread, &attributes, work, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return !failure;
}

typedef struct {
  nv_request *request;
  nv_lane *lane;
} planning;

static void *plan(void *argument) {
  planning it = *(planning *)argument;
  nv_common *common = it.request->common;
  free(argument);
  nv_rows_begin(it.request);
  nv_lane_push(it.lane, &it.request->parts[0]); /* which may have ended it when this returns */
  nv_common_unref(common);
  return NULL;
}

/* 0: the lane is to do it. */
int nv_rows_plan_aside(nv_request *request, nv_lane *lane) {
  nv_common *common = request->common;
  planning *it;
  if (nv_rows_count(request->rows) <= FEW || !(it = malloc(sizeof *it))) return 0;
  *it = (planning){request, lane};
  atomic_fetch_add(&common->refs, 1);
  if (aside(plan, it)) return 1;
  atomic_fetch_sub(&common->refs, 1); /* not the last: the request has one */
  free(it);
  return 0;
}

static void conclude(nv_request *request) {
  nv_common *common = request->common;
  const nv_rows_result *result = nv_rows_conclude(request->rows, request->error);
  request->error = result->error;
  if (!result->error || nv_rows_is_theirs(request, result->error)) { /* else it is done again */
    atomic_fetch_add(&common->rows, result->whole);
    atomic_fetch_add(&common->row_blocks, result->blocks);
    atomic_fetch_add(&common->row_bytes_saved, result->saved_bytes);
  }
  nv_finish(request);
}

static void write_edges(nv_request *request) {
  uint64_t written = nv_rows_write_edges(request->rows, request->buffered_fd);
  request->transferred += written;
  request->buffered_bytes += written;
}

static void *end(void *argument) {
  nv_request *request = argument;
  nv_common *common = request->common;
  write_edges(request);
  conclude(request);
  nv_common_unref(common);
  return NULL;
}

/* All blocks are done. */
void nv_rows_end(nv_request *request) {
  nv_common *common = request->common;
  int edges = request->opcode == NV_WRITE && !request->stop && nv_rows_has_edges(request->rows);
  if (edges) {
    atomic_fetch_add(&common->refs, 1);
    if (aside(end, request)) return;
    atomic_fetch_sub(&common->refs, 1);
    write_edges(request);
  }
  conclude(request);
}
