/* An engine: its lanes, and how requests get to them, and end. It stands above all others: see the
 * layers in internal.h. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

/* --- engine ------------------------------------------------------------------------------ */

static void destroy(nv_common *common) {
  nv_engine *engine = (nv_engine *)common;
  for (uint32_t i = 0; i < engine->options.lanes; i++) nv_lane_destroy(&engine->lanes[i]);
  free(engine->lanes);
  free(engine);
}

/* The lanes are through with a request. */
static void over(nv_request *request) {
  if (request->rows)
    nv_rows_end(request);
  else
    nv_finish(request);
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
  nv_common_init(&engine->common, destroy, over);
  for (uint32_t i = 0; i < options->lanes; i++) {
    int failure = nv_lane_init(&lanes[i], engine, i);
    if (failure) {
      *error = -failure;
      engine->options.lanes = i; /* those that exist */
      nv_common_unref(&engine->common);
      return NULL;
    }
  }
  *error = 0;
  return engine;
}

void nv_engine_stop(nv_engine *engine) {
  if (nv_forked(&engine->common)) return;
  atomic_store(&engine->stopping, 1);
  nv_lanes_wake(engine);
}

/* Gives back what the kernel gave; requests and queues that are still held stay valid. */
void nv_engine_close(nv_engine *engine) {
  if (nv_forked(&engine->common)) return;
  for (uint32_t i = 0; i < engine->options.lanes; i++) nv_lane_destroy(&engine->lanes[i]);
}

/* After the lanes have returned. */
void nv_engine_free(nv_engine *engine) {
  if (nv_forked(&engine->common)) return;
  nv_common_unref(&engine->common);
}

void nv_engine_counters(nv_engine *engine, nv_counters *out) {
  const nv_common *common = &engine->common;
  out->bytes_read = common->bytes_read;
  out->bytes_written = common->bytes_written;
  out->operations = common->operations;
  out->direct_bytes = common->direct_bytes;
  out->bounced_bytes = common->bounced_bytes;
  out->buffered_bytes = common->buffered_bytes;
  out->errors = common->errors;
  out->cancelled = common->cancelled;
  out->in_flight = common->in_flight;
  out->rows = common->rows;
  out->row_blocks = common->row_blocks;
  out->row_bytes_saved = common->row_bytes_saved;
}

/* --- submission -------------------------------------------------------------------------- */

nv_request *nv_prepare(nv_engine *engine, nv_cq *cq, uint64_t token, int opcode, int direct_fd,
                       int buffered_fd, uint64_t address, uint64_t nbytes, uint64_t file_offset,
                       uint64_t span_start, uint64_t span_end, uint32_t offset_alignment,
                       uint32_t memory_alignment, int bounce, int preallocate, int foreign) {
  if (nv_forked(&engine->common)) return NULL;
  nv_transfer transfer = {
      .opcode = opcode,
      .direct_fd = direct_fd,
      .buffered_fd = buffered_fd,
      .address = address,
      .nbytes = nbytes,
      .file_offset = file_offset,
      .span_start = span_start,
      .span_end = span_end,
      .offset_alignment = offset_alignment,
      .memory_alignment = memory_alignment,
      .bounce = bounce,
      .preallocate = preallocate,
      .foreign = foreign,
  };
  nv_request *request = nv_lay_out(&engine->common, &engine->options, &transfer);
  if (request) nv_request_adopt(request, cq, token);
  return request;
}

void nv_start(nv_request *request) {
  nv_engine *engine = (nv_engine *)request->common;
  if (nv_forked(&engine->common)) return;
  if (atomic_exchange(&request->started, 1)) return;
  if (request->batch) {
    nv_batch_start(engine, request);
    return;
  }
  atomic_fetch_add(&engine->common.in_flight, 1);
  uint32_t index = atomic_fetch_add(&engine->next_lane, 1) % engine->options.lanes;
  nv_lane *lane = &engine->lanes[index];
  if (!request->rows || !nv_rows_plan_aside(request, lane)) nv_lane_push(lane, &request->parts[0]);
}

/* --- short pieces ------------------------------------------------------------------------ */

int nv_short_prepare(nv_short *piece, const nv_place *place, nv_cq *cq, uint64_t token,
                     uint64_t flag) {
  nv_common *common = &place->engine->common;
  if (nv_forked(common)) return -ENOMEM;
  nv_request *request = nv_request_new(common, cq, token, 1);
  if (!request) return -ENOMEM;
  piece->request = request;
  request->holds = 1;
  nv_hold_flag(&request->hold, flag);
  return request->hold.held != NULL;
}

/* As `plan` in engines/transfers.py, for what is given to it: one block at most, and no edges. */
void nv_short_start(nv_short *piece, const nv_place *place, uint64_t address, uint64_t nbytes,
                    uint64_t file_offset, int foreign) {
  uint64_t unit = place->offset_alignment, end = file_offset + nbytes;
  nv_transfer transfer = {
      .opcode = place->opcode,
      .direct_fd = place->direct_fd,
      .buffered_fd = place->buffered_fd,
      .address = address,
      .nbytes = nbytes,
      .file_offset = file_offset,
      .span_start = file_offset / unit * unit,
      .span_end = (end + unit - 1) / unit * unit,
      .offset_alignment = place->offset_alignment,
      .memory_alignment = place->memory_alignment,
      .preallocate = place->opcode == NV_WRITE && place->direct_fd >= 0,
      .foreign = foreign,
  };
  if (nv_forked(piece->request->common)) return;
  nv_fill_in(piece->request, &transfer, transfer.span_end - transfer.span_start);
  nv_start(piece->request);
}

int64_t nv_short_moved(nv_short *piece) { return nv_moved(piece->request); }

void nv_short_let_go(nv_short *piece) {
  if (piece->request) nv_unhold(&piece->request->hold);
}

void nv_short_end(nv_short *piece) {
  nv_request *request = piece->request;
  piece->request = NULL;
  if (request) nv_request_free(request);
}
