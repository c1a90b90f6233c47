/* Drives the native shim without Python, so that sanitizers and valgrind can watch it.
 *
 *     drive_shim DIRECTORY [ROUNDS [SEED [LIBAIO [SWITCH=NUMBER ...]]]]
 *
 * Linked with the files of native_shim's pump, protection and common. Every scenario checks what it moved byte by byte; 0 is
 * returned if all went well, and whatever hangs is ended by SIGALRM. LIBAIO is a library to load:
 * libaio.so.1, or the one of tests/fakes/faulty_libaio.c, whose switches may follow. Without one the
 * system calls are made directly. */
#include "pump/internal.h"
#include "protection/internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                    \
  do {                                                                                 \
    if (!(what)) {                                                                     \
      fprintf(stderr, "%s:%d: not true: %s (errno %d)\n", __func__, __LINE__, #what, errno); \
      abort();                                                                         \
    }                                                                                  \
  } while (0)

enum { FILE_BYTES = 6 << 20, TAIL = 777, PAGE = 4096, MAX_LANES = 4 };

static nv_request *nv_submit(nv_engine *engine, nv_cq *cq, uint64_t token, int opcode,
                             int direct_fd, int buffered_fd, uint64_t address, uint64_t nbytes,
                             uint64_t file_offset, uint64_t span_start, uint64_t span_end,
                             uint32_t offset_alignment, uint32_t memory_alignment, int bounce,
                             int preallocate) {
  nv_request *request = nv_prepare(engine, cq, token, opcode, direct_fd, buffered_fd, address,
                                   nbytes, file_offset, span_start, span_end, offset_alignment,
                                   memory_alignment, bounce, preallocate, (int)(token % 2));
  if (request) nv_start(request);
  return request;
}

static const char *directory;
static unsigned rounds = 1;
static nv_kaio *kaio;
static uint32_t alignment = 512; /* of direct I/O on the file, 0 without */

/* --- helpers ----------------------------------------------------------------------------- */

static __thread uint64_t state = 88172645463325252u;

static uint64_t chance(uint64_t below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return below ? state % below : 0;
}

static void nap(long us) {
  struct timespec t = {0, us * 1000};
  nanosleep(&t, NULL);
}

static unsigned char content(uint64_t offset, unsigned salt) {
  uint64_t x = (offset + 1) * 0x9e3779b97f4a7c15u + salt * 0x632be59bd9b4e019u;
  return (unsigned char)(x >> 56);
}

static void fill_with(char *memory, uint64_t offset, uint64_t nbytes, unsigned salt) {
  for (uint64_t i = 0; i < nbytes; i++) memory[i] = (char)content(offset + i, salt);
}

static int holds(const char *memory, uint64_t offset, uint64_t nbytes, unsigned salt) {
  for (uint64_t i = 0; i < nbytes; i++)
    if ((unsigned char)memory[i] != content(offset + i, salt)) return 0;
  return 1;
}

typedef struct {
  int direct, buffered;
} fds;

static fds open_file(const char *name, int make) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  fds f;
  f.buffered = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  CHECK(f.buffered >= 0);
  if (make) {
    uint64_t nbytes = FILE_BYTES + TAIL;
    char *memory = malloc(nbytes);
    CHECK(memory);
    fill_with(memory, 0, nbytes, 0);
    CHECK(pwrite(f.buffered, memory, nbytes, 0) == (ssize_t)nbytes);
    CHECK(fsync(f.buffered) == 0);
    free(memory);
  }
  f.direct = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
  uint64_t facts[NV_FACTS];
  CHECK(nv_file_facts(f.buffered, facts) == 0);
  CHECK(S_ISREG(facts[NV_MODE]));
  if (f.direct >= 0 && facts[NV_HAS_DIO]) alignment = (uint32_t)facts[NV_OFFSET_ALIGNMENT];
  if (f.direct >= 0 && !alignment) {
    close(f.direct);
    f.direct = -1;
  }
  return f;
}

static void close_file(fds f) {
  if (f.direct >= 0) close(f.direct);
  close(f.buffered);
}

struct lane_start {
  nv_engine *engine;
  uint32_t index;
};

typedef struct {
  nv_engine *engine;
  pthread_t lanes[MAX_LANES];
  struct lane_start starts[MAX_LANES];
  uint32_t count;
} running;

static void *run_lane(void *argument) {
  struct lane_start *start = argument;
  CHECK(nv_lane_run(start->engine, start->index) == 0);
  return NULL;
}

static void start_engine(running *r, nv_options options) {
  int error = -1;
  r->engine = nv_engine_new(kaio, &options, &error);
  CHECK(r->engine && error == 0);
  r->count = options.lanes;
  for (uint32_t i = 0; i < options.lanes; i++) {
    r->starts[i] = (struct lane_start){r->engine, i};
    CHECK(pthread_create(&r->lanes[i], NULL, run_lane, &r->starts[i]) == 0);
  }
}

static void join_lanes(running *r) {
  nv_engine_stop(r->engine);
  for (uint32_t i = 0; i < r->count; i++) CHECK(pthread_join(r->lanes[i], NULL) == 0);
}

static nv_options some_options(void) {
  uint32_t depth = (uint32_t)(1 + chance(16));
  nv_options options = {
      .block_size = (uint64_t)PAGE << chance(5),
      .queue_depth = depth,
      .lanes = (uint32_t)(1 + chance(MAX_LANES)),
      .bounce_blocks = (uint32_t)(1 + chance(depth)),
      .single_submit = (int)chance(2),
      .overlap_events = chance(4) != 0,
  };
  return options;
}

