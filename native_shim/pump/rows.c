/* Rows: many pieces of one size, each at a place of its own in a file, moved as few blocks.
 *
 * Row i of memory, row_bytes long, belongs at offsets[i] of the file. Rows are sorted by where they
 * lie, and then taken in order, block by block:
 *
 *   gather   a block is whole units of the file's alignment. It holds all rows that lie in it, and
 *            goes on to the next row while that is cheaper than a read of its own. Rows are copied
 *            out of it, to wherever in memory each of them belongs. Rows that are aligned, alone
 *            and as long as the block are read in place.
 *   scatter  rows that follow one another in the file are a run. Whole pages of a run go direct,
 *            copied together first where they do not lie so in memory. What is left of its first
 *            and last page goes through the page cache when all blocks are done, as the edges of
 *            any write do: nothing is read, changed and written back, so two writers may share a
 *            page.
 *
 * Only planning, copying and keeping account here, and the writing of edges: who has blocks moved
 * is rows_request.c, for a lane, or an engine in Python. The rows are dealt out in shares; all of
 * one share is done by one thread at a time, and shares have no unit of the file in common. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Reading on over a gap costs its bytes, a block of its own costs a turn of the drive's: at 2.5 GB/s
 * and 100,000 blocks a second that is 25 KiB. Out of the page cache, a system call and no more. */
#define GAP_DIRECT (16u << 10)
#define GAP_BUFFERED (1u << 10)
/* From here on a block for itself alone is as good as being part of a larger one, and is not copied. */
#define LARGE (64u << 10)
/* Edges whose pages the kernel is asked to read ahead of their being written. */
#define AHEAD 128
#define DIGIT 11

typedef struct {
  uint64_t offset;
  uint32_t row;
  uint32_t missing; /* blocks that it waits for, and 1 until the last of them is known; 0: whole */
} entry;

typedef struct {
  uint64_t next, end; /* entries; all before `next` are in blocks that were handed out */
  uint64_t covered;   /* so far in the file; an entry may be covered in part */
  uint64_t failed_row, failed_offset;
  int error; /* of failed_row, the least of those that failed */
} share;

struct nv_rows {
  int opcode, foreign, has_edges, planned;
  atomic_int stop;
  char *memory;
  uint64_t count, row_bytes;
  const int64_t *offsets; /* the caller's, read once */
  uint64_t block_size, unit, gap;
  uint32_t memory_alignment;
  entry *entries; /* in the order of the file, once planned */
  atomic_ullong blocks, saved_bytes;
  nv_rows_result result;
  uint32_t nshares;
  share shares[];
};

nv_rows *nv_rows_new(int opcode, uint64_t address, uint64_t count, uint64_t row_bytes,
                     uint64_t offsets, uint64_t block_size, uint32_t offset_alignment,
                     uint32_t memory_alignment, int direct, int foreign, uint32_t nshares) {
  nv_rows *rows = calloc(1, sizeof *rows + nshares * sizeof(share));
  if (!rows) return NULL;
  long page = sysconf(_SC_PAGESIZE);
  rows->opcode = opcode;
  rows->foreign = foreign;
  rows->memory = (char *)(uintptr_t)address;
  rows->count = count;
  rows->row_bytes = row_bytes;
  rows->offsets = (const int64_t *)(uintptr_t)offsets;
  rows->block_size = block_size;
  rows->unit = direct ? offset_alignment : 1;
  /* The page cache writes back whole pages: an edge beside a smaller unit would be written over it. */
  if (direct && opcode == NV_WRITE && rows->unit < (uint64_t)page) rows->unit = (uint64_t)page;
  rows->gap = direct ? GAP_DIRECT : GAP_BUFFERED;
  rows->memory_alignment = direct ? memory_alignment : 1;
  /* Without direct I/O a write is one edge. */
  rows->has_edges = opcode == NV_WRITE && !direct;
  rows->nshares = nshares;
  rows->entries = malloc(count * sizeof(entry));
  if (!rows->entries) {
    free(rows);
    return NULL;
  }
  return rows;
}

void nv_rows_free(nv_rows *rows) {
  if (!rows) return;
  free(rows->entries);
  free(rows);
}

void nv_rows_stop(nv_rows *rows) { atomic_store(&rows->stop, 1); }

static uint64_t down(const nv_rows *rows, uint64_t at) { return at - at % rows->unit; }

