/* Snapshots of memory by write protection: copied aside when somebody writes, and not before.
 *
 * Whole pages of the caller's memory are write-protected with userfaultfd(2). A thread that writes to
 * one stops, whatever code it runs; a handler thread of ours copies the cell around it aside, lifts the
 * protection, and the write goes on. Meanwhile a reader takes the bytes of the moment of protection,
 * from where they lie or from aside. A cell that was read to its end is done. Neighbours that are done
 * are let go of together, ahead of any writer; one who comes before that is let through at once.
 *
 *     LIVE ──a write──▶ COPYING ──▶ ASIDE or SPILLED ──read──▶ DONE
 *       └──────────────────read───────────────────────────────▶ DONE
 *
 * The reader asks nobody before it reads a LIVE cell. It looks afterwards whether the cell was LIVE
 * until then (a writer goes on only after that has changed), and else reads again, from aside. So no
 * writer ever waits for a reader. A drive that reads memory where it lies is such a reader too: when it
 * is through, nv_snapshot_settle looks, and what was written to meanwhile is written again.
 *
 * Handlers take no lock of Python's and allocate nothing: the writer may hold the GIL, or malloc's lock.
 * Where there is no memory left aside, a cell goes into an unlinked file instead.
 *
 * One descriptor serves the process. Memory belongs to one snapshot at a time: a second one is refused
 * (EBUSY). A forked child has neither descriptor, protection nor snapshots. A program may close the
 * descriptor, as it closes any other that it does not know: then memory is not protected any more.
 * Every snapshot fails by that, at the latest when what was read is let go of, which shows that it was
 * protected until then. Memory that is given away by its address (madvise with MADV_DONTNEED, munmap,
 * mremap) loses its bytes and its protection unseen: whoever copies a cell asks the page tables
 * afterwards whether it was protected until then (PAGEMAP_SCAN, Linux 6.7; before it, nobody asks).
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE ((uint64_t)4096)
/* What is copied on one write. Overwriting 1 GiB on small pages takes 2.2 s with 4 KiB at a time and
 * 0.4 s with 2 MiB (0.08 s without protection); and huge pages stay whole. */
#define CELL ((uint64_t)2 << 20)
/* How much of an area is let go of at once. To lift each cell's protection and unregister all of them
 * in the end walks over the pages' entries twice: 0.13 s for 1.6 GB on small pages, for 0.06. */
#define LET_GO (8 * CELL)
#define MOST_HANDLERS 4

/* --- structures ----------------------------------------------------------------------------- */

enum { LIVE, COPYING, ASIDE, SPILLED, DONE };

typedef struct {
  uint64_t start, end; /* the caller's */
  uint64_t low, tail;  /* the whole pages within */
  uint64_t high;       /* where what is protected ends: at the tail, or behind */
  char *edges;         /* copies of [start, low) and [tail, end) */
  uint8_t *states;     /* of each cell that [low, high) touches */
  uint64_t *places;    /* ASIDE: its copy's offset in the arena; SPILLED: in the file */
  uint64_t next;       /* the first cell that is not done */
  uint64_t held;       /* where what is still registered begins */
} nv_area;

struct nv_snapshot {
  nv_snapshot *next;
  unsigned generation; /* of forks */
  nv_area *areas;      /* by address */
  uint32_t count;
  char *arena;
  uint64_t arena_nbytes, arena_used;
  uint64_t *free_cells; /* places in the arena of whole cells that were read */
  uint64_t nfree;
  char *spill_directory;
  int spill_fd;
  uint64_t spill_end;
  int error;     /* errno: why nothing of it is read any more */
  uint32_t busy; /* threads that use its cells without the mutex */
  nv_snapshot_counters counters;
};

/* A handler's thread. A filter of system calls can end it alone (SECCOMP_RET_KILL_THREAD). */
typedef struct nv_handler {
  struct nv_handler *next;
  int fd;
  pthread_mutex_t alive; /* its thread has it for as long as it runs: who asks for it is told of its end */
  atomic_int runs;
  nv_snapshot *serves; /* which is busy for it */
} nv_handler;

static pthread_mutex_t mutex;
static pthread_cond_t changed, begun; /* begun: there are snapshots */
static nv_handler *threads;
static int watched;
static __thread nv_handler *self;
static nv_snapshot *snapshots; /* those that have memory registered */
static atomic_uint active;     /* how many */
static int descriptor = -1, kind, handlers;
static unsigned generation;

