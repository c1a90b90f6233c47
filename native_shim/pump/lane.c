/* The pump: one lane's thread keeps the kernel's queue full and never takes the GIL.
 *
 * A lane owns an AIO context of queue_depth events. Requests reach it as parts, through an inbox;
 * it issues one block of each part in turn (round robin, so that a 4 KiB read does not wait for
 * the end of a 1 GiB one), continues short transfers, and completes a request when its last part
 * is done. It sleeps in read(2) on an eventfd that the kernel signals per completion
 * (IOCB_FLAG_RESFD) and that a submitter signals when it finds the lane asleep.
 *
 * A block's way: slot taken → memory chosen (the tensor's own, or a bounce block) → pending →
 * io_submit → event → continued, failed, or accounted → slot free. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The bounce arena starts on a huge page's boundary, so that every 2 MiB of it can be one. */
#define HUGE_PAGE (2u << 20)
/* io_submit keeps saying EAGAIN with nothing of ours in flight: the kernel is out of something
 * that we cannot wait for. Give up, with EAGAIN as the error, rather than hang. */
#define REFUSED_LIMIT_S 10
/* Waking a sleeping thread costs 5 us, and 20 or more where that means waking a virtual CPU, paid by
 * the submitter's thread, which is the event loop. So while completions follow one another faster
 * than this, as small transfers do, the lane watches for the next one instead of sleeping. Big
 * blocks come hundreds of microseconds apart and never make it spin. */
#define SPIN_NS 30000

/* --- life -------------------------------------------------------------------------------- */

int nv_lane_init(nv_lane *lane, nv_engine *engine, uint32_t index) {
  uint32_t depth = engine->options.queue_depth;
  lane->engine = engine;
  lane->index = index;
  lane->efd = eventfd(0, EFD_CLOEXEC);
  int failure = lane->efd < 0 ? -errno : engine->kaio->setup((int)depth, &lane->context);
  if (failure) lane->context = 0;
  lane->slots = calloc(depth, sizeof *lane->slots);
  lane->free_slots = calloc(depth, sizeof *lane->free_slots);
  lane->pending = calloc(depth, sizeof *lane->pending);
  lane->events = calloc(depth, sizeof *lane->events);
  lane->free_bounce = calloc(depth, sizeof *lane->free_bounce);
  if (!failure && !(lane->slots && lane->free_slots && lane->pending && lane->events &&
                    lane->free_bounce))
    failure = -ENOMEM;
  if (failure) {
    nv_lane_destroy(lane);
    return failure;
  }
  for (uint32_t i = 0; i < depth; i++) lane->free_slots[lane->nfree++] = depth - 1 - i;
  return 0;
}

/* The thread has returned, but others may be on their way out of nv_lane_push or nv_lanes_wake. */
void nv_lane_destroy(nv_lane *lane) {
  if (lane->context) lane->engine->kaio->destroy(lane->context);
  if (lane->bounce_mapping) munmap(lane->bounce_mapping, lane->bounce_mapped);
  int efd = atomic_exchange(&lane->efd, -1);
  while (atomic_load(&lane->waking)) sched_yield();
  if (efd >= 0) close(efd);
  free(lane->slots);
  free(lane->free_slots);
  free(lane->pending);
  free(lane->events);
  free(lane->free_bounce);
  lane->context = 0;
  lane->bounce_mapping = lane->bounce_base = NULL;
  lane->slots = NULL;
  lane->free_slots = lane->free_bounce = NULL;
  lane->pending = NULL;
  lane->events = NULL;
}

/* What wakes it may be done, and the lane closed, before this is through: a number that is read while
 * `waking` is up is not closed before it is down. */
static void wake(nv_lane *lane) {
  uint64_t one = 1;
  atomic_fetch_add(&lane->waking, 1);
  int efd = atomic_load(&lane->efd);
  while (efd >= 0 && write(efd, &one, sizeof one) < 0 && errno == EINTR) {
  }
  atomic_fetch_sub(&lane->waking, 1);
}

void nv_lanes_wake(nv_engine *engine) {
  for (uint32_t i = 0; i < engine->options.lanes; i++) wake(&engine->lanes[i]);
}