static uint64_t up(const nv_rows *rows, uint64_t at) { return down(rows, at + rows->unit - 1); }

static uint64_t end_of(const nv_rows *rows, const entry *e) { return e->offset + rows->row_bytes; }

static char *memory_of(const nv_rows *rows, const entry *e) {
  return rows->memory + e->row * rows->row_bytes;
}

static int writes(const nv_rows *rows) { return rows->opcode == NV_WRITE; }

static int is_direct(const nv_rows *rows) { return rows->unit > 1; }

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* --- planning ------------------------------------------------------------------------------ */

/* By offset, then by row: a radix sort, which is 8 times as fast as qsort for a million. */
static int sort(nv_rows *rows) {
  uint64_t varying = 0, n = rows->count;
  int sorted = 1;
  for (uint64_t i = 1; i < n; i++) {
    varying |= rows->entries[i].offset ^ rows->entries[0].offset;
    sorted &= rows->entries[i - 1].offset <= rows->entries[i].offset;
  }
  if (sorted) return 0;
  entry *from = rows->entries, *to = malloc(n * sizeof(entry));
  uint64_t *starts = malloc(sizeof(uint64_t) << DIGIT);
  int failure = to && starts ? 0 : -ENOMEM;
  for (unsigned shift = 0; !failure && shift < 64 && varying >> shift; shift += DIGIT) {
    uint64_t mask = (1u << DIGIT) - 1, sum = 0;
    if (!(varying >> shift & mask)) continue;
    if (rows->stop) failure = -ECANCELED;
    memset(starts, 0, sizeof(uint64_t) << DIGIT);
    for (uint64_t i = 0; i < n; i++) starts[from[i].offset >> shift & mask]++;
    for (uint64_t digit = 0; digit <= mask; digit++) {
      uint64_t many = starts[digit];
      starts[digit] = sum;
      sum += many;
    }
    for (uint64_t i = 0; i < n; i++) to[starts[from[i].offset >> shift & mask]++] = from[i];
    entry *other = from;
    from = to;
    to = other;
  }
  free(starts);
  free(to);
  rows->entries = from;
  return failure;
}

/* Whether two entries, one behind the other, may be in different shares. */
static int apart(const nv_rows *rows, const entry *one, const entry *next) {
  return up(rows, end_of(rows, one)) <= down(rows, next->offset);
}

/* Deals the sorted entries out. */
static void deal(nv_rows *rows) {
  uint64_t from = 0;
  for (uint32_t i = 0; i < rows->nshares; i++) {
    uint64_t to = rows->count / rows->nshares * (i + 1);
    if (i + 1 == rows->nshares) to = rows->count;
    to = larger(to, from);
    while (to > 0 && to < rows->count && !apart(rows, &rows->entries[to - 1], &rows->entries[to]))
      to++;
    rows->shares[i] = (share){.next = from, .end = to};
    if (!is_direct(rows) && writes(rows)) rows->shares[i].next = to; /* all of it is edges */
    from = to;
  }
}

/* Sorts the rows, and looks whether they may be moved. 0, -ENOMEM, -ECANCELED; -ERANGE for an offset
 * that the caller has changed since it was checked; -EEXIST for rows of a scatter that overlap. */
int nv_rows_plan(nv_rows *rows) {
  for (uint64_t i = 0; i < rows->count; i++) {
    uint64_t offset = (uint64_t)rows->offsets[i];
    if (offset > (uint64_t)INT64_MAX - rows->row_bytes) return -ERANGE;
    rows->entries[i] = (entry){offset, (uint32_t)i, 1};
  }
  int failure = sort(rows);
  if (failure) return failure;
  for (uint64_t i = 0; writes(rows) && i < rows->count; i++) {
    const entry *e = &rows->entries[i];
    if (i && end_of(rows, e - 1) > e->offset) {
      rows->shares[0].failed_row = i; /* an entry's number, for once: see nv_rows_overlap */
      return -EEXIST;
    }
    rows->has_edges |= e->offset % rows->unit || rows->row_bytes % rows->unit;
  }
  deal(rows);
  rows->planned = 1;
  return 0;
}

/* Two rows that overlap, after nv_rows_plan has said so. */
void nv_rows_overlap(nv_rows *rows, uint64_t *one, uint64_t *other) {
  const entry *e = &rows->entries[rows->shares[0].failed_row];
  uint64_t a = e[-1].row, b = e->row;
  *one = smaller(a, b);
  *other = larger(a, b);
}

