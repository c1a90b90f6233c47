/* A libcufile that moves bytes with pread and pwrite, and misbehaves on order.
 *
 * Knobs are plain globals, set through ctypes, or from the environment when it is loaded:
 * FAKE_CUFILE="open_hold=1 result=-5036". What was called is counted and, for transfers, noted. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct { int err, cu_err; } status;
typedef struct { int type; union { int fd; void *handle; } handle; const void *ops; } descr;
typedef struct {
  struct { unsigned major, minor; size_t poll, max_io; unsigned dstatus, dcontrol; } nvfs;
  unsigned fflags, rest[5];
} props;
typedef struct { int fd, live, at; } file;

long version = 1200, open_status, open_cuda, close_status, file_status, memory_status;
long open_hold, close_hold, hold;   /* calls do not return while these are set */
long most;                          /* bytes that one transfer moves at most */
long result, result_errno, result_from; /* returned instead, at file offsets from result_from on */
long nvfs_major, dstatus, fflags, p2p_flags = 1, p2p_status;
long dangling;                      /* files deregistered when no driver was open */
long registrations;                 /* of memory, ever */
long bounced;                       /* transfers that named no registered memory by its base */
long opens, closes, files, memories, calls, together, most_together, use_count;
long flags_set[32], max_direct_io;
enum { NOTED = 256 };
struct { long base, size, file_offset, buffer_offset; } noted[NOTED];

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct { const void *base; size_t size; } regions[64];
static int descriptors[64]; /* registered, plus one */

static const struct { const char *name; long *value; } knobs[] = {
    {"version", &version},         {"open_status", &open_status}, {"open_cuda", &open_cuda},
    {"close_status", &close_status}, {"file_status", &file_status},
    {"memory_status", &memory_status}, {"open_hold", &open_hold}, {"close_hold", &close_hold},
    {"hold", &hold},               {"most", &most},               {"result", &result},
    {"result_errno", &result_errno}, {"result_from", &result_from},
    {"nvfs_major", &nvfs_major},   {"dstatus", &dstatus},         {"fflags", &fflags},
    {"p2p_flags", &p2p_flags},
};

__attribute__((constructor)) static void from_environment(void) {
  const char *all = getenv("FAKE_CUFILE");
  for (size_t i = 0; all && i < sizeof knobs / sizeof *knobs; i++) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "%s=", knobs[i].name);
    for (const char *at = all; (at = strstr(at, wanted)); at++)
      if (at == all || at[-1] == ' ') *knobs[i].value = atol(at + strlen(wanted));
  }
}

static void hold_while(volatile long *set) {
  while (*set) usleep(500);
}

static status answer(long code) { return (status){(int)code, 0}; }

status cuFileGetVersion(int *number) { *number = (int)version; return answer(0); }
long cuFileUseCount(void) { return use_count; }

status cuFileDriverOpen(void) {
  opens++;
  hold_while(&open_hold);
  if (!open_status) use_count++;
  return (status){(int)open_status, (int)open_cuda};
}

status cuFileDriverClose_v2(void) {
  closes++;
  hold_while(&close_hold);
  use_count--;
  return answer(close_status);
}

status cuFileSetParameterBool(int parameter, _Bool value) {
  flags_set[parameter] = 1 + value;
  return answer(0);
}

status cuFileDriverSetMaxDirectIOSize(size_t kib) { max_direct_io = (long)kib; return answer(0); }

status cuFileDriverGetProperties(props *out) {
  memset(out, 0, sizeof *out);
  out->nvfs.major = (unsigned)nvfs_major;
  out->nvfs.dstatus = (unsigned)dstatus;
  out->fflags = (unsigned)fflags;
  return answer(0);
}

status cuFileDriverGetP2PFlags(int status_flag, int *out) {
  *out = status_flag == 4 ? (int)p2p_flags : 0;
  return answer(p2p_status);
}

status cuFileHandleRegister(void **handle, descr *described) {
  if (file_status) return answer(file_status);
  int given = described->handle.fd, at = -1;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < 64; i++) {
    if (descriptors[i] == given + 1) at = -2;
    if (at == -1 && !descriptors[i]) at = i;
  }
  if (at >= 0) descriptors[at] = given + 1;
  pthread_mutex_unlock(&mutex);
  if (at < 0) return answer(5028);
  file *made = malloc(sizeof *made);
  /* The real one takes any alignment on a descriptor with O_DIRECT; this one opens another. */
  char name[32];
  snprintf(name, sizeof name, "/proc/self/fd/%d", described->handle.fd);
  made->fd = open(name, (fcntl(described->handle.fd, F_GETFL) & O_ACCMODE) | O_CLOEXEC);
  made->live = 1;
  made->at = at;
  *handle = made;
  __sync_fetch_and_add(&files, 1);
  return answer(0);
}

/* Not freed: a use after this is to be seen, not to crash. */
void cuFileHandleDeregister(void *handle) {
  if (!use_count) dangling++;
  descriptors[((file *)handle)->at] = 0;
  ((file *)handle)->live = 0;
  close(((file *)handle)->fd);
  __sync_fetch_and_sub(&files, 1);
}

status cuFileBufRegister(const void *base, size_t size, int flags) {
  (void)flags;
  if (memory_status) return answer(memory_status);
  pthread_mutex_lock(&mutex);
  int at = -1;
  for (int i = 0; i < 64; i++) {
    if (regions[i].base == base) at = -2;
    if (at == -1 && !regions[i].base) at = i;
  }
  if (at >= 0) {
    regions[at].base = base;
    regions[at].size = size;
    memories++;
    registrations++;
  }
  pthread_mutex_unlock(&mutex);
  return answer(at < 0 ? 5023 : 0);
}

status cuFileBufDeregister(const void *base) {
  int found = 0;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < 64; i++)
    if (regions[i].base == base) {
      regions[i].base = NULL;
      found = 1;
      memories--;
    }
  pthread_mutex_unlock(&mutex);
  return answer(found ? 0 : 5024);
}

static ssize_t move(file *handle, char *base, size_t size, off_t file_offset, off_t offset,
                    int writing) {
  long now = __sync_add_and_fetch(&together, 1), call = __sync_fetch_and_add(&calls, 1);
  if (now > most_together) most_together = now;
  if (call < NOTED) {
    noted[call].base = (long)base;
    noted[call].size = (long)size;
    noted[call].file_offset = file_offset;
    noted[call].buffer_offset = offset;
  }
  int registered = 0;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < 64; i++)
    registered |= regions[i].base == base && offset + size <= regions[i].size;
  bounced += !registered;
  pthread_mutex_unlock(&mutex);
  hold_while(&hold);
  ssize_t moved;
  if (!handle->live) {
    errno = 5027;
    moved = -1;
  } else if (result && file_offset >= result_from) {
    errno = (int)result_errno;
    moved = result == 1 ? 0 : result; /* 1 stands for "nothing, and no error" */
  } else {
    size_t part = most && size > (size_t)most ? (size_t)most : size;
    char *memory = base + offset;
    moved = writing ? pwrite(handle->fd, memory, part, file_offset)
                    : pread(handle->fd, memory, part, file_offset);
    if (moved >= 0) errno = EDOM; /* stays dirty on success, as the real one's does */
  }
  __sync_sub_and_fetch(&together, 1);
  return moved;
}

ssize_t cuFileRead(void *handle, void *base, size_t size, off_t file_offset, off_t offset) {
  return move(handle, base, size, file_offset, offset, 0);
}

ssize_t cuFileWrite(void *handle, const void *base, size_t size, off_t file_offset, off_t offset) {
  return move(handle, (char *)base, size, file_offset, offset, 1);
}

