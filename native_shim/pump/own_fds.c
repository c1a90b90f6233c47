/* The descriptors of one open file, owned by a place that is there before they are: between an open
 * in C and the note of it in Python an interrupt may come, and nobody would close them. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

int nv_fds_open(nv_fds *fds, int direct, const char *path, int flags) {
  int fd;
  do fd = open(path, flags, 0666);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) return -errno;
  *(direct ? &fds->direct : &fds->buffered) = fd;
  return fd;
}

int nv_fds_duplicate(nv_fds *fds, int fd) {
  fds->buffered = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  return fds->buffered < 0 ? -errno : fds->buffered;
}

/* Not tried again after EINTR: Linux has closed it all the same. What went wrong is told as often as
 * it is asked for: an interrupt may come before it is noted in Python. */
int nv_fds_close(nv_fds *fds) {
  int owned[] = {fds->direct, fds->buffered};
  fds->direct = fds->buffered = -1;
  for (int i = 0; i < 2; i++)
    if (owned[i] >= 0 && close(owned[i]) < 0 && errno != EINTR && !fds->lost) fds->lost = -errno;
  return fds->lost;
}