/* As for any write: blocks allocated before a file grows. Not where rows lie far from each other
 * behind its end, for that would fill the holes between them. Whether it was done. */
int nv_rows_preallocate(nv_rows *rows, int fd) {
  struct stat st;
  if (!writes(rows) || !rows->count || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) return 0;
  uint64_t size = (uint64_t)st.st_size, low = 0, high = rows->count;
  while (low < high) { /* the first row that ends behind the end of the file */
    uint64_t middle = low + (high - low) / 2;
    if (end_of(rows, &rows->entries[middle]) > size)
      high = middle;
    else
      low = middle + 1;
  }
  if (low == rows->count) return 0;
  uint64_t from = larger(size, rows->entries[low].offset);
  uint64_t end = end_of(rows, &rows->entries[rows->count - 1]);
  if ((rows->count - low) * rows->row_bytes < (end - from) / 2) return 0;
  return nv_allocate(fd, from, end);
}

/* --- blocks ---------------------------------------------------------------------------------- */

/* Whether the memory of a block may be the caller's own. */
static uint64_t in_place(const nv_rows *rows, const entry *e, uint64_t start) {
  char *memory = memory_of(rows, e) + (start - e->offset);
  return (uintptr_t)memory % rows->memory_alignment ? 0 : (uint64_t)(uintptr_t)memory;
}

static int follows(const nv_rows *rows, const entry *e) {
  return e[0].offset == end_of(rows, e - 1);
}

/* A block that is read into the caller's memory itself, or 0. */
static int read_in_place(nv_rows *rows, share *s, nv_block *block) {
  const entry *entries = rows->entries;
  uint64_t i = s->next, k = i, start = block->offset, limit = start + rows->block_size;
  if (start < entries[i].offset || !(block->address = in_place(rows, &entries[i], start))) return 0;
  while (k + 1 < s->end && follows(rows, &entries[k + 1]) && entries[k + 1].row == entries[k].row + 1 &&
         end_of(rows, &entries[k + 1]) <= limit)
    k++;
  uint64_t end = smaller(end_of(rows, &entries[k]), limit);
  if (end % rows->unit) return 0;
  if (k + 1 < s->end) {
    uint64_t next = entries[k + 1].offset;
    if (next < end) return 0; /* wanted twice */
    if (end - start < LARGE && down(rows, next) <= end + rows->gap) return 0; /* better together */
  }
  block->nbytes = end - start;
  block->count = k + 1 - i;
  return 1;
}

static void next_read(nv_rows *rows, share *s, nv_block *block) {
  entry *entries = rows->entries;
  uint64_t i = s->next, start = larger(down(rows, entries[i].offset), s->covered);
  uint64_t limit = start + rows->block_size, end = start, j = i, saved = 0;
  *block = (nv_block){.offset = start, .first = i};
  if (read_in_place(rows, s, block)) {
    end = start + block->nbytes;
    j = i + block->count;
  } else {
    block->address = 0;
    for (; j < s->end; j++) {
      uint64_t from = larger(down(rows, entries[j].offset), start);
      uint64_t to = up(rows, end_of(rows, &entries[j]));
      if (from >= limit) break;
      if (j > i && from >= end) {
        if (from > end + rows->gap || rows->row_bytes >= LARGE) break;
        if (to > limit) break; /* not cut in two, if it need not be */
      }
      to = smaller(to, limit);
      if (from < end) saved += smaller(to, end) - from;
      end = larger(end, to);
    }
    block->nbytes = end - start;
    block->count = j - i;
  }
  for (uint64_t k = i; k < j; k++) {
    entries[k].missing++;
    if (end_of(rows, &entries[k]) > end) continue; /* goes on in the next block */
    entries[k].missing--;
    s->next = k + 1; /* all have one length, so ends are in order too */
  }
  s->covered = end;
  atomic_fetch_add(&rows->saved_bytes, saved);
}

