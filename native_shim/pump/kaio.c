/* The kernel's AIO interface, from libaio where there is one, else from the kernel itself.
 * Source: io_setup(2), io_submit(2), io_getevents(2); linux/aio_abi.h. */
#include "internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static __thread char last_error[512]; /* another thread may open another library meanwhile */

static int direct_setup(int nr_events, aio_context_t *context) {
  return syscall(SYS_io_setup, nr_events, context) < 0 ? -errno : 0;
}

static int direct_destroy(aio_context_t context) {
  return syscall(SYS_io_destroy, context) < 0 ? -errno : 0;
}

static int direct_submit(aio_context_t context, long nr, struct iocb **iocbs) {
  long n = syscall(SYS_io_submit, context, nr, iocbs);
  return n < 0 ? -errno : (int)n;
}

static int direct_getevents(aio_context_t context, long min_nr, long nr, struct io_event *events,
                            struct timespec *timeout) {
  long n = syscall(SYS_io_getevents, context, min_nr, nr, events, timeout);
  return n < 0 ? -errno : (int)n;
}

/* Tables are small, few and never freed: engines point at them for as long as they like. */
nv_kaio *nv_kaio_open(const char *libaio_path) {
  nv_kaio *kaio = calloc(1, sizeof *kaio);
  if (!kaio) return NULL;
  if (!libaio_path) {
    kaio->setup = direct_setup;
    kaio->destroy = direct_destroy;
    kaio->submit = direct_submit;
    kaio->getevents = direct_getevents;
    return kaio;
  }
  void *library = dlopen(libaio_path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    snprintf(last_error, sizeof last_error, "%s", dlerror());
    free(kaio);
    return NULL;
  }
  /* POSIX lets a data pointer from dlsym be a function's; memcpy keeps compilers content. */
  struct {
    const char *name;
    void *target;
  } wanted[] = {
      {"io_setup", &kaio->setup},
      {"io_destroy", &kaio->destroy},
      {"io_submit", &kaio->submit},
      {"io_getevents", &kaio->getevents},
  };
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    void *symbol = dlsym(library, wanted[i].name);
    if (!symbol) {
      snprintf(last_error, sizeof last_error, "%s has no %s", libaio_path, wanted[i].name);
      dlclose(library);
      free(kaio);
      return NULL;
    }
    memcpy(wanted[i].target, &symbol, sizeof symbol);
  }
  Dl_info info;
  const char *file = libaio_path;
  if (dladdr((void *)kaio->submit, &info) && info.dli_fname) file = info.dli_fname;
  snprintf(kaio->path, sizeof kaio->path, "%s", file);
  return kaio;
}

const char *nv_kaio_error(void) { return last_error; }

const char *nv_kaio_path(nv_kaio *kaio) { return kaio->path; }
