/* A small file in place of another, in one call: no interrupt comes between two of its steps, and no
 * thread is needed for them. The steps and why: nvmeio/_storage/replace.py. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

/* Whether the new file can be given what the old one has, by its mode alone. */
static int is_alike(int fd, const char *target, const struct stat *old, const struct stat *made) {
  return made->st_uid == old->st_uid && made->st_gid == old->st_gid &&
         listxattr(target, NULL, 0) <= 0 && flistxattr(fd, NULL, 0) <= 0 &&
         (((made->st_mode ^ old->st_mode) & 07777) == 0 || fchmod(fd, old->st_mode & 07777) == 0);
}

static int is_named(const char *path, const struct stat *made) {
  struct stat named;
  return lstat(path, &named) == 0 && named.st_dev == made->st_dev && named.st_ino == made->st_ino;
}

/* So much is written at a time, and then sent to the drive while the next is copied: 32 MiB took
 * 0.85 of the time of copying all first. */
#define SENT_BYTES (4u << 20)

/* The next of the parts, up to SENT_BYTES; `done` bytes of the first are written. */
static int next_parts(struct iovec *some, const nv_bytes *parts, uint32_t count, uint64_t done) {
  uint64_t room = SENT_BYTES;
  int n = 0;
  for (; n < 64 && (uint32_t)n < count && room; n++, done = 0) {
    uint64_t left = parts[n].nbytes - done;
    some[n] = (struct iovec){(char *)parts[n].address + done, left < room ? left : room};
    room -= some[n].iov_len;
  }
  return n;
}

/* Begin to write what is in the page cache; its errors come from here or from the sync at the end. */
static int send_bytes(int fd, off_t from, off_t to) {
  int r = sync_file_range(fd, from, to - from, SYNC_FILE_RANGE_WRITE);
  return r < 0 && (errno == EIO || errno == ENOSPC || errno == EDQUOT) ? -errno : 0;
}

static int write_parts(int fd, const nv_bytes *parts, uint32_t count, int durable) {
  struct iovec some[64];
  uint64_t done = 0; /* of the part that is next */
  off_t at = 0, sent = 0;
  for (uint32_t next = 0; next < count;) {
    int n = next_parts(some, parts + next, count - next, done), error = 0;
    ssize_t written = pwritev(fd, some, n, at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return -errno;
    if (written == 0 && parts[next].nbytes) return -EIO;
    at += written;
    for (done += (uint64_t)written; next < count && done >= parts[next].nbytes; next++)
      done -= parts[next].nbytes;
    if (!durable || next == count || at - sent < (off_t)SENT_BYTES) continue;
    if ((error = send_bytes(fd, sent, at))) return error;
    sent = at;
  }
  return 0;
}

/* Durable, or sent to the drive: with what was there before, all of it, waited for. */
static int sync_bytes(int fd, int sent) {
  int r;
  if (sent) {
    unsigned all = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    while ((r = sync_file_range(fd, 0, 0, all)) < 0 && errno == EINTR) {}
    /* A failed write is told once: an fsync behind would say nothing of it. */
    if (r == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP && errno != EPERM) return -errno;
  }
  while ((r = fdatasync(fd)) < 0 && errno == EINTR) {}
  return r < 0 ? -errno : 0;
}

static int sync_directory(const char *directory) {
  int fd, r;
  while ((fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0 && errno == EINTR) {}
  if (fd < 0) return -errno;
  while ((r = fsync(fd)) < 0 && errno == EINTR) {}
  r = r < 0 && errno != EINVAL ? -errno : 0; /* EINVAL: a file system without that */
  close(fd);
  return r;
}

static int put_in_place(nv_replacement *r, int fd) {
  struct stat old, made;
  int error = 0, replaces = stat(r->target, &old) == 0;
  r->step = NV_REPLACE_TAKE;
  if (flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK) return -errno;
  if (fstat(fd, &made) < 0) return -errno;
  if (!is_named(r->temporary, &made)) return -EEXIST;
  r->step = NV_REPLACE_ATTRIBUTES;
  if (replaces ? !is_alike(fd, r->target, &old, &made) : errno != ENOENT) return -EPERM;
  r->step = NV_REPLACE_WRITE;
  if ((error = write_parts(fd, r->parts, r->count, r->durable))) return error;
  r->step = NV_REPLACE_SYNC;
  if (r->durable && (error = sync_bytes(fd, r->sent))) return error;
  r->step = NV_REPLACE_RENAME;
  return rename(r->temporary, r->target) < 0 ? -errno : 0;
}

int nv_replace(nv_replacement *r) {
  int fd, error, flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  r->step = NV_REPLACE_OPEN;
  while ((fd = open(r->temporary, flags, 0666)) < 0 && errno == EINTR) {}
  if (fd < 0) return -errno;
  error = put_in_place(r, fd);
  if (error) unlink(r->temporary);
  flock(fd, LOCK_UN); /* which a child that was forked meanwhile would hold on to */
  close(fd);
  if (error || !r->durable) return error;
  r->step = NV_REPLACE_NAME;
  return sync_directory(r->directory);
}
