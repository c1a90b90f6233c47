/* The kernel's write protection of memory: userfaultfd(2).
 *
 * Each call is about whole pages in [low, high), of one descriptor, and is told by 0 or -errno. No
 * event features are asked for: while an event waits to be read, WRITEPROTECT answers EAGAIN.
 *
 * Source: Documentation/admin-guide/mm/userfaultfd.rst, include/uapi/linux/userfaultfd.h. The needed
 * parts of the header are repeated here, because wheels are built with older ones. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

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

/* --- the calls -------------------------------------------------------------------------------- */

/* Whether a descriptor is one of userfaultfd's; errno says what it is else. */
int nv_wp_is_open(int fd) {
  struct range nowhere = {0, 0};
  return ioctl(fd, UFFD_WAKE, &nowhere) < 0 && errno == EINVAL;
}

int nv_wp_register(int fd, uint64_t low, uint64_t high) {
  struct registration wanted = {{low, high - low}, MODE_WRITEPROTECT, 0};
  return ioctl(fd, UFFD_REGISTER, &wanted) ? -errno : 0;
}

int nv_wp_protect(int fd, uint64_t low, uint64_t high) {
  struct protection wanted = {{low, high - low}, 1};
  return ioctl(fd, UFFD_WRITEPROTECT, &wanted) ? -errno : 0;
}

/* Whoever waits to write there tries again. */
void nv_wp_wake(int fd, uint64_t low, uint64_t high) {
  struct range range = {low, high - low};
  ioctl(fd, UFFD_WAKE, &range);
}

/* Whoever waits to write there goes on. */
void nv_wp_lift(int fd, uint64_t low, uint64_t high) {
  struct protection wanted = {{low, high - low}, 0};
  if (ioctl(fd, UFFD_WRITEPROTECT, &wanted)) nv_wp_wake(fd, low, high); /* it is not registered */
}

/* Nothing there is protected any more. Who waits to write has still to be woken. */
void nv_wp_unregister(int fd, uint64_t low, uint64_t high) {
  struct range range = {low, high - low};
  ioctl(fd, UFFD_UNREGISTER, &range);
}

/* Where somebody waits to write; 0: nobody does, or another thread was told. */
int nv_wp_read_fault(int fd, uint64_t *address) {
  struct message message;
  if (read(fd, &message, sizeof message) != sizeof message || message.event != EVENT_FAULT) return 0;
  *address = message.address;
  return 1;
}

/* KSM (mm/ksm.c, replace_page) forgets the protection of a page that it merges. */
int nv_wp_is_merging(void) { return prctl(GET_MEMORY_MERGE, 0, 0, 0, 0) == 1; }

/* A descriptor, without waiting in read(2). */
int nv_wp_open(int which) {
  int fd = -1;
  if (nv_wp_is_merging()) return -ENOTUNIQ;
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
