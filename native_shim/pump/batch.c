/* A batch: many transfers that are one request to whoever waits for it.
 *
 * Its members are requests like any other, but that nobody else knows: they belong to the batch, name no
 * completion queue, and the last of them to end ends the batch. Only as many as keep the lanes busy are given to
 * them at first, and then one for each that ends: lanes serve requests in turn, and a single transfer that
 * comes meanwhile does not wait for a whole batch. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

/* Members that follow one another into one file have its blocks allocated at once, by the first: one by one, in
 * any order, they would leave holes between them, which are filled synchronously. As for rows, not where they
 * lie far from each other. */
static void grow_together(nv_batch *batch) {
  for (uint64_t i = 0, j; i < batch->count; i = j) {
    nv_request *first = batch->members[i];
    uint64_t from = first->grow_from, end = first->grow_end, sum = 0;
    for (j = i; j < batch->count && batch->members[j]->direct_fd == first->direct_fd; j++) {
      nv_request *member = batch->members[j];
      if (member->grow_from < from) from = member->grow_from;
      if (member->grow_end > end) end = member->grow_end;
      sum += member->nbytes;
    }
    if (!first->preallocate || sum < (end - from) / 2) continue;
    first->grow_from = from;
    first->grow_end = end;
    for (uint64_t k = i + 1; k < j; k++) batch->members[k]->preallocate = 0;
  }
}

nv_request *nv_prepare_batch(nv_engine *engine, nv_cq *cq, uint64_t token,
                             const nv_transfer *transfers, uint64_t count) {
  if (nv_forked(&engine->common)) return NULL;
  nv_request *request = nv_request_new(&engine->common, cq, token, 1);
  if (!request) return NULL;
  nv_batch *batch = calloc(1, sizeof *batch + count * sizeof *batch->members);
  request->batch = batch;
  for (uint64_t i = 0; batch && i < count; i++) {
    nv_request *member = nv_lay_out(&engine->common, &engine->options, &transfers[i]);
    if (!member) break;
    member->whole = request;
    batch->members[batch->count++] = member;
    request->nbytes += member->nbytes;
  }
  if (!batch || batch->count < count) {
    nv_request_free(request);
    return NULL;
  }
  atomic_init(&batch->left, count);
  grow_together(batch);
  return request;
}

static nv_lane *next_lane(nv_engine *engine) {
  return &engine->lanes[atomic_fetch_add(&engine->next_lane, 1) % engine->options.lanes];
}

/* All that are begun now are handed over at once, or a lane that wakes up would submit them one by one. */
void nv_batch_start(nv_engine *engine, nv_request *request) {
  nv_batch *batch = request->batch;
  uint32_t lanes = engine->options.lanes;
  uint64_t count = batch->count, begun = 2ull * engine->options.queue_depth * lanes;
  if (begun > count) begun = count;
  if (!count) {
    nv_report(request);
    return;
  }
  atomic_fetch_add(&engine->common.in_flight, count);
  atomic_store(&batch->next, begun);
  for (uint32_t i = 0; i < lanes && i < begun; i++) {
    nv_part *earliest = &batch->members[i]->parts[0], *latest = earliest;
    for (uint64_t k = i + lanes; k < begun; k += lanes) {
      nv_part *part = &batch->members[k]->parts[0];
      part->following = latest;
      latest = part;
    }
    nv_lane_push_all(next_lane(engine), earliest, latest);
  }
}

/* The first error of its members; that some were cancelled, where there is none. */
static void sum_up(nv_request *request) {
  nv_result *sum = &request->result;
  int cancelled = 0;
  for (uint64_t i = 0; i < request->batch->count; i++) {
    const nv_result *one = &request->batch->members[i]->result;
    if (one->error == ECANCELED)
      cancelled = ECANCELED;
    else if (!sum->error)
      sum->error = one->error;
    sum->transferred += one->transferred;
    sum->direct_bytes += one->direct_bytes;
    sum->bounced_bytes += one->bounced_bytes;
    sum->buffered_bytes += one->buffered_bytes;
  }
  if (!sum->error) sum->error = cancelled;
}

/* One of its members is over, and counted. */
static void landed(nv_engine *engine, nv_request *request) {
  nv_batch *batch = request->batch;
  uint64_t next = atomic_fetch_add(&batch->next, 1);
  if (next < batch->count) nv_lane_push(next_lane(engine), &batch->members[next]->parts[0]);
  if (atomic_fetch_sub(&batch->left, 1) != 1) return;
  sum_up(request);
  nv_report(request);
}

/* By whichever thread was the last to do something for it. */
void nv_finish(nv_request *request) {
  nv_engine *engine = (nv_engine *)request->common;
  int idle = nv_count(request);
  if (request->whole)
    landed(engine, request->whole);
  else
    nv_report(request);
  if (idle && engine->stopping) nv_lanes_wake(engine);
}

const nv_result *nv_batch_result(nv_request *request, uint64_t member) {
  return &request->batch->members[member]->result;
}
