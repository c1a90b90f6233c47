/* An engine: its lanes, and how requests get to them. It stands above both: request.c knows neither
 * lanes nor engine, lane.c calls nothing here. */
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
  nv_common_init(&engine->common, destroy);
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
static void lay_out(nv_request *request, const nv_transfer *transfer, uint64_t step) {
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
nv_request *nv_lay_out(nv_engine *engine, const nv_transfer *transfer) {
  uint64_t step = 0;
  int sync = transfer->opcode == NV_FSYNC || transfer->opcode == NV_FDATASYNC;
  uint64_t span = transfer->span_end - transfer->span_start;
  uint32_t nparts = sync ? 1 : share(&engine->options, span, &step);
  nv_request *request = nv_request_alloc(&engine->common, nparts);
  if (request) lay_out(request, transfer, step);
  return request;
}

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
  nv_request *request = nv_lay_out(engine, &transfer);
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

/* As `plan` in _transfer.py, for what is given to it: one block at most, and no edges. */
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
  lay_out(piece->request, &transfer, transfer.span_end - transfer.span_start);
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