/* --- inbox and ring ---------------------------------------------------------------------- */

/* Several at once: `following` leads from the latest to the earliest. */
void nv_lane_push_all(nv_lane *lane, nv_part *earliest, nv_part *latest) {
  earliest->following = atomic_load(&lane->inbox);
  while (!atomic_compare_exchange_weak(&lane->inbox, &earliest->following, latest)) {
  }
  /* The lane sets asleep before its last look at the inbox; one of us sees the other. */
  if (atomic_exchange(&lane->asleep, 0)) wake(lane);
}

void nv_lane_push(nv_lane *lane, nv_part *part) { nv_lane_push_all(lane, part, part); }

/* What has been pushed, first come first. */
static nv_part *take_inbox(nv_lane *lane) {
  nv_part *latest = NULL, *first = NULL;
  if (atomic_load(&lane->inbox)) latest = atomic_exchange(&lane->inbox, NULL);
  while (latest) {
    nv_part *earlier = latest->following;
    latest->following = first;
    first = latest;
    latest = earlier;
  }
  return first;
}

/* Behind all others, which is just before the one whose turn it is. */
static void ring_insert(nv_lane *lane, nv_part *part) {
  if (!lane->ring) {
    lane->ring = part->prev = part->following = part;
    return;
  }
  part->following = lane->ring;
  part->prev = lane->ring->prev;
  part->prev->following = part;
  lane->ring->prev = part;
}

static void ring_remove(nv_lane *lane, nv_part *part) {
  part->prev->following = part->following;
  part->following->prev = part->prev;
  if (lane->ring == part) lane->ring = part->following == part ? NULL : part->following;
  part->following = NULL; /* says that the part is in no ring */
}

/* --- a request's beginning and end --------------------------------------------------------- */

static uint64_t user_end(const nv_request *request) {
  return request->file_offset + request->nbytes;
}

static void fail(nv_request *request, int error) {
  int none = 0;
  atomic_compare_exchange_strong(&request->error, &none, error);
  atomic_store(&request->stop, 1);
}

/* On ext4 and xfs a direct write that extends a file is synchronous inside io_submit; allocated
 * first, it is as parallel as an overwrite. A refusal (no such call, no space) is not an error
 * here: the writes themselves will tell, with the bytes that got through. */
static void preallocate(nv_request *request) {
  struct stat st;
  uint64_t end = request->grow_end;
  int fd = request->direct_fd >= 0 ? request->direct_fd : request->buffered_fd;
  if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size >= end) return;
  uint64_t from = (uint64_t)st.st_size > request->grow_from ? (uint64_t)st.st_size
                                                             : request->grow_from;
  request->result.preallocated = nv_allocate(fd, from, end);
}

/* A write's bytes before and behind its direct span, through the page cache. */
static void write_buffered(nv_request *request, uint64_t from, uint64_t to) {
  while (from < to && !request->stop) {
    ssize_t n = pwrite(request->buffered_fd, request->address + (from - request->file_offset),
                       to - from, (off_t)from);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      fail(request, n < 0 ? errno : EIO);
      return;
    }
    from += (uint64_t)n;
    request->transferred += (uint64_t)n;
    request->buffered_bytes += (uint64_t)n;
  }
}

static void finish_part(nv_part *part) {
  nv_request *request = part->request;
  if (atomic_fetch_sub(&request->parts_left, 1) != 1) return;
  if (request->opcode == NV_WRITE && !request->rows) {
    /* Behind the direct blocks, not before: a dirty page beside their span would make the
     * kernel write it back first. */
    write_buffered(request, request->file_offset, request->span_start);
    write_buffered(request, request->span_end, user_end(request));
  }
  request->common->over(request);
}

static void start_part(nv_lane *lane, nv_part *part) {
  nv_request *request = part->request;
  if (part->starts) {
    part->starts = 0;
    if (request->rows) nv_rows_begin(request);
    if (request->preallocate && !request->stop) preallocate(request);
    uint32_t lanes = lane->engine->options.lanes;
    for (uint32_t i = 1; i < request->nparts; i++)
      nv_lane_push(&lane->engine->lanes[(lane->index + i) % lanes], &request->parts[i]);
  }
  if (part->next < part->end && !request->stop)
    ring_insert(lane, part);
  else
    finish_part(part);
}