/* Submits as nvmeio's plan does: reads fetch the enclosing aligned span, writes send the enclosed
 * whole pages direct and the edges buffered. */
static nv_request *start(nv_engine *engine, nv_cq *cq, uint64_t token, int opcode, fds f,
                         char *memory, uint64_t nbytes, uint64_t offset, int bounce) {
  uint64_t end = offset + nbytes, from = offset, to = end;
  int direct = f.direct;
  if (!nbytes || opcode >= NV_FSYNC) direct = -1;
  if (direct >= 0 && opcode == NV_READ) {
    from = offset / alignment * alignment;
    to = (end + alignment - 1) / alignment * alignment;
  } else if (direct >= 0) {
    from = (offset + PAGE - 1) / PAGE * PAGE;
    to = end / PAGE * PAGE;
    if (from >= to) {
      from = to = end;
      direct = -1;
    }
  }
  nv_request *request =
      nv_submit(engine, cq, token, opcode, direct, f.buffered, (uint64_t)(uintptr_t)memory, nbytes,
                offset, from, to, alignment ? alignment : 1, alignment ? alignment : 1, bounce,
                opcode == NV_WRITE);
  CHECK(request);
  return request;
}

/* Memory at a chosen alignment, with a canary on both sides. */
enum { CANARY = 64 };

static char *take(uint64_t nbytes, int aligned, char **block) {
  size_t room = (nbytes + 2 * PAGE + PAGE - 1) / PAGE * PAGE;
  *block = aligned_alloc(PAGE, room);
  CHECK(*block);
  memset(*block, 0xA5, room);
  return *block + PAGE + (aligned ? 0 : 1);
}

static int canaries(const char *block, const char *memory, uint64_t nbytes) {
  (void)block;
  for (int i = 1; i <= CANARY; i++)
    if ((unsigned char)memory[-i] != 0xA5 || (unsigned char)memory[nbytes + (uint64_t)i - 1] != 0xA5)
      return 0;
  return 1;
}

static void wait_for(nv_request *request) {
  while (!nv_wait(request, 0.05)) {
  }
  CHECK(nv_is_done(request));
}

/* --- scenarios --------------------------------------------------------------------------- */

static void one_after_another(fds f) {
  fds copy = open_file("copy", 0);
  running r;
  start_engine(&r, some_options());
  nv_cq *cq = nv_cq_new(r.engine);
  CHECK(cq);
  uint64_t bytes = 0;
  unsigned count = 40;
  for (unsigned i = 0; i < count; i++) {
    uint64_t nbytes = chance(3) ? chance(600000) : chance(3) * PAGE;
    uint64_t offset = chance(FILE_BYTES - nbytes);
    if (chance(2)) offset = offset / PAGE * PAGE;
    char *block, *memory = take(nbytes, (int)chance(2), &block);
    int opcode = (int)chance(2);
    unsigned salt = opcode == NV_WRITE ? i + 1 : 0;
    if (opcode == NV_WRITE) fill_with(memory, offset, nbytes, salt);
    nv_request *request = start(r.engine, cq, i, opcode, opcode == NV_READ ? f : copy, memory, nbytes,
                                offset, (int)chance(2));
    wait_for(request);
    const nv_result *result = nv_request_result(request);
    CHECK(result->error == 0 && result->transferred == nbytes);
    CHECK(nv_moved(request) == (int64_t)nbytes);
    CHECK(result->direct_bytes + result->bounced_bytes + result->buffered_bytes == nbytes);
    CHECK(holds(memory, offset, nbytes, salt));
    CHECK(canaries(block, memory, nbytes));
    if (opcode == NV_WRITE) {
      char *back = malloc(nbytes + 1);
      CHECK(back && pread(copy.buffered, back, nbytes, (off_t)offset) == (ssize_t)nbytes);
      CHECK(holds(back, offset, nbytes, salt));
      free(back);
    }
    bytes += nbytes;
    nv_request_free(request);
    free(block);
  }
  nv_request *sync = start(r.engine, cq, 99, NV_FSYNC, copy, NULL, 0, 0, 0);
  wait_for(sync);
  CHECK(nv_moved(sync) == 0);
  nv_request_free(sync);
  nv_counters counted;
  nv_engine_counters(r.engine, &counted);
  CHECK(counted.operations == count + 1 && counted.errors == 0 && counted.in_flight == 0);
  CHECK(counted.bytes_read + counted.bytes_written == bytes);
  nv_cq_free(cq);
  join_lanes(&r);
  nv_engine_free(r.engine);
  close_file(copy);
}

static void past_the_end(fds f) {
  running r;
  start_engine(&r, some_options());
  nv_cq *cq = nv_cq_new(r.engine);
  uint64_t size = FILE_BYTES + TAIL;
  for (unsigned i = 0; i < 12; i++) {
    uint64_t offset = size - chance(200000) + (i % 4 == 0 ? 300000 : 0);
    uint64_t nbytes = 210000 + chance(400000);
    char *block, *memory = take(nbytes, (int)chance(2), &block);
    nv_request *request = start(r.engine, cq, i, NV_READ, f, memory, nbytes, offset, 0);
    wait_for(request);
    const nv_result *result = nv_request_result(request);
    uint64_t there = offset < size ? size - offset : 0;
    CHECK(result->error == 0);
    CHECK(result->transferred == there);
    CHECK(holds(memory, offset, there, 0) && canaries(block, memory, nbytes));
    nv_request_free(request);
    free(block);
  }
  nv_cq_free(cq);
  join_lanes(&r);
  nv_engine_free(r.engine);
}

