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
 * writer ever waits for a reader.
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
 *
 * Source: Documentation/admin-guide/mm/userfaultfd.rst and pagemap.rst, include/uapi/linux/userfaultfd.h
 * and fs.h. What is needed of the headers is repeated here, for wheels are built with older ones. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE ((uint64_t)4096)
/* What is copied on one write. Overwriting 1 GiB on small pages takes 2.2 s with 4 KiB at a time and
 * 0.4 s with 2 MiB (0.08 s without protection); and huge pages stay whole. */
#define CELL ((uint64_t)2 << 20)
/* How much of an area is let go of at once. To lift each cell's protection and unregister all of them
 * in the end walks over the pages' entries twice: 0.13 s for 1.6 GB on small pages, for 0.06. */
#define LET_GO (8 * CELL)
#define MOST_HANDLERS 4
#define GET_MEMORY_MERGE 68 /* linux/prctl.h, since Linux 6.4 */

/* --- linux/userfaultfd.h -------------------------------------------------------------------- */

struct api {
  uint64_t api, features, ioctls;
};
struct range {
  uint64_t start, nbytes;
};
struct registration {
  struct range range;
  uint64_t mode, ioctls;
};
struct protection {
  struct range range;
  uint64_t mode;
};
struct message {
  uint8_t event, reserved[7];
  uint64_t flags, address, thread; /* of a fault */
};
#define API_VERSION 0xAAu
#define UFFD_API _IOWR(0xAA, 0x3F, struct api)
#define UFFD_REGISTER _IOWR(0xAA, 0x00, struct registration)
#define UFFD_UNREGISTER _IOR(0xAA, 0x01, struct range)
#define UFFD_WAKE _IOR(0xAA, 0x02, struct range)
#define UFFD_WRITEPROTECT _IOWR(0xAA, 0x06, struct protection)
#define UFFD_NEW _IO(0xAA, 0x00) /* of /dev/userfaultfd */
#define EVENT_FAULT 0x12
#define MODE_WRITEPROTECT 2
#define USER_MODE_ONLY 1
/* Write faults are told of, and so are those of pages that do not exist yet (Linux 6.4). */
#define FEATURES ((1u << 0) | (1u << 13))

/* --- linux/fs.h ------------------------------------------------------------------------------ */

struct region {
  uint64_t start, end, categories;
};
struct scan {
  uint64_t size, flags, start, end, walk_end, regions, count, most_pages;
  uint64_t inverted, all_of, any_of, told;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct scan)
#define IS_WRITTEN (1u << 1) /* no write protection is on it */
#define IS_PRESENT (1u << 3)
#define IS_SWAPPED (1u << 4) /* or it is noted that its first write has to be seen */

/* --- structures ----------------------------------------------------------------------------- */

enum { LIVE, COPYING, ASIDE, SPILLED, DONE };

