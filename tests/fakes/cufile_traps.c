/* LD_PRELOAD: lets libcufile run where two files that it wants are missing.
 *
 * Without /proc/modules (kernels without modules, gVisor) cuFileDriverOpen never returns; without
 * udev's database no file on a disk can be registered. NVMEIO_TEST_MODULES and NVMEIO_TEST_UDEV
 * name what stands in for /proc/modules and /run/udev; unset, the real ones are used. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LONGEST = 4096 };

static const char *elsewhere(const char *path, char *buffer) {
  const char *modules = getenv("NVMEIO_TEST_MODULES"), *udev = getenv("NVMEIO_TEST_UDEV");
  if (path && modules && !strcmp(path, "/proc/modules")) return modules;
  if (path && udev && !strncmp(path, "/run/udev/", 10)) {
    snprintf(buffer, LONGEST, "%s/%s", udev, path + 10);
    return buffer;
  }
  return path;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE(flags, last)            \
  mode_t mode = 0;                   \
  if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list rest;                    \
    va_start(rest, last);            \
    mode = va_arg(rest, mode_t);     \
    va_end(rest);                    \
  }

FILE *fopen(const char *path, const char *how) {
  char buffer[LONGEST];
  return REAL(fopen)(elsewhere(path, buffer), how);
}

FILE *fopen64(const char *path, const char *how) {
  char buffer[LONGEST];
  return REAL(fopen64)(elsewhere(path, buffer), how);
}

int open(const char *path, int flags, ...) {
  char buffer[LONGEST];
  MODE(flags, flags)
  return REAL(open)(elsewhere(path, buffer), flags, mode);
}

int open64(const char *path, int flags, ...) {
  char buffer[LONGEST];
  MODE(flags, flags)
  return REAL(open64)(elsewhere(path, buffer), flags, mode);
}

int openat(int directory, const char *path, int flags, ...) {
  char buffer[LONGEST];
  MODE(flags, flags)
  return REAL(openat)(directory, elsewhere(path, buffer), flags, mode);
}

int openat64(int directory, const char *path, int flags, ...) {
  char buffer[LONGEST];
  MODE(flags, flags)
  return REAL(openat64)(directory, elsewhere(path, buffer), flags, mode);
}

int access(const char *path, int how) {
  char buffer[LONGEST];
  return REAL(access)(elsewhere(path, buffer), how);
}

int stat(const char *path, struct stat *facts) {
  char buffer[LONGEST];
  return REAL(stat)(elsewhere(path, buffer), facts);
}

int stat64(const char *path, struct stat64 *facts) {
  char buffer[LONGEST];
  return REAL(stat64)(elsewhere(path, buffer), facts);
}

int fstatat(int directory, const char *path, struct stat *facts, int flags) {
  char buffer[LONGEST];
  return REAL(fstatat)(directory, elsewhere(path, buffer), facts, flags);
}

int fstatat64(int directory, const char *path, struct stat64 *facts, int flags) {
  char buffer[LONGEST];
  return REAL(fstatat64)(directory, elsewhere(path, buffer), facts, flags);
}