/* Rows of one length all over a file, written and read again by several at once; some are cancelled. */
typedef struct {
  nv_engine *engine;
  fds f;
  uint64_t seed, from; /* the part of the file that is its own */
  int cancels;
} row_mover;

enum { ROWS_BYTES = 1 << 18 };

static nv_request *start_rows(row_mover *m, nv_cq *cq, int opcode, char *memory, uint64_t count,
                              uint64_t row_bytes, const int64_t *offsets) {
  nv_request *request =
      nv_prepare_rows(m->engine, cq, 7, opcode, m->f.direct, m->f.buffered,
                      (uint64_t)(uintptr_t)memory, count, row_bytes, (uint64_t)(uintptr_t)offsets,
                      alignment ? alignment : 1, alignment ? alignment : 1, (int)chance(2));
  CHECK(request);
  nv_start(request);
  return request;
}

static void *move_rows(void *argument) {
  row_mover *m = argument;
  state = m->seed * 2654435761u + 7;
  nv_cq *cq = nv_cq_new(m->engine);
  CHECK(cq);
  for (int turn = 0; turn < 3; turn++) {
    uint64_t row_bytes = chance(2) ? 1 + chance(300) : chance(2) ? PAGE : 1 + chance(30000);
    uint64_t room = row_bytes + (chance(2) ? 0 : chance(2 * PAGE));
    uint64_t count = ROWS_BYTES / room, shift = chance(2) * chance(PAGE);
    if (count > 2000 && chance(2)) count = 2000; /* sorted by a thread of its own, or not */
    while (count * room + shift > ROWS_BYTES) count--;
    int64_t *offsets = malloc(count * sizeof *offsets + 1);
    CHECK(offsets);
    for (uint64_t i = 0; i < count; i++) { /* shuffled */
      uint64_t j = chance(i + 1);
      offsets[i] = offsets[j];
      offsets[j] = (int64_t)(m->from + shift + i * room);
    }
    char *block, *memory = take(count * row_bytes, (int)chance(2), &block);
    for (uint64_t i = 0; i < count; i++)
      fill_with(memory + i * row_bytes, (uint64_t)offsets[i], row_bytes, 5);
    nv_request *request = start_rows(m, cq, NV_WRITE, memory, count, row_bytes, offsets);
    wait_for(request);
    CHECK(nv_moved(request) == (int64_t)(count * row_bytes));
    nv_request_free(request);
    memset(memory, 0xA5, count * row_bytes);
    request = start_rows(m, cq, NV_READ, memory, count, row_bytes, offsets);
    if (m->cancels && chance(2)) {
      if (chance(2)) nap((long)chance(300));
      nv_cancel(request);
    }
    wait_for(request);
    const nv_result *result = nv_request_result(request);
    CHECK(result->error == 0 || (m->cancels && result->error == ECANCELED));
    for (uint64_t i = 0; !result->error && i < count; i++)
      CHECK(holds(memory + i * row_bytes, (uint64_t)offsets[i], row_bytes, 5));
    CHECK(canaries(block, memory, count * row_bytes));
    nv_request_free(request);
    memset(memory, 0x5A, count * row_bytes);
    free(block);
    free(offsets);
  }
  nv_cq_free(cq);
  return NULL;
}