/* --- one lock for all of it ------------------------------------------------------------------- */

/* Robust: the next one who wants it is told that its owner has ended. */
static void mutex_init(pthread_mutex_t *made) {
  pthread_mutexattr_t robust;
  pthread_mutexattr_init(&robust);
  pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(made, &robust);
  pthread_mutexattr_destroy(&robust);
}

/* What an owner that has ended was changing concerns snapshots that fail by its end. */
static void lock(void) {
  if (pthread_mutex_lock(&mutex) == EOWNERDEAD) pthread_mutex_consistent(&mutex);
}

static void unlock(void) { pthread_mutex_unlock(&mutex); }

static void wait_for(pthread_cond_t *condition) {
  if (pthread_cond_wait(condition, &mutex) == EOWNERDEAD) pthread_mutex_consistent(&mutex);
}

static void forget_threads(void) {
  mutex_init(&mutex);
  pthread_cond_init(&changed, NULL);
  pthread_cond_init(&begun, NULL);
  threads = NULL;
  watched = 0;
}

/* With the mutex held: nothing of what there is now is read any more. */
static void fail_all(int error) {
  for (nv_snapshot *each = snapshots; each; each = each->next)
    if (!each->error) each->error = error;
  pthread_cond_broadcast(&changed);
}

/* --- the descriptor -------------------------------------------------------------------------- */

/* With the mutex held: whether there is one. Where the program has closed it, all snapshots fail. The
 * kernel lets those go on who wait to write, once no handler waits for them any more. */
static int check_descriptor(void) {
  if (descriptor < 0 || nv_wp_is_open(descriptor)) return descriptor >= 0;
  if (errno != EBADF && errno != ENOTTY) close(descriptor); /* a filter of system calls forbids it */
  descriptor = -1;
  handlers = 0; /* they end when they look */
  fail_all(EBADFD);
  return 0;
}

/* --- forks ---------------------------------------------------------------------------------- */

/* The child's memory is what the parent's was at the fork, and nothing of it is protected. Nothing is
 * locked before the fork: another library's handler may wait there for a thread that writes, which
 * waits for ours. So what the parent's threads were changing may be half done: it is all made anew. */
static void after_fork_in_child(void) {
  if (descriptor >= 0 && nv_wp_is_open(descriptor)) close(descriptor);
  descriptor = -1;
  kind = handlers = 0;
  snapshots = NULL;
  atomic_store(&active, 0);
  generation++;
  forget_threads();
}