/* --- bounce blocks ----------------------------------------------------------------------- */

static int open_bounce(nv_lane *lane) {
  const nv_options *options = &lane->engine->options;
  uint64_t size = options->bounce_blocks * options->block_size + HUGE_PAGE;
  void *mapping = mmap(NULL, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return 0;
  madvise(mapping, size, MADV_HUGEPAGE);
  /* A child of fork() has no business here, and would make these pages copy-on-write. */
  madvise(mapping, size, MADV_DONTFORK);
  lane->bounce_mapping = mapping;
  lane->bounce_mapped = size;
  lane->bounce_base =
      (char *)(((uintptr_t)mapping + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
  for (uint32_t i = options->bounce_blocks; i-- > 0;)
    lane->free_bounce[lane->nfree_bounce++] = i;
  return 1;
}

/* The part of a block that lies within the caller's tensor. */
static void user_share(const nv_slot *slot, uint64_t *from, uint64_t *to) {
  const nv_request *request = slot->part->request;
  *from = slot->offset > request->file_offset ? slot->offset : request->file_offset;
  *to = slot->offset + slot->nbytes;
  if (*to > user_end(request)) *to = user_end(request);
}

/* Copies between a bounce block and the caller's memory, which may not be there: then 0. */
static int copy(nv_request *request, char *block, char *theirs, uint64_t nbytes) {
  int into = request->opcode == NV_READ;
  if (!request->foreign)
    memcpy(into ? theirs : block, into ? block : theirs, nbytes);
  else if (nv_copy_foreign(block, theirs, nbytes, into)) {
    fail(request, EFAULT);
    return 0;
  }
  return 1;
}

/* --- blocks ------------------------------------------------------------------------------ */

static void enqueue(nv_lane *lane, nv_slot *slot) {
  struct iocb *cb = &slot->cb;
  const nv_request *request = slot->part->request;
  memset(cb, 0, sizeof *cb);
  cb->aio_data = (uint64_t)(slot - lane->slots);
  cb->aio_flags = IOCB_FLAG_RESFD;
  cb->aio_resfd = (uint32_t)lane->efd;
  cb->aio_fildes = (uint32_t)(request->direct_fd >= 0 ? request->direct_fd
                                                      : request->buffered_fd);
  switch (request->opcode) {
    case NV_FSYNC: cb->aio_lio_opcode = IOCB_CMD_FSYNC; break;
    case NV_FDATASYNC: cb->aio_lio_opcode = IOCB_CMD_FDSYNC; break;
    default:
      cb->aio_lio_opcode = request->opcode == NV_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
      cb->aio_buf = (uint64_t)(uintptr_t)(slot->memory + slot->done);
      cb->aio_nbytes = slot->nbytes - slot->done;
      cb->aio_offset = (int64_t)(slot->offset + slot->done);
      if (request->opcode == NV_READ && slot->bounce < 0)
        nv_give_up(cb->aio_buf, cb->aio_nbytes);
  }
  lane->pending[lane->npending++] = cb;
}

/* Whether a block of a span cannot go between the drive and the caller's memory. */
static int must_bounce(const nv_request *request, uint64_t offset, uint64_t nbytes, char *memory) {
  return request->opcode <= NV_WRITE && request->direct_fd >= 0 &&
         (request->bounce || offset < request->file_offset || offset + nbytes > user_end(request) ||
          (uintptr_t)memory % request->memory_alignment);
}

/* What of the part's rows comes next; 0 if nothing does. */
static int next_of_rows(nv_part *part) {
  nv_request *request = part->request;
  uint32_t index = (uint32_t)(part - request->parts);
  if (!part->has_block) part->has_block = nv_rows_next(request->rows, index, &part->block);
  part->next = !part->has_block && !nv_rows_more(request->rows, index);
  return part->has_block;
}

static int fill_block(nv_part *part, char *block, char *memory, uint64_t nbytes) {
  nv_request *request = part->request;
  if (!request->rows) return copy(request, block, memory, nbytes);
  int failure = -nv_rows_collect(request->rows, &part->block, block);
  if (failure) fail(request, failure);
  return !failure;
}

/* Issues the next block of a part. 0: it must wait for a bounce block. */
static int issue(nv_lane *lane, nv_part *part) {
  nv_request *request = part->request;
  if (request->rows && !next_of_rows(part)) return 1;
  uint64_t offset = request->rows ? part->block.offset : part->next;
  uint64_t nbytes = request->rows ? part->block.nbytes : part->end - part->next;
  if (nbytes > lane->engine->options.block_size) nbytes = lane->engine->options.block_size;
  char *memory = request->rows ? (char *)(uintptr_t)part->block.address
                               : request->address + (int64_t)(offset - request->file_offset);
  int32_t bounce = -1;
  if (request->rows ? !memory : must_bounce(request, offset, nbytes, memory)) {
    if (!lane->bounce_base && !open_bounce(lane)) {
      fail(request, ENOMEM);
      return 1;
    }
    if (!lane->nfree_bounce) return 0;
    bounce = (int32_t)lane->free_bounce[--lane->nfree_bounce];
    char *block = lane->bounce_base + (uint64_t)bounce * lane->engine->options.block_size;
    if (request->opcode == NV_WRITE && !fill_block(part, block, memory, nbytes)) {
      lane->free_bounce[lane->nfree_bounce++] = (uint32_t)bounce;
      return 1;
    }
    memory = block;
  }
  nv_slot *slot = &lane->slots[lane->free_slots[--lane->nfree]];
  slot->part = part;
  slot->offset = offset;
  slot->nbytes = (uint32_t)nbytes;
  slot->memory = memory;
  slot->done = 0;
  slot->bounce = bounce;
  slot->block = part->block;
  if (request->rows) {
    part->has_block = 0;
    part->next = !nv_rows_more(request->rows, (uint32_t)(part - request->parts));
  } else {
    part->next += nbytes;
  }
  part->inflight++;
  enqueue(lane, slot);
  return 1;
}

static int submit(nv_lane *lane);

static void fill(nv_lane *lane) {
  if (!lane->engine->options.overlap_events && (lane->inflight || lane->npending)) return;
  nv_part *stuck = NULL; /* the first of a run of parts that wait for bounce blocks */
  while (lane->ring && lane->nfree) {
    nv_part *part = lane->ring;
    if (part == stuck) return;
    if (part->request->stop || part->next >= part->end) {
      part->next = part->end; /* cancelled, failed, or at the end of the file */
    } else if (!issue(lane, part)) {
      if (!stuck) stuck = part;
      lane->ring = part->following;
      continue;
    }
    stuck = NULL;
    if (lane->npending && lane->slots[lane->pending[lane->npending - 1]->aio_data].bounce >= 0)
      submit(lane); /* a write that was copied: let the drive have it while the next is copied */
    if (part->next < part->end && !part->request->stop) {
      lane->ring = part->following;
      continue;
    }
    part->next = part->end;
    ring_remove(lane, part);
    if (!part->inflight) finish_part(part);
  }
}

/* The bytes [slot->offset, + slot->done) have been moved; of rows, `failure` is why not the others. */
static void account(nv_slot *slot, int failure) {
  nv_request *request = slot->part->request;
  if (request->opcode > NV_WRITE) return;
  if (request->cancelled && slot->bounce >= 0 && request->opcode == NV_READ)
    return; /* the caller's memory is left alone */
  uint64_t useful;
  if (request->rows) {
    useful = nv_rows_landed(request->rows, (uint32_t)(slot->part - request->parts), &slot->block,
                            slot->bounce >= 0 ? slot->memory : NULL, slot->done, failure);
  } else {
    uint64_t from, to, moved = slot->offset + slot->done;
    user_share(slot, &from, &to);
    if (to > moved) to = moved;
    if (to <= from) return;
    useful = to - from;
    if (slot->bounce >= 0 && request->opcode == NV_READ &&
        !copy(request, slot->memory + (from - slot->offset),
              request->address + (from - request->file_offset), useful))
      return;
  }
  request->transferred += useful;
  if (request->direct_fd < 0)
    request->buffered_bytes += useful;
  else if (slot->bounce >= 0)
    request->bounced_bytes += useful;
  else
    request->direct_bytes += useful;
}

/* res is the kernel's: bytes moved, or -errno. */
static void complete_block(nv_lane *lane, nv_slot *slot, int64_t res) {
  nv_part *part = slot->part;
  nv_request *request = part->request;
  if (res == -EINTR || res == -EAGAIN) {
    if (!request->stop) {
      enqueue(lane, slot);
      return;
    }
    res = -ECANCELED; /* not tried again; if another error was the reason, that one stands */
  }
  int failure = res < 0 ? (int)-res : 0;
  if (!failure && request->opcode <= NV_WRITE) {
    uint64_t from, to;
    if (request->rows)
      to = nv_rows_wanted(request->rows, &slot->block);
    else
      user_share(slot, &from, &to);
    int short_of_user = slot->offset + slot->done + (uint64_t)res < to;
    if (short_of_user) {
      /* Go on from an aligned position. Each turn advances by at least one alignment unit,
       * or tells the end of the file. */
      uint32_t whole = request->direct_fd < 0
                           ? (uint32_t)res
                           : (uint32_t)res - (uint32_t)res % request->offset_alignment;
      if (whole && !request->stop) {
        slot->done += whole;
        enqueue(lane, slot);
        return;
      }
      if (request->opcode == NV_WRITE && !request->stop)
        failure = EIO;
      else if (!whole && request->rows)
        failure = ENODATA; /* of these rows; what is behind them will tell itself */
      else if (!whole)
        part->end = part->next; /* end of file: nothing lies behind */
    }
    slot->done += (uint32_t)res;
  }
  if (failure && !nv_rows_is_theirs(request, failure)) fail(request, failure);
  account(slot, failure);
  if (slot->bounce >= 0) lane->free_bounce[lane->nfree_bounce++] = (uint32_t)slot->bounce;
  lane->free_slots[lane->nfree++] = (uint32_t)(slot - lane->slots);
  part->inflight--;
  /* A part that still has blocks to issue is in the ring; fill() finishes it there. */
  if (!part->inflight && part->next >= part->end && part->following == NULL) finish_part(part);
}

/* --- the kernel's queue ------------------------------------------------------------------ */

/* Ends a block that the kernel never took. */
static void refuse(nv_lane *lane, uint32_t at, int error) {
  nv_slot *slot = &lane->slots[lane->pending[at]->aio_data];
  fail(slot->part->request, error);
  lane->npending--;
  memmove(lane->pending + at, lane->pending + at + 1,
          (lane->npending - at) * sizeof *lane->pending);
  complete_block(lane, slot, -error);
}

/* io_submit said EAGAIN and nothing is in flight whose completion could be waited for. */
static int out_of_patience(nv_lane *lane) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (!lane->refused_since.tv_sec) lane->refused_since = now;
  return now.tv_sec - lane->refused_since.tv_sec >= REFUSED_LIMIT_S;
}

/* Gives the kernel what is prepared; EAGAIN leaves the rest for after the next completion.
 * Returns how many blocks ended here, refused. */
static int submit(nv_lane *lane) {
  nv_engine *engine = lane->engine;
  int refused = 0;
  if (lane->refused_since.tv_sec) /* stalled: a cancelled block need not wait for its turn */
    for (uint32_t i = lane->npending; i-- > 0;)
      if (lane->slots[lane->pending[i]->aio_data].part->request->stop) {
        refuse(lane, i, ECANCELED);
        refused++;
      }
  while (lane->npending) {
    long n = engine->options.single_submit ? 1 : lane->npending;
    int r = engine->kaio->submit(lane->context, n, lane->pending);
    if (r == -EINTR) continue;
    if (r > 0) {
      lane->inflight += (uint32_t)r;
      lane->npending -= (uint32_t)r;
      memmove(lane->pending, lane->pending + r, lane->npending * sizeof *lane->pending);
      lane->refused_since.tv_sec = 0;
      continue;
    }
    if (r == 0) r = -EAGAIN;
    if (r == -EAGAIN && (lane->inflight || !out_of_patience(lane))) return refused;
    refuse(lane, 0, -r); /* the first iocb is the one at fault */
    refused++;
  }
  return refused;
}

static int reap(nv_lane *lane) {
  struct timespec none = {0, 0};
  if (!lane->inflight) return 0;
  int n = lane->engine->kaio->getevents(lane->context, 0, lane->engine->options.queue_depth,
                                        lane->events, &none);
  for (int i = 0; i < n; i++) {
    nv_slot *slot = &lane->slots[lane->events[i].data];
    int copied = slot->bounce >= 0;
    lane->inflight--;
    complete_block(lane, slot, lane->events[i].res);
    /* A copy takes as long as the drive takes for some of the block: keep it busy meanwhile. */
    if (copied && lane->engine->options.overlap_events) {
      fill(lane);
      submit(lane);
    }
  }
  return n;
}

static int inbox_empty(nv_lane *lane) { return atomic_load(&lane->inbox) == NULL; }

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Whether the kernel has completions for us: its ring lies in our memory (fs/aio.c). A kernel with
 * another layout shows another magic number, and then nothing is ever seen here. */
static int events_ready(nv_lane *lane) {
  const volatile struct {
    unsigned id, nr, head, tail, magic;
  } *ring = (const volatile void *)(uintptr_t)lane->context;
  return ring->magic == 0xa10a10a1 && ring->head != ring->tail;
}

static void note_events(nv_lane *lane) {
  uint64_t now = now_ns(), gap = now - lane->last_event_ns;
  if (gap > 8 * SPIN_NS) gap = 8 * SPIN_NS;
  lane->gap_ns = (7 * lane->gap_ns + gap) / 8;
  lane->last_event_ns = now;
}

/* Watches for work for a moment, if it is likely to come; whether it came. Not where more blocks wait
 * than the queue takes: it is full, the drive does not notice when a place is taken 5 us later, and
 * nobody waits to have this thread woken. */
static int spin(nv_lane *lane) {
  if (!lane->inflight || lane->gap_ns > SPIN_NS || lane->ring) return 0;
  uint64_t until = now_ns() + 2 * SPIN_NS;
  do {
    for (int i = 0; i < 16; i++) {
      if (!inbox_empty(lane) || events_ready(lane)) return 1;
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    }
  } while (now_ns() < until);
  return 0;
}

static void sleep_until_signalled(nv_lane *lane) {
  uint64_t count;
  atomic_store(&lane->asleep, 1);
  if (!inbox_empty(lane)) {
    atomic_store(&lane->asleep, 0);
    return;
  }
  if (lane->npending && !lane->inflight) { /* refused by the kernel: try again in a moment */
    struct pollfd efd = {.fd = lane->efd, .events = POLLIN};
    if (poll(&efd, 1, 1) <= 0) {
      atomic_store(&lane->asleep, 0);
      return;
    }
  }
  while (read(lane->efd, &count, sizeof count) < 0 && errno == EINTR) {
  }
  atomic_store(&lane->asleep, 0);
}

int nv_lane_run(nv_engine *engine, uint32_t index) {
  nv_lane *lane = &engine->lanes[index];
  for (;;) {
    for (nv_part *part = take_inbox(lane), *following; part; part = following) {
      following = part->following;
      part->following = NULL;
      start_part(lane, part);
    }
    fill(lane);
    int refused = submit(lane);
    int reaped = reap(lane);
    if (reaped > 0) note_events(lane);
    /* Less than 0 is EINTR: the events are still there, their signal may be spent already. */
    if (reaped || refused || spin(lane)) continue;
    int idle = !lane->inflight && !lane->npending;
    if (idle && lane->ring) continue; /* refused while filling: there is more to issue */
    if (idle) lane->refused_since.tv_sec = 0; /* the next stall has a clock of its own */
    if (idle && engine->stopping && !engine->common.in_flight && inbox_empty(lane)) return 0;
    sleep_until_signalled(lane);
  }
}