static void rows_of_many(int cancels) {
  enum { THREADS = 4 };
  running r;
  start_engine(&r, some_options());
  fds f = open_file("rows", 1);
  pthread_t threads[THREADS];
  row_mover what[THREADS];
  for (unsigned i = 0; i < THREADS; i++) {
    /* Neighbours share a page. */
    what[i] = (row_mover){r.engine, f, chance(1u << 30), i * (ROWS_BYTES + 100), cancels};
    CHECK(pthread_create(&threads[i], NULL, move_rows, &what[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  nv_counters counted;
  nv_engine_counters(r.engine, &counted);
  CHECK(counted.in_flight == 0 && counted.errors == 0 && counted.rows > 0);
  join_lanes(&r);
  nv_engine_free(r.engine);
  close_file(f);
}

/* Rows behind the end of the file, rows that overlap, and a request that nobody waits for. */
static void rows_that_fail(fds f) {
  running r;
  start_engine(&r, some_options());
  nv_cq *cq = nv_cq_new(r.engine);
  row_mover m = {.engine = r.engine, .f = f};
  int64_t places[] = {5, FILE_BYTES + TAIL - 50, FILE_BYTES + TAIL - 100, FILE_BYTES * 3};
  char *block, *memory = take(400, 0, &block);
  nv_request *request = start_rows(&m, cq, NV_READ, memory, 4, 100, places);
  wait_for(request);
  CHECK(nv_moved(request) == -ENODATA);
  const nv_rows_result *result = nv_rows_outcome(nv_request_rows(request));
  uint8_t whole[4];
  nv_rows_mask(nv_request_rows(request), whole);
  CHECK(result->whole == 2 && result->failed_row == 1 && result->failed_offset == (uint64_t)places[1]);
  CHECK(whole[0] && !whole[1] && whole[2] && !whole[3]);
  CHECK(holds(memory, 5, 100, 0) && canaries(block, memory, 400));
  nv_request_free(request);

  places[3] = 104;
  request = start_rows(&m, cq, NV_WRITE, memory, 4, 100, places);
  wait_for(request);
  uint64_t one, other;
  CHECK(nv_moved(request) == -EEXIST);
  nv_rows_overlap(nv_request_rows(request), &one, &other);
  CHECK((one == 0 && other == 3) || (one == 1 && other == 2));
  nv_request_free(request);

  int64_t *many = malloc(20000 * sizeof *many);
  char *much = malloc(20000 * 100);
  CHECK(many && much);
  for (int i = 0; i < 20000; i++) many[i] = (int64_t)chance(FILE_BYTES);
  nv_request_free(start_rows(&m, cq, NV_READ, much, 20000, 100, many));
  nv_cq_free(cq);
  join_lanes(&r);
  nv_engine_close(r.engine); /* while the thread that sorted may be on its way out */
  nv_engine_free(r.engine);
  free(block);
  free(many);
  free(much);
}

/* Batches by several threads, of more members than are with the lanes at once; some are cancelled, some are
 * freed while they run. */
typedef struct {
  nv_engine *engine;
  fds f;
  uint64_t seed;
  int cancels;
} batcher;

static void *move_batches(void *argument) {
  batcher *b = argument;
  state = b->seed * 2654435761u + 99;
  enum { MEMBERS = 150 };
  char *blocks[MEMBERS];
  nv_cq *cq = nv_cq_new(b->engine);
  CHECK(cq);
  for (int turn = 0; turn < 4; turn++) {
    nv_transfer members[MEMBERS];
    uint64_t count = chance(MEMBERS + 1), total = 0;
    for (uint64_t i = 0; i < count; i++) {
      uint64_t nbytes = chance(3) ? PAGE : chance(90000);
      uint64_t offset = chance(FILE_BYTES - nbytes);
      char *memory = take(nbytes, (int)chance(2), &blocks[i]);
      int direct = nbytes ? b->f.direct : -1;
      uint64_t unit = direct >= 0 ? alignment : 1;
      members[i] = (nv_transfer){
          .opcode = NV_READ,
          .direct_fd = direct,
          .buffered_fd = b->f.buffered,
          .address = (uint64_t)(uintptr_t)memory,
          .nbytes = nbytes,
          .file_offset = offset,
          .span_start = offset / unit * unit,
          .span_end = (offset + nbytes + unit - 1) / unit * unit,
          .offset_alignment = alignment ? alignment : 1,
          .memory_alignment = alignment ? alignment : 1,
          .bounce = (int)chance(2),
          .foreign = (int)chance(2),
      };
      total += nbytes;
    }
    nv_request *request = nv_prepare_batch(b->engine, cq, 3, members, count);
    CHECK(request && !nv_is_started(request));
    nv_start(request);
    if (b->cancels && chance(2)) nv_cancel(request);
    wait_for(request);
    const nv_result *result = nv_request_result(request);
    CHECK(result->error == 0 || (b->cancels && result->error == ECANCELED));
    CHECK(b->cancels || nv_moved(request) == (int64_t)total);
    uint64_t token = 0, sum = 0;
    while (!nv_cq_reap(cq, &token, 1)) nap(20);
    CHECK(token == 3 && !nv_cq_reap(cq, &token, 1));
    for (uint64_t i = 0; i < count; i++) {
      const nv_result *one = nv_batch_result(request, i);
      char *memory = (char *)(uintptr_t)members[i].address;
      CHECK(canaries(blocks[i], memory, members[i].nbytes));
      CHECK(one->error || holds(memory, members[i].file_offset, members[i].nbytes, 0));
      CHECK(one->error ? one->error == ECANCELED : one->transferred == members[i].nbytes);
      sum += one->transferred;
      free(blocks[i]);
    }
    CHECK(sum == result->transferred);
    nv_request_free(request);
    nv_request_free(nv_prepare_batch(b->engine, cq, 4, members, count)); /* never started */
  }
  nv_cq_free(cq);
  return NULL;
}

static void batches_of_many(fds f, int cancels) {
  enum { THREADS = 3 };
  running r;
  start_engine(&r, some_options());
  pthread_t threads[THREADS];
  batcher movers[THREADS];
  for (uint64_t i = 0; i < THREADS; i++) {
    movers[i] = (batcher){r.engine, f, chance(1 << 30), cancels};
    CHECK(pthread_create(&threads[i], NULL, move_batches, &movers[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  nv_counters counted;
  nv_engine_counters(r.engine, &counted);
  CHECK(counted.in_flight == 0 && counted.errors == 0);

  /* An orphan, whose memory stays until the lanes are through. */
  char *block, *memory = take(64 * PAGE, 1, &block);
  nv_transfer members[64];
  for (uint64_t i = 0; i < 64; i++)
    members[i] = (nv_transfer){
        .opcode = NV_READ,
        .direct_fd = -1,
        .buffered_fd = f.buffered,
        .address = (uint64_t)(uintptr_t)(memory + i * PAGE),
        .nbytes = PAGE,
        .file_offset = i * PAGE,
        .span_start = i * PAGE,
        .span_end = (i + 1) * PAGE,
        .offset_alignment = 1,
        .memory_alignment = 1,
    };
  nv_cq *cq = nv_cq_new(r.engine);
  nv_request *request = nv_prepare_batch(r.engine, cq, 5, members, 64);
  CHECK(request);
  nv_start(request);
  nv_request_free(request);
  nv_cq_free(cq);
  join_lanes(&r);
  nv_engine_free(r.engine);
  CHECK(holds(memory, 0, 64 * PAGE, 0));
  free(block);
}

/* A descriptor that does not allow it: the error comes from io_submit, which then is asked for the
 * blocks behind. */
static void refused(fds f) {
  char path[4096];
  snprintf(path, sizeof path, "/proc/self/fd/%d", f.buffered);
  fds readable = {-1, open(path, O_RDONLY | O_CLOEXEC)};
  CHECK(readable.buffered >= 0);
  running r;
  start_engine(&r, some_options());
  nv_cq *cq = nv_cq_new(r.engine);
  char *block, *memory = take(300000, 1, &block);
  nv_request *bad = start(r.engine, cq, 1, NV_WRITE, readable, memory, 300000, 0, 0);
  nv_request *good = start(r.engine, cq, 2, NV_READ, f, memory, 300000, 0, 0);
  wait_for(bad);
  wait_for(good);
  CHECK(nv_moved(bad) == -EBADF);
  CHECK(nv_moved(good) == 300000 && holds(memory, 0, 300000, 0));
  nv_request_free(bad);
  nv_request_free(good);
  free(block);
  nv_cq_free(cq);
  join_lanes(&r);
  nv_engine_free(r.engine);
  close(readable.buffered);
}

/* Threads that submit, cancel and wait, each with a completion queue of its own whose tokens must all come, and
 * come once. */
typedef struct {
  nv_engine *engine;
  fds f;
  uint64_t seed;
  unsigned count;
  int cancels;
} submitter;

static void *submit_and_reap(void *argument) {
  submitter *s = argument;
  state = s->seed * 2654435761u + 12345;
  enum { MANY = 16 };
  nv_cq *cq = nv_cq_new(s->engine);
  CHECK(cq);
  for (unsigned done = 0; done < s->count; done += MANY) {
    nv_request *requests[MANY];
    char *blocks[MANY], *memories[MANY];
    uint64_t offsets[MANY], lengths[MANY];
    int seen[MANY] = {0};
    for (int i = 0; i < MANY; i++) {
      lengths[i] = chance(2) ? chance(200000) : PAGE;
      offsets[i] = chance(FILE_BYTES - lengths[i]);
      memories[i] = take(lengths[i], (int)chance(2), &blocks[i]);
      requests[i] = start(s->engine, cq, (uint64_t)i, NV_READ, s->f, memories[i], lengths[i],
                          offsets[i], (int)chance(2));
      if (s->cancels && chance(2)) {
        if (chance(2)) nap((long)chance(300));
        nv_cancel(requests[i]);
      }
    }
    for (int left = MANY; left;) {
      struct pollfd pollfd = {.fd = nv_cq_fd(cq), .events = POLLIN};
      CHECK(poll(&pollfd, 1, 60000) == 1);
      uint64_t tokens[5];
      int n = nv_cq_reap(cq, tokens, 5);
      for (int i = 0; i < n; i++) {
        CHECK(tokens[i] < MANY && !seen[tokens[i]]);
        seen[tokens[i]] = 1;
      }
      left -= n;
    }
    for (int i = 0; i < MANY; i++) {
      const nv_result *result = nv_request_result(requests[i]);
      if (result->error == 0) {
        CHECK(result->transferred == lengths[i]);
        CHECK(holds(memories[i], offsets[i], lengths[i], 0));
      } else {
        CHECK(s->cancels && result->error == ECANCELED);
      }
      CHECK(canaries(blocks[i], memories[i], lengths[i]));
      /* From here on the memory is ours: whoever still writes to it is caught. */
      memset(memories[i], 0x5A, lengths[i]);
      nv_request_free(requests[i]);
      for (uint64_t at = 0; at < lengths[i]; at++) CHECK(memories[i][at] == 0x5A);
      free(blocks[i]);
    }
  }
  nv_cq_free(cq);
  return NULL;
}

static void many_threads(fds f, int cancels) {
  enum { THREADS = 4 };
  running r;
  start_engine(&r, some_options());
  pthread_t threads[THREADS];
  submitter what[THREADS];
  for (int i = 0; i < THREADS; i++) {
    what[i] = (submitter){r.engine, f, chance(1u << 30), 64, cancels};
    CHECK(pthread_create(&threads[i], NULL, submit_and_reap, &what[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  nv_counters counted;
  nv_engine_counters(r.engine, &counted);
  CHECK(counted.in_flight == 0 && counted.operations == THREADS * 64 && counted.errors == 0);
  join_lanes(&r);
  nv_engine_free(r.engine);
}

/* Requests wander between completion queues while they complete: each is reported at one of them, once. */
typedef struct {
  nv_request **requests;
  nv_cq **cqs;
  unsigned nrequests, nports;
  uint64_t seed;
  atomic_int *stop;
} mover;

static void *move_about(void *argument) {
  mover *m = argument;
  state = m->seed * 2654435761u + 99;
  while (!*m->stop) nv_move(m->requests[chance(m->nrequests)], m->cqs[chance(m->nports)]);
  return NULL;
}

static void moved_while_completing(fds f) {
  enum { MANY = 48, PORTS = 3, MOVERS = 2 };
  running r;
  start_engine(&r, some_options());
  nv_cq *cqs[PORTS];
  for (int i = 0; i < PORTS; i++) CHECK((cqs[i] = nv_cq_new(r.engine)));
  nv_request *requests[MANY];
  char *blocks[MANY], *memories[MANY];
  int seen[MANY] = {0};
  for (int i = 0; i < MANY; i++) {
    memories[i] = take(50000, i % 2, &blocks[i]);
    requests[i] = start(r.engine, cqs[chance(PORTS)], (uint64_t)i, NV_READ, f, memories[i], 50000,
                        (uint64_t)i * 50001, 0);
  }
  atomic_int stop = 0;
  pthread_t threads[MOVERS];
  mover what[MOVERS];
  for (int i = 0; i < MOVERS; i++) {
    what[i] = (mover){requests, cqs, MANY, PORTS, chance(1u << 30), &stop};
    CHECK(pthread_create(&threads[i], NULL, move_about, &what[i]) == 0);
  }
  int left = MANY;
  for (int turn = 0; left; turn++) {
    /* Without poll: what was signalled at one completion queue may have moved to another. */
    uint64_t tokens[4];
    int n = nv_cq_reap(cqs[turn % PORTS], tokens, 4);
    for (int i = 0; i < n; i++) {
      CHECK(tokens[i] < MANY && !seen[tokens[i]]++);
      left--;
    }
    if (!n) nap(50);
  }
  stop = 1;
  for (int i = 0; i < MOVERS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < PORTS; i++) {
    uint64_t token;
    CHECK(nv_cq_reap(cqs[i], &token, 1) == 0);
  }
  for (int i = 0; i < MANY; i++) {
    CHECK(nv_is_done(requests[i]) && holds(memories[i], (uint64_t)i * 50001, 50000, 0));
    nv_request_free(requests[i]);
    free(blocks[i]);
  }
  for (int i = 0; i < PORTS; i++) nv_cq_free(cqs[i]);
  join_lanes(&r);
  nv_engine_free(r.engine);
}

/* A moved request that was done before is signalled at its new completion queue. */
static void moved_when_done(fds f) {
  running r;
  start_engine(&r, some_options());
  nv_cq *first = nv_cq_new(r.engine), *second = nv_cq_new(r.engine);
  char *block, *memory = take(50000, 1, &block);
  nv_request *request = start(r.engine, first, 7, NV_READ, f, memory, 50000, 0, 0);
  wait_for(request);
  nv_move(request, second);
  struct pollfd pollfd = {.fd = nv_cq_fd(second), .events = POLLIN};
  CHECK(poll(&pollfd, 1, 10000) == 1);
  uint64_t token = 0;
  CHECK(nv_cq_reap(first, &token, 1) == 0);
  CHECK(nv_cq_reap(second, &token, 1) == 1 && token == 7);
  nv_move(request, first); /* reaped: told nowhere again */
  CHECK(nv_cq_reap(first, &token, 1) == 0);
  nv_cq_free(first);
  nv_cq_free(second);
  nv_request_free(request);
  free(block);
  join_lanes(&r);
  nv_engine_free(r.engine);
}

static void queues_closed_early(fds f) {
  enum { MANY = 24 };
  running r;
  start_engine(&r, some_options());
  nv_request *requests[MANY];
  char *blocks[MANY], *memories[MANY];
  nv_cq *spare = nv_cq_new(r.engine);
  for (int i = 0; i < MANY; i++) {
    nv_cq *cq = nv_cq_new(r.engine);
    CHECK(cq);
    memories[i] = take(100000, i % 2, &blocks[i]);
    requests[i] = start(r.engine, cq, (uint64_t)i, NV_READ, f, memories[i], 100000, 0, 0);
    if (chance(2)) nap((long)chance(500));
    if (i % 3 == 0) nv_move(requests[i], spare);
    nv_cq_free(cq);
  }
  for (int i = 0; i < MANY; i++) {
    wait_for(requests[i]);
    CHECK(nv_moved(requests[i]) == 100000 && holds(memories[i], 0, 100000, 0));
    if (i % 2) nv_move(requests[i], spare);
    nv_request_free(requests[i]);
    free(blocks[i]);
  }
  nv_cq_free(spare);
  join_lanes(&r);
  nv_engine_free(r.engine);
}

/* Freed in flight, as at interpreter exit: the lanes free what the kernel has let go of. */
static void orphans(fds f) {
  enum { MANY = 32 };
  running r;
  start_engine(&r, some_options());
  nv_cq *cq = nv_cq_new(r.engine);
  char *blocks[MANY];
  for (int i = 0; i < MANY; i++) {
    char *memory = take(200000, i % 2, &blocks[i]);
    nv_request *request =
        start(r.engine, cq, (uint64_t)i, NV_READ, f, memory, 200000, (uint64_t)i * PAGE, 0);
    if (i % 4 == 0) nv_cancel(request);
    if (i % 5 == 0) nap((long)chance(500));
    nv_request_free(request);
  }
  if (chance(2)) {
    nv_cq_free(cq);
    cq = NULL;
  }
  join_lanes(&r); /* stop means: when nothing is in flight */
  nv_counters counted;
  nv_engine_counters(r.engine, &counted);
  CHECK(counted.in_flight == 0 && counted.operations == MANY);
  if (cq) nv_cq_free(cq);
  nv_engine_free(r.engine);
  for (int i = 0; i < MANY; i++) free(blocks[i]);
}

/* Whoever lets go last frees: the engine's owner first, then completion queues, then requests. */
static void engine_freed_first(fds f) {
  running r;
  start_engine(&r, some_options());
  nv_cq *cq = nv_cq_new(r.engine);
  char *block, *memory = take(300000, 0, &block);
  nv_request *request = start(r.engine, cq, 5, NV_READ, f, memory, 300000, 11, 0);
  join_lanes(&r);
  nv_engine_free(r.engine);
  CHECK(nv_is_done(request) && holds(memory, 11, 300000, 0));
  uint64_t token = 0;
  CHECK(nv_cq_reap(cq, &token, 1) == 1 && token == 5);
  nv_cq_free(cq);
  nv_cancel(request);
  nv_request_free(request);
  free(block);
}

static void never_run(fds f) {
  nv_options options = some_options();
  int error;
  nv_engine *engine = nv_engine_new(kaio, &options, &error);
  CHECK(engine);
  nv_cq *cq = nv_cq_new(engine);
  CHECK(cq);
  nv_engine_stop(engine);
  nv_cq_free(cq);
  nv_engine_free(engine);
  /* More events than there can be: no lane. Half of the limit and one more: one lane, not two. */
  options = (nv_options){.block_size = PAGE, .queue_depth = 1u << 24, .lanes = 3};
  CHECK(!nv_engine_new(kaio, &options, &error) && error == EINVAL);
  unsigned limit = 0;
  FILE *file = fopen("/proc/sys/fs/aio-max-nr", "re");
  CHECK(file && fscanf(file, "%u", &limit) == 1);
  fclose(file);
  if (limit <= 1u << 20) {
    options = (nv_options){.block_size = PAGE, .queue_depth = limit / 2 + 1, .lanes = 2};
    CHECK(!nv_engine_new(kaio, &options, &error) && error == EAGAIN);
  }
  CHECK(!nv_kaio_open("/nonexistent/libaio.so.1") && *nv_kaio_error());
  uint64_t facts[NV_FACTS];
  CHECK(nv_file_facts(-1, facts) == -EBADF);
  (void)f;
}

/* The child touches nothing; the parent does not notice. */
static void forked(fds f) {
  running r;
  start_engine(&r, some_options());
  nv_cq *cq = nv_cq_new(r.engine);
  enum { MANY = 16 };
  nv_request *requests[MANY];
  char *blocks[MANY], *memories[MANY];
  for (int i = 0; i < MANY; i++) {
    memories[i] = take(300000, i % 2, &blocks[i]);
    requests[i] =
        start(r.engine, cq, (uint64_t)i, NV_READ, f, memories[i], 300000, (uint64_t)i * 999, 0);
  }
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) {
    alarm(20);
    uint64_t token;
    int wrong = nv_submit(r.engine, cq, 1, NV_READ, -1, f.buffered, 0, 0, 0, 0, 0, 1, 1, 0, 0) ||
                nv_cq_new(r.engine) || nv_cq_reap(cq, &token, 1) || nv_wait(requests[0], 5) ||
                nv_is_done(requests[0]);
    nv_cancel(requests[0]);
    nv_move(requests[1], cq);
    nv_request_free(requests[0]);
    nv_cq_free(cq);
    nv_engine_stop(r.engine);
    nv_engine_free(r.engine);
    _exit(wrong);
  }
  for (int i = 0; i < MANY; i++) {
    wait_for(requests[i]);
    CHECK(nv_moved(requests[i]) == 300000);
    CHECK(holds(memories[i], (uint64_t)i * 999, 300000, 0));
    nv_request_free(requests[i]);
    free(blocks[i]);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  nv_cq_free(cq);
  join_lanes(&r);
  nv_engine_free(r.engine);
}

static void *stops(void *argument) {
  for (int i = 0; i < 50; i++) nv_engine_stop(argument);
  return NULL;
}

/* Whoever wakes a lane may come so late that it is closed, and its descriptor's number another's. */
static void closed_while_woken(void) {
  for (int i = 0; i < 25; i++) { /* io_destroy(2) waits for the kernel's RCU, 35 ms a lane */
    running r;
    start_engine(&r, (nv_options){.block_size = 16384, .queue_depth = 8, .lanes = 2, .bounce_blocks = 4});
    pthread_t stopping;
    CHECK(pthread_create(&stopping, NULL, stops, r.engine) == 0);
    join_lanes(&r);
    nv_engine_close(r.engine);
    int mine[4];
    for (int j = 0; j < 4; j++) CHECK((mine[j] = eventfd(0, EFD_NONBLOCK)) >= 0);
    CHECK(pthread_join(stopping, NULL) == 0);
    for (int j = 0; j < 4; j++) {
      uint64_t count;
      CHECK(read(mine[j], &count, sizeof count) < 0);
      close(mine[j]);
    }
    nv_engine_free(r.engine);
  }
}

/* --- snapshots --------------------------------------------------------------------------- */

enum { AREA = 5 << 20, AREAS = 3, WRITERS = 3 };

typedef struct {
  char *areas[AREAS];
  uint64_t seed;
  unsigned long times;
} protected_memory;

/* Who writes is stopped by the kernel until it may, which no sanitizer knows of. */
__attribute__((no_sanitize("thread"), no_sanitize("address"), noinline)) static void
spoil(volatile char *memory, uint64_t nbytes) {
  for (uint64_t i = 0; i < nbytes; i++) memory[i] = (char)(memory[i] + 1);
}

static void *spoil_areas(void *given) {
  protected_memory *m = given;
  state ^= m->seed;
  for (unsigned long i = 0; i < m->times; i++) {
    uint64_t nbytes = 1 + chance(9000);
    spoil(m->areas[chance(AREAS)] + chance(AREA - nbytes), nbytes);
  }
  return NULL;
}

/* Reads an area, or settles it as if a drive had read it where it lies; and looks at every byte. */
static void read_area(nv_snapshot *snapshot, char *memory, char *copy, unsigned salt) {
  uint64_t start = (uintptr_t)memory, at = 0;
  while (at < AREA) {
    uint64_t nbytes = PAGE * (1 + chance(700));
    if (nbytes > AREA - at) nbytes = AREA - at;
    uint32_t sum = 0, wanted = 0;
    if (chance(2)) CHECK(nv_snapshot_read(snapshot, start + at, nbytes, 0, &sum) == 0);
    int summed = sum != 0;
    memset(copy, 0, nbytes);
    CHECK(nv_snapshot_read(snapshot, start + at, nbytes, (uintptr_t)copy, &wanted) == 0);
    CHECK(!summed || sum == wanted);
    CHECK(holds(copy, at, nbytes, salt));
    at += nbytes;
  }
}

static void settle_area(nv_snapshot *snapshot, char *memory, char *copy, unsigned salt) {
  uint64_t address = (uintptr_t)memory, end = address + AREA;
  while (address < end) {
    uint64_t left = end - address;
    CHECK(nv_snapshot_settle(snapshot, &address, &left) == 0);
    if (!left) break;
    CHECK(nv_snapshot_read(snapshot, address, left, (uintptr_t)copy, NULL) == 0);
    CHECK(holds(copy, address - (uintptr_t)memory, left, salt));
    address += left;
  }
}

static void snapshots_beside_writers(void) {
  if (nv_snapshot_open(NV_SNAPSHOT_ANY_WRITE) < 0) return; /* this process may not */
  for (int turn = 0; turn < 4; turn++) {
    char *block, *copy, *arena;
    uint64_t addresses[AREAS], sizes[AREAS], limits[AREAS], room = chance(2) ? 4 << 20 : AREAS * AREA;
    int results[AREAS];
    CHECK(posix_memalign((void **)&block, PAGE, AREAS * AREA) == 0);
    CHECK(posix_memalign((void **)&arena, PAGE, room) == 0);
    CHECK((copy = malloc(AREA)));
    protected_memory m = {.times = 200};
    for (int i = 0; i < AREAS; i++) {
      m.areas[i] = block + i * AREA;
      fill_with(m.areas[i], 0, AREA, (unsigned)i);
      addresses[i] = (uintptr_t)m.areas[i];
      sizes[i] = AREA;
      limits[i] = addresses[i] + AREA;
    }
    nv_snapshot *snapshot = nv_snapshot_new(AREAS, addresses, sizes, limits, results, directory);
    CHECK(snapshot && !results[0] && !results[1] && !results[2]);
    CHECK(nv_snapshot_protect(snapshot, (uintptr_t)arena, room) == 0);
    pthread_t threads[WRITERS];
    protected_memory each[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
      each[i] = m;
      each[i].seed = chance(1u << 30);
      CHECK(pthread_create(&threads[i], NULL, spoil_areas, &each[i]) == 0);
    }
    for (unsigned i = 0; i < AREAS; i++)
      (chance(2) ? read_area : settle_area)(snapshot, m.areas[i], copy, i);
    nv_snapshot_counters counters;
    nv_snapshot_count(snapshot, &counters);
    if (chance(2)) nv_snapshot_end(snapshot);
    for (int i = 0; i < WRITERS; i++) pthread_join(threads[i], NULL);
    nv_snapshot_free(snapshot);
    free(copy);
    free(arena);
    free(block);
  }
}

static void set_switch(const char *library, char *assignment) {
  void *loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  char *number = strchr(assignment, '=');
  CHECK(loaded && number);
  *number = 0;
  atomic_int *variable = dlsym(loaded, assignment);
  CHECK(variable);
  *variable = atoi(number + 1);
  dlclose(loaded);
}

int main(int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s DIRECTORY [ROUNDS [SEED [LIBAIO [SWITCH=NUMBER ...]]]]\n", argv[0]);
    return 2;
  }
  directory = argv[1];
  nv_on_give_up(nv_snapshot_give_up);
  if (argc > 2) rounds = (unsigned)atoi(argv[2]);
  uint64_t seed = argc > 3 ? (uint64_t)atoll(argv[3]) : 1;
  alarm(60 + 30 * rounds);
  kaio = nv_kaio_open(argc > 4 ? argv[4] : NULL);
  if (!kaio) {
    fprintf(stderr, "%s\n", nv_kaio_error());
    return 2;
  }
  for (int i = 5; i < argc; i++) set_switch(argv[4], argv[i]);
  fds f = open_file("file", 1);
  for (unsigned round = 0; round < rounds; round++) {
    state = 88172645463325252u + (seed + round) * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < 10; i++) chance(2);
    one_after_another(f);
    past_the_end(f);
    refused(f);
    rows_of_many(0);
    rows_of_many(1);
    rows_that_fail(f);
    batches_of_many(f, 0);
    batches_of_many(f, 1);
    many_threads(f, 0);
    many_threads(f, 1);
    moved_while_completing(f);
    moved_when_done(f);
    queues_closed_early(f);
    orphans(f);
    engine_freed_first(f);
    never_run(f);
    forked(f);
    closed_while_woken();
    snapshots_beside_writers();
  }
  close_file(f);
  free(kaio); /* in nvmeio tables are never freed */
  printf("%u rounds, direct I/O %s\n", rounds, f.direct >= 0 ? "yes" : "no");
  return 0;
}