/* 0: what was left is edges. */
static int next_write(nv_rows *rows, share *s, nv_block *block) {
  entry *entries = rows->entries;
  while (s->next < s->end) {
    uint64_t i = s->next, k = i;
    uint64_t start = larger(up(rows, entries[i].offset), s->covered), limit = start + rows->block_size;
    while (end_of(rows, &entries[k]) < limit && k + 1 < s->end && follows(rows, &entries[k + 1])) k++;
    uint64_t end = smaller(down(rows, end_of(rows, &entries[k])), limit);
    s->next = k + 1;
    if (end <= start) continue;
    s->covered = end;
    while (end_of(rows, &entries[i]) <= start) i++;
    int together = 1; /* in memory too */
    uint64_t j = i;
    for (; j <= k && entries[j].offset < end; j++) {
      together &= entries[j].row == entries[i].row + (j - i);
      entries[j].missing++;
    }
    if (limit == end && end_of(rows, &entries[j - 1]) > end) s->next = j - 1;
    *block = (nv_block){.offset = start, .nbytes = end - start, .first = i, .count = j - i};
    if (together) block->address = in_place(rows, &entries[i], start);
    return 1;
  }
  return 0;
}

/* The next block of a share; 0 if there is none any more. */
int nv_rows_next(nv_rows *rows, uint32_t index, nv_block *block) {
  share *s = &rows->shares[index];
  if (s->next >= s->end) return 0;
  if (writes(rows)) {
    if (!next_write(rows, s, block)) return 0;
  } else {
    next_read(rows, s, block);
  }
  atomic_fetch_add(&rows->blocks, 1);
  return 1;
}

int nv_rows_more(nv_rows *rows, uint32_t index) {
  return rows->shares[index].next < rows->shares[index].end;
}

/* Where in the file the bytes of a block end that anybody wants. */
uint64_t nv_rows_wanted(nv_rows *rows, const nv_block *block) {
  uint64_t last = end_of(rows, &rows->entries[block->first + block->count - 1]);
  return smaller(block->offset + block->nbytes, last);
}

static int copy(const nv_rows *rows, char *ours, char *theirs, uint64_t nbytes) {
  int into = !writes(rows);
  if (rows->foreign) return nv_copy_foreign(ours, theirs, nbytes, into);
  memcpy(into ? theirs : ours, into ? ours : theirs, nbytes);
  return 0;
}

/* What of an entry lies in a block: its first byte in the file, and how many. */
static uint64_t part_of(const nv_rows *rows, const nv_block *block, const entry *e, uint64_t *from) {
  *from = larger(e->offset, block->offset);
  return smaller(end_of(rows, e), block->offset + block->nbytes) - *from;
}

/* Copies rows together for a write; 0, or -EFAULT. */
int nv_rows_collect(nv_rows *rows, const nv_block *block, char *into) {
  for (uint64_t k = 0; k < block->count; k++) {
    const entry *e = &rows->entries[block->first + k];
    uint64_t from, nbytes = part_of(rows, block, e, &from);
    int failure =
        copy(rows, into + (from - block->offset), memory_of(rows, e) + (from - e->offset), nbytes);
    if (failure) return failure;
  }
  return 0;
}

static void fail(share *s, const entry *e, int error) {
  if (s->error && s->failed_row <= e->row) return;
  s->failed_row = e->row;
  s->failed_offset = e->offset;
  s->error = error;
}

/* A block has ended: `done` of its bytes were moved, and if that is not all of them, `error` is why;
 * 0 for a transfer that was stopped. Reads are copied from `block_memory`, if not NULL, to where
 * they belong. Returns how many bytes of rows got through. */
uint64_t nv_rows_landed(nv_rows *rows, uint32_t index, const nv_block *block, char *block_memory,
                        uint64_t done, int error) {
  uint64_t through = 0;
  for (uint64_t k = 0; k < block->count; k++) {
    entry *e = &rows->entries[block->first + k];
    uint64_t from, nbytes = part_of(rows, block, e, &from);
    int failure = from + nbytes > block->offset + done ? error : 0;
    if (!failure && from + nbytes > block->offset + done) continue;
    if (!failure && block_memory && !writes(rows))
      failure = -copy(rows, block_memory + (from - block->offset),
                      memory_of(rows, e) + (from - e->offset), nbytes);
    if (failure) {
      fail(&rows->shares[index], e, failure);
    } else {
      e->missing--;
      through += nbytes;
    }
  }
  return through;
}

/* --- edges ----------------------------------------------------------------------------------- */

int nv_rows_has_edges(nv_rows *rows) { return rows->has_edges; }

