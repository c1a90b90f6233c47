/* The C library's calls on files: noted, and refused, interrupted or cut short on order, for tests.
 * Preloaded; the switches are exported variables, which the test sets (ctypes). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

char noted[1 << 16];   /* the calls that were made, each with a space behind it */
char refused[32];      /* the call that is refused */
int refused_with;      /* the errno that it gives */
int refused_times;     /* how often, counted down */
int write_at_most;     /* bytes of a pwritev, or 0 */
int steal;             /* the next flock comes after the file has lost its name */

static int goes_wrong(const char *name) {
  strncat(noted, name, sizeof noted - strlen(noted) - 2);
  strcat(noted, " ");
  if (strcmp(name, refused) != 0 || refused_times <= 0) return 0;
  refused_times--;
  errno = refused_with;
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fdatasync(int fd) { return goes_wrong("fdatasync") ? -1 : REAL(fdatasync)(fd); }
int fsync(int fd) { return goes_wrong("fsync") ? -1 : REAL(fsync)(fd); }
int fchmod(int fd, mode_t mode);
int fchmod(int fd, mode_t mode) { return goes_wrong("fchmod") ? -1 : REAL(fchmod)(fd, mode); }
int rename(const char *old, const char *new) {
  return goes_wrong("rename") ? -1 : REAL(rename)(old, new);
}
int sync_file_range(int fd, off64_t offset, off64_t nbytes, unsigned flags);
int sync_file_range(int fd, off64_t offset, off64_t nbytes, unsigned flags) {
  return goes_wrong("sync_file_range") ? -1 : REAL(sync_file_range)(fd, offset, nbytes, flags);
}
int flock(int fd, int operation) {
  char link[64], path[4096];
  if (steal && operation & LOCK_EX) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    steal = 0;
    if (n > 0) {
      path[n] = 0;
      unlink(path);
    }
  }
  return goes_wrong("flock") ? -1 : REAL(flock)(fd, operation);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  if (goes_wrong("pwritev")) return -1;
  if (!write_at_most) return REAL(pwritev)(fd, parts, count, offset);
  struct iovec first = parts[0];
  if (first.iov_len > (size_t)write_at_most) first.iov_len = (size_t)write_at_most;
  return REAL(pwritev)(fd, &first, 1, offset);
}
