/* statx(2) with STATX_DIOALIGN (kernel 6.1): the alignment that direct I/O needs on a file.
 * The numbers are spelled out, for the headers of the build machine may be older than the
 * kernel of the machine that runs. Source: linux/stat.h. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define NV_STATX_BASIC_STATS 0x7ffu
#define NV_STATX_DIOALIGN 0x2000u

typedef struct {
  uint32_t mask, blksize;
  uint64_t attributes;
  uint32_t nlink, uid, gid;
  uint16_t mode, spare0;
  uint64_t ino, size, blocks, attributes_mask;
  uint64_t times[8]; /* four timestamps of 16 bytes */
  uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
  uint64_t mnt_id;
  uint32_t dio_mem_align, dio_offset_align;
  uint64_t spare[12];
} kernel_statx;

_Static_assert(sizeof(kernel_statx) == 0x100, "struct statx is 256 bytes");

int nv_file_facts(int fd, uint64_t facts[]) {
  kernel_statx x;
  memset(&x, 0, sizeof x);
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, NV_STATX_BASIC_STATS | NV_STATX_DIOALIGN, &x) < 0)
    return -errno;
  facts[NV_MODE] = x.mode;
  facts[NV_BLOCK_SIZE] = x.blksize;
  facts[NV_SIZE] = x.size;
  facts[NV_DEVICE] = makedev(x.dev_major, x.dev_minor);
  facts[NV_INODE] = x.ino;
  facts[NV_HAS_DIO] = (x.mask & NV_STATX_DIOALIGN) != 0;
  facts[NV_MEMORY_ALIGNMENT] = x.dio_mem_align;
  facts[NV_OFFSET_ALIGNMENT] = x.dio_offset_align;
  return 0;
}

/* Blocks for [from, end); whether there are. */
int nv_allocate(int fd, uint64_t from, uint64_t end) {
  int r;
  do {
    r = fallocate(fd, 0, (off_t)from, (off_t)(end - from));
  } while (r < 0 && errno == EINTR);
  return r == 0;
}