/* Writing a part of a page that is not in memory waits for a read: have many of them read at once. */
static void read_ahead(const nv_rows *rows, uint64_t i, int fd) {
  const entry *e = &rows->entries[i];
  uint64_t unit = rows->unit, end = end_of(rows, e);
  if (e->offset % unit && (!i || !follows(rows, e)))
    posix_fadvise(fd, (off_t)down(rows, e->offset), (off_t)unit, POSIX_FADV_WILLNEED);
  if (end % unit && (i + 1 == rows->count || !follows(rows, e + 1)))
    posix_fadvise(fd, (off_t)down(rows, end), (off_t)unit, POSIX_FADV_WILLNEED);
}

static int write_all(int fd, const char *memory, uint64_t from, uint64_t to) {
  while (from < to) {
    ssize_t n = pwrite(fd, memory, to - from, (off_t)from);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    from += (uint64_t)n;
    memory += n;
  }
  return 0;
}

/* Writes what blocks cannot: all but the whole pages of each run, through the page cache. When all
 * blocks of all shares are done; rows are whole after it. Returns how many bytes were written. */
uint64_t nv_rows_write_edges(nv_rows *rows, int fd) {
  uint64_t written = 0, ahead = 0;
  for (uint64_t i = 0, k; i < rows->count; i = k) {
    for (k = i + 1; k < rows->count && follows(rows, &rows->entries[k]);) k++;
    uint64_t from = rows->entries[i].offset, to = end_of(rows, &rows->entries[k - 1]);
    uint64_t start = up(rows, from), stop = down(rows, to); /* went direct */
    if (!is_direct(rows) || start >= stop) start = stop = to;
    for (uint64_t j = i; j < k; j++) {
      entry *e = &rows->entries[j];
      if (rows->stop) return written;
      for (; is_direct(rows) && ahead < smaller(rows->count, j + AHEAD); ahead++)
        read_ahead(rows, ahead, fd);
      uint64_t last = end_of(rows, e), head = smaller(last, start), tail = larger(e->offset, stop);
      int failure = 0;
      if (e->offset < head) failure = write_all(fd, memory_of(rows, e), e->offset, head);
      if (!failure && tail < last)
        failure = write_all(fd, memory_of(rows, e) + (tail - e->offset), tail, last);
      if (failure) {
        fail(&rows->shares[0], e, failure);
        continue;
      }
      e->missing--;
      if (e->offset < head) written += head - e->offset;
      if (tail < last) written += last - tail;
    }
  }
  return written;
}

/* --- the end --------------------------------------------------------------------------------- */

/* Of a write that has no edges nobody says that there is none left. */
static int is_whole(const nv_rows *rows, const entry *e) {
  return e->missing == (uint32_t)(writes(rows) && !rows->has_edges);
}

/* How it went, once nothing of it is under way; `error` is one that is no row's, or 0. */
const nv_rows_result *nv_rows_conclude(nv_rows *rows, int error) {
  nv_rows_result *result = &rows->result;
  *result = (nv_rows_result){.error = error,
                             .failed_row = rows->count,
                             .whole = rows->count,
                             .blocks = rows->blocks,
                             .saved_bytes = rows->saved_bytes};
  for (uint32_t i = 0; i < rows->nshares && !error; i++) {
    const share *s = &rows->shares[i];
    if (!s->error || (result->error && s->failed_row > result->failed_row)) continue;
    result->failed_row = s->failed_row;
    result->failed_offset = s->failed_offset;
    result->error = s->error;
  }
  if (!result->error) return result;
  result->whole = 0;
  for (uint64_t i = 0; rows->planned && i < rows->count; i++) {
    const entry *e = &rows->entries[i];
    if (is_whole(rows, e)) {
      result->whole++;
    } else if (error && e->row < result->failed_row) {
      result->failed_row = e->row;
      result->failed_offset = e->offset;
    }
  }
  return result;
}

const nv_rows_result *nv_rows_outcome(const nv_rows *rows) { return &rows->result; }

/* A byte for each row: 1 if it is whole. For one that failed. */
void nv_rows_mask(nv_rows *rows, uint8_t *whole) {
  memset(whole, 0, rows->count);
  for (uint64_t i = 0; rows->planned && i < rows->count; i++)
    whole[rows->entries[i].row] = is_whole(rows, &rows->entries[i]);
}

uint64_t nv_rows_count(const nv_rows *rows) { return rows->count; }