typedef struct {
  uint64_t start, end; /* the caller's */
  uint64_t low, high;  /* the whole pages within */
  char *edges;         /* copies of [start, low) and [high, end) */
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

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static nv_snapshot *snapshots; /* those that have memory registered */
static atomic_uint active;     /* how many */
static int descriptor = -1, page_tables = -1, kind, handlers;
static unsigned generation;

/* --- the descriptor -------------------------------------------------------------------------- */

static int is_ours(int fd) {
  struct range nowhere = {0, 0};
  return ioctl(fd, UFFD_WAKE, &nowhere) < 0 && errno == EINVAL;
}

/* With the mutex held: whether there is one. Where the program has closed it, all snapshots fail. The
 * kernel lets those go on who wait to write, once no handler waits for them any more. */
static int check_descriptor(void) {
  if (descriptor < 0 || is_ours(descriptor)) return descriptor >= 0;
  if (errno != EBADF && errno != ENOTTY) close(descriptor); /* a filter of system calls forbids it */
  descriptor = -1;
  handlers = 0; /* they end when they look */
  for (nv_snapshot *each = snapshots; each; each = each->next)
    if (!each->error) each->error = EBADFD;
  pthread_cond_broadcast(&changed);
  return 0;
}

/* --- forks ---------------------------------------------------------------------------------- */

/* The child's memory is what the parent's was at the fork, and nothing of it is protected. Nothing is
 * locked before the fork: another library's handler may wait there for a thread that writes, which
 * waits for ours. So what the parent's threads were changing may be half done: it is all made anew. */
static void after_fork_in_child(void) {
  if (descriptor >= 0 && is_ours(descriptor)) {
    close(descriptor);
    close(page_tables);
  }
  descriptor = page_tables = -1;
  kind = handlers = 0;
  snapshots = NULL;
  atomic_store(&active, 0);
  generation++;
  pthread_mutex_init(&mutex, NULL);
  pthread_cond_init(&changed, NULL);
}

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* --- the kernel's calls ---------------------------------------------------------------------- */

static int protect(uint64_t low, uint64_t high) {
  struct protection wanted = {{low, high - low}, 1};
  return ioctl(descriptor, UFFD_WRITEPROTECT, &wanted) ? -errno : 0;
}

/* Whoever waits to write there goes on. */
static void lift(uint64_t low, uint64_t high) {
  struct protection wanted = {{low, high - low}, 0};
  if (!ioctl(descriptor, UFFD_WRITEPROTECT, &wanted)) return;
  ioctl(descriptor, UFFD_WAKE, &wanted.range); /* it is not registered any more: they try again */
}

/* Nothing there is protected any more, and whoever waits to write goes on. */
static void unregister(uint64_t low, uint64_t high) {
  struct range range = {low, high - low};
  ioctl(descriptor, UFFD_UNREGISTER, &range);
}

/* Whether all of it has been protected until now. Where the kernel cannot say it, it has. */
static int is_protected(uint64_t low, uint64_t high) {
  struct region region = {0};
  struct scan scan = {.size = sizeof scan, .start = low, .end = high, .count = 1};
  scan.regions = (uintptr_t)&region;
  scan.inverted = scan.all_of = scan.told = IS_WRITTEN;
  scan.any_of = IS_PRESENT | IS_SWAPPED;
  int found = ioctl(page_tables, PAGEMAP_SCAN, &scan);
  return found < 0 || (found == 1 && region.start == low && region.end == high);
}

/* KSM (mm/ksm.c, replace_page) forgets the protection of a page that it merges. */
static int is_merging(void) { return prctl(GET_MEMORY_MERGE, 0, 0, 0, 0) == 1; }

static int open_descriptor(int which) {
  int fd = -1;
  if (is_merging()) return -ENOTUNIQ;
  if (which == NV_SNAPSHOT_DEVICE) {
    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (device < 0) return -errno;
    fd = ioctl(device, UFFD_NEW, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) fd = -errno;
    close(device);
  } else {
#ifdef SYS_userfaultfd
    int only = which == NV_SNAPSHOT_USER_MODE ? USER_MODE_ONLY : 0;
    fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | only);
    if (fd < 0) fd = -errno;
#else
    fd = -ENOSYS;
#endif
  }
  struct api api = {API_VERSION, FEATURES, 0};
  if (fd >= 0 && ioctl(fd, UFFD_API, &api)) { /* EINVAL: a kernel without one of the features */
    close(fd);
    fd = -EOPNOTSUPP;
  }
  return fd;
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

/* The first area of a snapshot that does not end before an address. */
static nv_area *first_area(const nv_snapshot *snapshot, uint64_t address) {
  uint32_t from = 0, to = snapshot->count;
  while (from < to) {
    uint32_t middle = from + (to - from) / 2;
    if (snapshot->areas[middle].end <= address)
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
  if (copy) {
    pthread_mutex_unlock(&mutex);
    char *memory = (char *)(uintptr_t)low;
    if (in_arena)
      memcpy(snapshot->arena + place, memory, high - low);
    else if (!error)
      error = move_spilled(snapshot->spill_fd, 1, memory, high - low, place);
    if (!error && !is_protected(low, high)) error = EBADFD;
    pthread_mutex_lock(&mutex);
    area->places[cell] = place;
    area->states[cell] = in_arena ? ASIDE : SPILLED;
    if (error && !snapshot->error) snapshot->error = error;
    if (!error) snapshot->counters.aside_bytes += high - low;
    if (!error && !in_arena) snapshot->counters.spilled_bytes += high - low;
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&mutex);
  lift(low, high);
  pthread_mutex_lock(&mutex);
  check_descriptor();
  if (copy) snapshot->counters.held_ns += now_ns() - began;
  if (!--snapshot->busy) pthread_cond_broadcast(&changed);
}

/* --- handlers -------------------------------------------------------------------------------- */

static void *handle_faults(void *opened) {
  int fd = (int)(intptr_t)opened;
  for (;;) {
    /* A fault wakes all handlers, and they look whether the descriptor is still theirs: one that
     * waited in read(2) would keep what was closed, and with it those who wait to write. */
    struct pollfd faults = {fd, POLLIN, 0};
    poll(&faults, 1, -1);
    pthread_mutex_lock(&mutex);
    int goes_on = fd == descriptor && check_descriptor();
    pthread_mutex_unlock(&mutex);
    if (!goes_on) return NULL;
    struct message message;
    ssize_t n = read(fd, &message, sizeof message);
    if (n != sizeof message || message.event != EVENT_FAULT) continue; /* another handler's */
    nv_snapshot *snapshot = NULL;
    pthread_mutex_lock(&mutex);
    uint64_t at = message.address;
    nv_area *area = protector(&at, at + 1, &snapshot);
    if (area) {
      give_up(snapshot, area, cell_at(area, at));
    } else { /* the snapshot has ended. Nobody else may protect it meanwhile: with the mutex */
      uint64_t page = message.address / PAGE * PAGE;
      lift(page, page + PAGE);
    }
    pthread_mutex_unlock(&mutex);
  }
}

/* With the mutex held. */
static int start_handlers(void) {
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  int wanted = cores > 2 * MOST_HANDLERS ? MOST_HANDLERS : 2;
  sigset_t all, before;
  sigfillset(&all); /* signals are for threads of the program */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  void *opened = (void *)(intptr_t)descriptor;
  while (handlers < wanted && !pthread_create(&thread, &detached, handle_faults, opened)) handlers++;
  pthread_attr_destroy(&detached);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return handlers ? 0 : -EAGAIN;
}

/* With the mutex held: which is open, or -errno. */
static int ensure_open(int which) {
  if (check_descriptor()) return kind;
  int result = descriptor = open_descriptor(which);
  if (descriptor < 0) return result;
  if (page_tables < 0) page_tables = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  result = start_handlers();
  if (!result) return kind = which;
  close(descriptor);
  descriptor = -1;
  return result;
}

int nv_snapshot_open(int which) {
  pthread_mutex_lock(&mutex);
  int result = ensure_open(which);
  pthread_mutex_unlock(&mutex);
  return result;
}

/* --- a snapshot's life ----------------------------------------------------------------------- */

static int area_init(nv_area *area, uint64_t address, uint64_t nbytes) {
  *area = (nv_area){.start = address, .end = address + nbytes};
  area->low = (address + PAGE - 1) / PAGE * PAGE;
  area->high = area->end / PAGE * PAGE;
  area->held = area->low;
  if (area->high <= area->low) return -EINVAL;
  area->states = calloc(cells_of(area), sizeof *area->states);
  area->places = calloc(cells_of(area), sizeof *area->places);
  area->edges = malloc(nbytes - (area->high - area->low) + 1);
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
                             int *results, const char *spill_directory) {
  nv_snapshot *snapshot = calloc(1, sizeof *snapshot);
  if (!snapshot) return NULL;
  snapshot->spill_fd = -1;
  snapshot->areas = calloc(count + 1u, sizeof *snapshot->areas);
  snapshot->spill_directory = strdup(spill_directory);
  if (!snapshot->areas || !snapshot->spill_directory) {
    nv_snapshot_free(snapshot);
    return NULL;
  }
  pthread_mutex_lock(&mutex);
  snapshot->generation = generation;
  snapshot->next = snapshots;
  snapshots = snapshot;
  atomic_fetch_add(&active, 1);
  int refused = is_merging() ? -ENOTUNIQ : kind ? ensure_open(kind) : -ENODEV;
  for (uint32_t i = 0; i < count; i++) {
    nv_area area;
    uint64_t reached = snapshot->count ? snapshot->areas[snapshot->count - 1].end : 0;
    int result = addresses[i] < reached ? -EBUSY : area_init(&area, addresses[i], sizes[i]);
    if (!result && refused < 0) result = refused;
    if (!result && is_taken(&area)) result = -EBUSY;
    if (!result) {
      struct registration wanted = {{area.low, area.high - area.low}, MODE_WRITEPROTECT, 0};
      if (ioctl(descriptor, UFFD_REGISTER, &wanted)) result = -errno;
    }
    if (!result)
      snapshot->areas[snapshot->count++] = area;
    else if (addresses[i] >= reached)
      area_free(&area);
    results[i] = result;
  }
  pthread_mutex_unlock(&mutex);
  return snapshot;
}

int nv_snapshot_protect(nv_snapshot *snapshot, uint64_t arena, uint64_t arena_nbytes) {
  snapshot->free_cells = calloc(arena_nbytes / CELL + 1, sizeof *snapshot->free_cells);
  int failure = snapshot->free_cells ? 0 : -ENOMEM;
  pthread_mutex_lock(&mutex); /* a fault of the snapshot before may still be served */
  snapshot->arena = (char *)(uintptr_t)arena;
  snapshot->arena_nbytes = arena_nbytes;
  pthread_mutex_unlock(&mutex);
  for (nv_area *area = snapshot->areas; area < snapshot->areas + snapshot->count; area++) {
    if (!failure) failure = protect(area->low, area->high);
    if (failure) break;
    uint64_t head = area->low - area->start;
    memcpy(area->edges, (char *)(uintptr_t)area->start, head);
    memcpy(area->edges + head, (char *)(uintptr_t)area->high, area->end - area->high);
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
  pthread_mutex_lock(&mutex);
  nv_snapshot **at;
  while (*(at = place_of(snapshot)) && snapshot->busy) pthread_cond_wait(&changed, &mutex);
  if (*at) { /* else somebody else has ended it meanwhile */
    *at = snapshot->next;
    atomic_fetch_sub(&active, 1);
    for (uint32_t i = 0; i < snapshot->count; i++) { /* what is left */
      nv_area *area = &snapshot->areas[i];
      if (area->held < area->high) unregister(area->held, area->high);
    }
    check_descriptor(); /* for the others */
    if (snapshot->spill_fd >= 0) close(snapshot->spill_fd); /* its room is the file system's again */
    snapshot->spill_fd = -1;
  }
  pthread_mutex_unlock(&mutex);
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
  pthread_mutex_lock(&mutex);
  *counters = snapshot->counters;
  pthread_mutex_unlock(&mutex);
}

/* --- reading --------------------------------------------------------------------------------- */

static void take(char *to, const char *from, uint64_t nbytes, uint32_t *crc) {
  if (crc)
    *crc = nv_copy_crc32((uintptr_t)to, (uintptr_t)from, nbytes, *crc);
  else
    memcpy(to, from, nbytes);
}

/* With the mutex held, which is let go of meanwhile: a cell of the area is done. */
static void let_go(nv_area *area) {
  uint64_t cells = cells_of(area), from = area->held, to = area->high;
  while (area->next < cells && area->states[area->next] == DONE) area->next++;
  if (area->next < cells) to = (area->low / CELL + area->next) * CELL;
  if (to <= from || (to - from < LET_GO && to < area->high)) return;
  area->held = to;
  pthread_mutex_unlock(&mutex);
  unregister(from, to);
  pthread_mutex_lock(&mutex);
  check_descriptor();
}

/* [from, until) of a cell; 0 or -errno. */
static int read_cell(nv_snapshot *snapshot, nv_area *area, uint64_t from, uint64_t until, char *to,
                     uint32_t *crc) {
  uint64_t low, high, cell = cell_at(area, from), nbytes = until - from;
  bounds(area, cell, &low, &high);
  int result, again = 1;
  pthread_mutex_lock(&mutex);
  snapshot->busy++;
  do {
    while (area->states[cell] == COPYING) pthread_cond_wait(&changed, &mutex);
    int state = area->states[cell], error = snapshot->error;
    uint64_t at = area->places[cell] + (from - low);
    uint32_t sum = crc ? *crc : 0;
    pthread_mutex_unlock(&mutex);
    result = -error;
    if (!result && state == DONE) result = -ESTALE;
    if (!result && state == LIVE)
      take(to, (char *)(uintptr_t)from, nbytes, crc ? &sum : NULL);
    else if (!result && state == ASIDE)
      take(to, snapshot->arena + at, nbytes, crc ? &sum : NULL);
    else if (!result) {
      result = -move_spilled(snapshot->spill_fd, 0, to, nbytes, at);
      if (!result && crc) take(to, to, nbytes, &sum);
    }
    int done = !result && until == high;
    int right = state != LIVE || is_protected(from / PAGE * PAGE, (until + PAGE - 1) / PAGE * PAGE);
    pthread_mutex_lock(&mutex);
    /* COPYING: what was read is right, for whoever wants to write still waits. */
    again = !result && state == LIVE && area->states[cell] > COPYING;
    if (again) continue;
    if (!right && !snapshot->error) snapshot->error = EBADFD;
    while (done && area->states[cell] == COPYING) pthread_cond_wait(&changed, &mutex);
    if (crc) *crc = sum;
    if (!done) continue;
    int was = area->states[cell];
    area->states[cell] = DONE;
    if (was == ASIDE && high - low == CELL)
      snapshot->free_cells[snapshot->nfree++] = area->places[cell];
    let_go(area);
  } while (again);
  if (snapshot->error) result = -snapshot->error;
  if (!--snapshot->busy) pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
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
    } else if (address >= area->high) {
      take(to, area->edges + head + (address - area->high), until - address, crc);
    } else {
      uint64_t low, high;
      bounds(area, cell_at(area, address), &low, &high);
      until = end < high ? end : high;
      failure = read_cell(snapshot, area, address, until, to, crc);
    }
    if (failure) return failure;
    to += until - address;
    address = until;
  }
  return 0;
}

/* --- writes by the kernel -------------------------------------------------------------------- */

void nv_snapshot_give_up(uint64_t address, uint64_t nbytes) {
  if (!atomic_load_explicit(&active, memory_order_relaxed)) return;
  uint64_t end = address + nbytes;
  nv_snapshot *snapshot = NULL;
  nv_area *area;
  pthread_mutex_lock(&mutex);
  while ((area = protector(&address, end, &snapshot))) {
    uint64_t low, high, cell = cell_at(area, address);
    bounds(area, cell, &low, &high);
    if (area->states[cell] == COPYING) { /* another thread's copy: until it is there */
      pthread_cond_wait(&changed, &mutex);
    } else { /* whoever has copied it may not have lifted its protection yet */
      give_up(snapshot, area, cell);
      address = high;
    }
  }
  pthread_mutex_unlock(&mutex);
}