__attribute__((constructor)) static void begin(void) {
  forget_threads();
  pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* --- cells ----------------------------------------------------------------------------------- */

static uint64_t cells_of(const nv_area *area) {
  return (area->high - 1) / CELL - area->low / CELL + 1;
}

static uint64_t cell_at(const nv_area *area, uint64_t address) {
  return address / CELL - area->low / CELL;
}

/* What of a cell is in its area. */
static void bounds(const nv_area *area, uint64_t cell, uint64_t *low, uint64_t *high) {
  uint64_t start = (area->low / CELL + cell) * CELL;
  *low = start > area->low ? start : area->low;
  *high = start + CELL < area->high ? start + CELL : area->high;
}

/* The end of what is read of a cell: what lies behind is only protected. */
static uint64_t end_of_cell(const nv_area *area, uint64_t high) {
  return high < area->tail ? high : area->tail;
}

static uint64_t behind(const nv_area *area) {
  return area->end > area->high ? area->end : area->high;
}

/* The first area of a snapshot that does not end before an address. */
static nv_area *first_area(const nv_snapshot *snapshot, uint64_t address) {
  uint32_t from = 0, to = snapshot->count;
  while (from < to) {
    uint32_t middle = from + (to - from) / 2;
    if (behind(&snapshot->areas[middle]) <= address)
      from = middle + 1;
    else
      to = middle;
  }
  return snapshot->areas + from;
}

/* With the mutex held: the first protected address in [*address, end), and what protects it. */
static nv_area *protector(uint64_t *address, uint64_t end, nv_snapshot **owner) {
  nv_area *found = NULL;
  uint64_t first = end;
  for (nv_snapshot *each = snapshots; each; each = each->next) {
    nv_area *area = first_area(each, *address), *last = each->areas + each->count;
    if (area < last && area->high <= *address) area++; /* behind its whole pages */
    if (area == last || area->low >= first) continue;
    found = area;
    *owner = each;
    first = area->low > *address ? area->low : *address;
  }
  *address = first;
  return found;
}

/* --- what was copied aside ------------------------------------------------------------------- */

/* With the mutex held. 0: there is no room. */
static int take_room(nv_snapshot *snapshot, uint64_t nbytes, uint64_t *place) {
  if (nbytes == CELL && snapshot->nfree) {
    *place = snapshot->free_cells[--snapshot->nfree];
    return 1;
  }
  if (snapshot->arena_used + nbytes > snapshot->arena_nbytes) return 0;
  *place = snapshot->arena_used;
  snapshot->arena_used += nbytes;
  return 1;
}

/* With the mutex held. A file without a name, which goes with its descriptor; 0 or an errno. */
static int take_room_in_file(nv_snapshot *snapshot, uint64_t nbytes, uint64_t *place) {
  if (snapshot->spill_fd < 0)
    snapshot->spill_fd = open(snapshot->spill_directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (snapshot->spill_fd < 0) { /* a file system that has none */
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/.nvmeio-snapshot-%ld-%p.tmp",
                          snapshot->spill_directory, (long)getpid(), (void *)snapshot);
    if (length >= (int)sizeof path) return ENAMETOOLONG;
    snapshot->spill_fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (snapshot->spill_fd < 0) return errno;
    unlink(path);
  }
  *place = snapshot->spill_end;
  snapshot->spill_end += nbytes;
  return 0;
}

/* Moves all of it between memory and the file; 0 or an errno. */
static int move_spilled(int fd, int writing, char *memory, uint64_t nbytes, uint64_t place) {
  while (nbytes) {
    ssize_t n = writing ? pwrite(fd, memory, nbytes, (off_t)place)
                        : pread(fd, memory, nbytes, (off_t)place);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    memory += n;
    place += (uint64_t)n;
    nbytes -= (uint64_t)n;
  }
  return 0;
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* With the mutex held, which is let go of meanwhile: somebody is about to write to a cell. After it
 * he may, but where another thread copies it just now: that one lets him go on. */
static void give_up(nv_snapshot *snapshot, nv_area *area, uint64_t cell) {
  uint64_t low, high, place = 0, began = now_ns();
  bounds(area, cell, &low, &high);
  if (area->states[cell] == COPYING) return;
  int copy = area->states[cell] == LIVE, error = 0, in_arena = 0;
  if (copy) {
    area->states[cell] = COPYING;
    in_arena = take_room(snapshot, high - low, &place);
    if (!in_arena) error = take_room_in_file(snapshot, high - low, &place);
  }
  snapshot->busy++; /* its memory stays its own */
  if (self) self->serves = snapshot;
  if (copy) {
    unlock();
    char *memory = (char *)(uintptr_t)low;
    if (in_arena)
      memcpy(snapshot->arena + place, memory, high - low);
    else if (!error)
      error = move_spilled(snapshot->spill_fd, 1, memory, high - low, place);
    if (!error && !nv_page_tables_kept(low, high)) error = EBADFD;
    lock();
    area->places[cell] = place;
    area->states[cell] = in_arena ? ASIDE : SPILLED;
    if (error && !snapshot->error) snapshot->error = error;
    if (!error) snapshot->counters.aside_bytes += high - low;
    if (!error && !in_arena) snapshot->counters.spilled_bytes += high - low;
    pthread_cond_broadcast(&changed);
  }
  unlock();
  nv_wp_lift(descriptor, low, high);
  lock();
  check_descriptor();
  if (copy) snapshot->counters.held_ns += now_ns() - began;
  if (self) self->serves = NULL;
  if (!--snapshot->busy) pthread_cond_broadcast(&changed);
}

/* --- handlers -------------------------------------------------------------------------------- */

static void *handle_faults(void *given) {
  int fd = (self = given)->fd;
  pthread_mutex_lock(&self->alive);
  atomic_store(&self->runs, 1);
  for (;;) {
    /* A fault wakes all handlers, and they look whether the descriptor is still theirs: one that
     * waited in read(2) would keep what was closed, and with it those who wait to write. */
    struct pollfd faults = {fd, POLLIN, 0};
    poll(&faults, 1, -1);
    lock();
    int goes_on = fd == descriptor && check_descriptor();
    unlock();
    if (!goes_on) break;
    uint64_t address;
    if (!nv_wp_read_fault(fd, &address)) continue; /* another handler's */
    nv_snapshot *snapshot = NULL;
    lock();
    uint64_t at = address;
    nv_area *area = protector(&at, at + 1, &snapshot);
    if (area) {
      give_up(snapshot, area, cell_at(area, at));
    } else { /* the snapshot has ended. Nobody else may protect it meanwhile: with the mutex */
      uint64_t page = address / PAGE * PAGE;
      nv_wp_lift(descriptor, page, page + PAGE);
    }
    unlock();
  }
  pthread_mutex_unlock(&self->alive);
  return NULL;
}

/* With the mutex held: handlers that have ended are forgotten. One that was ended leaves writers who
 * wait for it, and perhaps a cell half copied: all snapshots fail, and nothing is protected any more. */
static void look_after_handlers(void) {
  int lost = 0;
  for (nv_handler **at = &threads; *at;) {
    nv_handler *each = *at;
    int found = atomic_load(&each->runs) ? pthread_mutex_trylock(&each->alive) : EBUSY;
    if (found == EBUSY) {
      at = &each->next;
      continue;
    }
    if (found == EOWNERDEAD) {
      lost = 1;
      pthread_mutex_consistent(&each->alive);
      if (each->fd == descriptor) handlers--; /* the next snapshot begins another */
      if (each->serves) each->serves->busy--;
    }
    pthread_mutex_unlock(&each->alive);
    pthread_mutex_destroy(&each->alive);
    *at = each->next;
    free(each);
  }
  if (!lost) return;
  fail_all(EOWNERDEAD);
  for (nv_snapshot *each = snapshots; each; each = each->next) {
    for (nv_area *area = each->areas; area < each->areas + each->count; area++) {
      if (area->held < area->high) nv_wp_unregister(descriptor, area->held, area->high);
      nv_wp_wake(descriptor, area->low, area->high);
    }
  }
}

/* Looks after them while there are snapshots: who waits to write may hold what all others wait for. */
static void *watch_handlers(void *unused) {
  const struct timespec tick = {0, 50000000};
  for (;;) {
    lock();
    while (!snapshots) wait_for(&begun);
    look_after_handlers();
    unlock();
    nanosleep(&tick, NULL);
  }
  return unused;
}

/* With the mutex held. */
static int start_handlers(void) {
  static int wanted = 0;
  if (!wanted) wanted = sysconf(_SC_NPROCESSORS_ONLN) > 2 * MOST_HANDLERS ? MOST_HANDLERS : 2;
  if (handlers >= wanted && watched) return 0;
  sigset_t all, before;
  sigfillset(&all); /* signals are for threads of the program */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  if (!watched) watched = !pthread_create(&thread, &detached, watch_handlers, NULL);
  while (watched && handlers < wanted) {
    nv_handler *made = calloc(1, sizeof *made);
    if (!made) break;
    mutex_init(&made->alive);
    made->fd = descriptor;
    if (pthread_create(&thread, &detached, handle_faults, made)) {
      free(made);
      break;
    }
    made->next = threads;
    threads = made;
    handlers++;
  }
  pthread_attr_destroy(&detached);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return handlers ? 0 : -EAGAIN;
}

/* With the mutex held: which is open, or -errno. */
static int ensure_open(int which) {
  look_after_handlers();
  int result = check_descriptor() ? start_handlers() : 1;
  if (result <= 0) return result ? result : kind;
  result = descriptor = nv_wp_open(which);
  if (descriptor < 0) return result;
  nv_page_tables_open(); /* a handler opens nothing */
  result = start_handlers();
  if (!result) return kind = which;
  close(descriptor);
  descriptor = -1;
  return result;
}

int nv_snapshot_open(int which) {
  lock();
  int result = ensure_open(which);
  unlock();
  return result;
}

/* --- a snapshot's life ----------------------------------------------------------------------- */

static int area_init(nv_area *area, uint64_t address, uint64_t nbytes, uint64_t limit) {
  *area = (nv_area){.start = address, .end = address + nbytes};
  area->low = area->held = (address + PAGE - 1) / PAGE * PAGE;
  area->tail = area->high = area->end / PAGE * PAGE;
  if (limit > area->tail) { /* something is read of each cell */
    uint64_t last = (area->tail + CELL - 1) / CELL * CELL;
    area->high = (limit < last ? limit : last) / PAGE * PAGE;
  }
  if (area->tail <= area->low) return -EINVAL;
  area->states = calloc(cells_of(area), sizeof *area->states);
  area->places = calloc(cells_of(area), sizeof *area->places);
  area->edges = malloc(area->low - address + area->end - area->tail + 1);
  return area->states && area->places && area->edges ? 0 : -ENOMEM;
}

static void area_free(nv_area *area) {
  free(area->states);
  free(area->places);
  free(area->edges);
}

/* With the mutex held: whether another area has any of its pages. */
static int is_taken(const nv_area *area) {
  for (nv_snapshot *other = snapshots; other; other = other->next) {
    nv_area *its = first_area(other, area->low), *end = other->areas + other->count;
    for (; its < end && its->low < area->high; its++)
      if (its->high > area->low) return 1;
  }
  return 0;
}

nv_snapshot *nv_snapshot_new(uint32_t count, const uint64_t *addresses, const uint64_t *sizes,
                             const uint64_t *limits, int *results, const char *spill_directory) {
  nv_snapshot *snapshot = calloc(1, sizeof *snapshot);
  if (!snapshot) return NULL;
  snapshot->spill_fd = -1;
  snapshot->areas = calloc(count + 1u, sizeof *snapshot->areas);
  snapshot->spill_directory = strdup(spill_directory);
  if (!snapshot->areas || !snapshot->spill_directory) {
    nv_snapshot_free(snapshot);
    return NULL;
  }
  lock();
  int refused = nv_wp_is_merging() ? -ENOTUNIQ : kind ? ensure_open(kind) : -ENODEV;
  snapshot->generation = generation;
  snapshot->next = snapshots;
  snapshots = snapshot;
  atomic_fetch_add(&active, 1);
  pthread_cond_signal(&begun);
  for (uint32_t i = 0; i < count; i++) {
    nv_area area;
    uint64_t reached = snapshot->count ? behind(&snapshot->areas[snapshot->count - 1]) : 0;
    int result = addresses[i] < reached ? -EBUSY : area_init(&area, addresses[i], sizes[i], limits[i]);
    if (!result && refused < 0) result = refused;
    if (!result && is_taken(&area)) { /* perhaps only what lies behind it */
      area.high = area.tail;
      if (is_taken(&area)) result = -EBUSY;
    }
    if (!result) result = nv_wp_register(descriptor, area.low, area.high);
    if (!result)
      snapshot->areas[snapshot->count++] = area;
    else if (addresses[i] >= reached)
      area_free(&area);
    results[i] = result;
  }
  unlock();
  return snapshot;
}

int nv_snapshot_protect(nv_snapshot *snapshot, uint64_t arena, uint64_t arena_nbytes) {
  snapshot->free_cells = calloc(arena_nbytes / CELL + 1, sizeof *snapshot->free_cells);
  int failure = snapshot->free_cells ? 0 : -ENOMEM;
  lock(); /* a fault of the snapshot before may still be served */
  snapshot->arena = (char *)(uintptr_t)arena;
  snapshot->arena_nbytes = arena_nbytes;
  unlock();
  for (nv_area *area = snapshot->areas; area < snapshot->areas + snapshot->count; area++) {
    if (!failure) failure = nv_wp_protect(descriptor, area->low, area->high);
    if (failure) break;
    uint64_t head = area->low - area->start;
    memcpy(area->edges, (char *)(uintptr_t)area->start, head);
    memcpy(area->edges + head, (char *)(uintptr_t)area->tail, area->end - area->tail);
  }
  if (failure) nv_snapshot_end(snapshot);
  return failure;
}

/* With the mutex held: what leads to a snapshot; to NULL where it has ended, or is the parent's of
 * this forked process. */
static nv_snapshot **place_of(const nv_snapshot *snapshot) {
  nv_snapshot **at = &snapshots;
  while (*at && *at != snapshot) at = &(*at)->next;
  return at;
}

void nv_snapshot_end(nv_snapshot *snapshot) {
  lock();
  nv_snapshot **at;
  while (*(at = place_of(snapshot)) && snapshot->busy) wait_for(&changed);
  if (*at) { /* else somebody else has ended it meanwhile */
    *at = snapshot->next;
    atomic_fetch_sub(&active, 1);
    for (uint32_t i = 0; i < snapshot->count; i++) { /* what is left */
      nv_area *area = &snapshot->areas[i];
      if (area->held < area->high) nv_wp_unregister(descriptor, area->held, area->high);
    }
    check_descriptor(); /* for the others */
    if (snapshot->spill_fd >= 0) close(snapshot->spill_fd); /* its room is the file system's again */
    snapshot->spill_fd = -1;
  }
  unlock();
}

void nv_snapshot_free(nv_snapshot *snapshot) {
  nv_snapshot_end(snapshot);
  if (snapshot->spill_fd >= 0) close(snapshot->spill_fd);
  for (uint32_t i = 0; i < snapshot->count; i++) area_free(&snapshot->areas[i]);
  free(snapshot->areas);
  free(snapshot->free_cells);
  free(snapshot->spill_directory);
  free(snapshot);
}

void nv_snapshot_count(nv_snapshot *snapshot, nv_snapshot_counters *counters) {
  lock();
  *counters = snapshot->counters;
  unlock();
}

/* --- reading --------------------------------------------------------------------------------- */

/* To NULL: it is summed only. */
static void take(char *to, const char *from, uint64_t nbytes, uint32_t *crc) {
  if (crc)
    *crc = nv_copy_crc32((uintptr_t)(to ? to : from), (uintptr_t)from, nbytes, *crc);
  else if (to)
    memcpy(to, from, nbytes);
}

static int take_spilled(int fd, char *to, uint64_t nbytes, uint64_t place, uint32_t *crc) {
  char buffer[16384]; /* where it is summed only */
  while (nbytes) {
    uint64_t step = to || nbytes < sizeof buffer ? nbytes : sizeof buffer;
    char *at = to ? to : buffer;
    int error = move_spilled(fd, 0, at, step, place);
    if (error) return error;
    if (crc) take(NULL, at, step, crc);
    nbytes -= step;
    place += step;
  }
  return 0;
}

/* With the mutex held, which is let go of meanwhile: a cell of the area is done. */
static void let_go(nv_area *area) {
  uint64_t cells = cells_of(area), from = area->held, to = area->high;
  while (area->next < cells && area->states[area->next] == DONE) area->next++;
  if (area->next < cells) to = (area->low / CELL + area->next) * CELL;
  if (to <= from || (to - from < LET_GO && to < area->high)) return;
  area->held = to;
  unlock();
  nv_wp_unregister(descriptor, from, to);
  lock();
  check_descriptor();
}

/* With the mutex held, which is let go of meanwhile: a cell was read to its end. */
static void end_cell(nv_snapshot *snapshot, nv_area *area, uint64_t cell, uint64_t nbytes) {
  while (area->states[cell] == COPYING && !snapshot->error) wait_for(&changed);
  if (area->states[cell] == ASIDE && nbytes == CELL)
    snapshot->free_cells[snapshot->nfree++] = area->places[cell];
  area->states[cell] = DONE;
  let_go(area);
}

/* Whether the whole pages around [from, until) have been protected until now. */
static int is_kept(uint64_t from, uint64_t until) {
  return nv_page_tables_kept(from / PAGE * PAGE, (until + PAGE - 1) / PAGE * PAGE);
}

/* [from, until) of a cell; 0 or -errno. To NULL: it is summed, and is still to be read. */
static int read_cell(nv_snapshot *snapshot, nv_area *area, uint64_t from, uint64_t until, char *to,
                     uint32_t *crc) {
  uint64_t low, high, cell = cell_at(area, from), nbytes = until - from;
  bounds(area, cell, &low, &high);
  int result, again = 1;
  lock();
  snapshot->busy++;
  do {
    while (area->states[cell] == COPYING && !snapshot->error) wait_for(&changed);
    int state = area->states[cell], error = snapshot->error;
    uint64_t at = area->places[cell] + (from - low);
    uint32_t sum = crc ? *crc : 0;
    unlock();
    result = -error;
    if (!result && state == DONE) result = -ESTALE;
    if (!result && state == LIVE)
      take(to, (char *)(uintptr_t)from, nbytes, crc ? &sum : NULL);
    else if (!result && state == ASIDE)
      take(to, snapshot->arena + at, nbytes, crc ? &sum : NULL);
    else if (!result)
      result = -take_spilled(snapshot->spill_fd, to, nbytes, at, crc ? &sum : NULL);
    int right = !to || state != LIVE || is_kept(from, until);
    lock();
    /* COPYING: what was read is right, for whoever wants to write still waits. */
    again = !result && state == LIVE && area->states[cell] > COPYING;
    if (again) continue;
    if (!right && !snapshot->error) snapshot->error = EBADFD;
    if (crc) *crc = sum;
    if (to && !result && until == end_of_cell(area, high)) end_cell(snapshot, area, cell, high - low);
  } while (again);
  if (snapshot->error) result = -snapshot->error;
  if (!--snapshot->busy) pthread_cond_broadcast(&changed);
  unlock();
  return result;
}

int nv_snapshot_read(nv_snapshot *snapshot, uint64_t address, uint64_t nbytes, uint64_t to_address,
                     uint32_t *crc) {
  if (snapshot->generation != generation) return -ENODEV;
  nv_area *area = first_area(snapshot, address);
  uint64_t end = address + nbytes;
  if (area == snapshot->areas + snapshot->count || address < area->start || end > area->end)
    return -EINVAL;
  uint64_t head = area->low - area->start;
  char *to = (char *)(uintptr_t)to_address;
  while (address < end) {
    uint64_t until = end;
    int failure = 0;
    if (address < area->low) {
      until = end < area->low ? end : area->low;
      take(to, area->edges + (address - area->start), until - address, crc);
    } else if (address >= area->tail) {
      take(to, area->edges + head + (address - area->tail), until - address, crc);
    } else {
      uint64_t low, high;
      bounds(area, cell_at(area, address), &low, &high);
      if (end_of_cell(area, high) < until) until = end_of_cell(area, high);
      failure = read_cell(snapshot, area, address, until, to, crc);
    }
    if (failure) return failure;
    if (to) to += until - address;
    address = until;
  }
  return 0;
}

/* Whether [from, until) of a cell is as it was at the moment of protection: then it was read where it
 * lies. Or -errno. */
static int settle_cell(nv_snapshot *snapshot, nv_area *area, uint64_t from, uint64_t until) {
  uint64_t low, high, cell = cell_at(area, from);
  bounds(area, cell, &low, &high);
  lock();
  snapshot->busy++;
  unlock();
  int kept = is_kept(from, until);
  lock();
  int right = area->states[cell] <= COPYING; /* whoever wants to write still waits */
  if (right && !kept && !snapshot->error) snapshot->error = EBADFD;
  if (right && until == end_of_cell(area, high)) end_cell(snapshot, area, cell, high - low);
  int result = snapshot->error ? -snapshot->error : right;
  if (!--snapshot->busy) pthread_cond_broadcast(&changed);
  unlock();
  return result;
}

int nv_snapshot_settle(nv_snapshot *snapshot, uint64_t *address, uint64_t *nbytes) {
  if (snapshot->generation != generation) return -ENODEV;
  nv_area *area = first_area(snapshot, *address);
  uint64_t end = *address + *nbytes;
  if (area == snapshot->areas + snapshot->count || *address < area->low || end > area->tail)
    return -EINVAL;
  for (*nbytes = 0; *address < end;) {
    uint64_t low, high;
    bounds(area, cell_at(area, *address), &low, &high);
    if (high > end) high = end;
    int right = settle_cell(snapshot, area, *address, high);
    if (right < 0) return right;
    if (!right) {
      *nbytes = high - *address;
      break;
    }
    *address = high;
  }
  return 0;
}

/* --- writes by the kernel -------------------------------------------------------------------- */

void nv_snapshot_give_up(uint64_t address, uint64_t nbytes) {
  if (!atomic_load_explicit(&active, memory_order_relaxed)) return;
  uint64_t end = address + nbytes;
  nv_snapshot *snapshot = NULL;
  nv_area *area;
  lock();
  while ((area = protector(&address, end, &snapshot))) {
    uint64_t low, high, cell = cell_at(area, address);
    bounds(area, cell, &low, &high);
    if (area->states[cell] == COPYING && !snapshot->error) { /* another thread's: until it is there */
      wait_for(&changed);
    } else { /* whoever has copied it may not have lifted its protection yet */
      give_up(snapshot, area, cell);
      address = high;
    }
  }
  unlock();
}
