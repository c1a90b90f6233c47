/* Facts from the page tables (PAGEMAP_SCAN, since Linux 6.7): protected pages and huge pages.
 *
 * Each library that is built with this file has a descriptor of its own.
 * Source: Documentation/admin-guide/mm/pagemap.rst, include/uapi/linux/fs.h. The needed parts of the
 * header are repeated here, because wheels are built with older ones. */
#include "page_tables.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <unistd.h>

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
#define IS_HUGE (1u << 6)
#define HUGE_PAGE ((uint64_t)2 << 20)
#define SMALL_PAGE ((uint64_t)4096)

/* --- what page tables say --------------------------------------------------------------------- */

static atomic_int page_tables = -1; /* of this process, once somebody has asked */

int nv_page_tables_open(void) {
  int none = -1, opened = atomic_load(&page_tables);
  if (opened >= 0) return opened;
  opened = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (opened < 0 || atomic_compare_exchange_strong(&page_tables, &none, opened)) return opened;
  close(opened); /* another thread was first */
  return none;
}

/* In a forked child, where they are the parent's. */
static void forget(void) {
  int opened = atomic_exchange(&page_tables, -1);
  struct scan nothing = {.size = sizeof nothing};
  if (opened >= 0 && ioctl(opened, PAGEMAP_SCAN, &nothing) == 0) close(opened);
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forget); }

/* The first pages in [low, high), one behind the other, that lack the categories of `inverted` and have
 * any of `any_of`; at most so many, 0 for all. 1 where there are any, 0 where there are none, -1: the
 * kernel cannot say it. */
static int find(uint64_t low, uint64_t high, uint64_t inverted, uint64_t any_of, uint64_t most_pages,
                struct region *found) {
  struct scan scan = {.size = sizeof scan, .start = low, .end = high, .count = 1, .any_of = any_of};
  scan.most_pages = most_pages;
  scan.regions = (uintptr_t)found;
  scan.inverted = scan.all_of = scan.told = inverted;
  return ioctl(nv_page_tables_open(), PAGEMAP_SCAN, &scan);
}

/* Whether all of it has been protected until now. Where the kernel cannot say it, it has. */
int nv_page_tables_kept(uint64_t low, uint64_t high) {
  struct region region = {0};
  int found = find(low, high, IS_WRITTEN, IS_PRESENT | IS_SWAPPED, 0, &region);
  return found < 0 || (found == 1 && region.start == low && region.end == high);
}

/* Whether all huge pages that fit in there are there, or it lies within one; else 0, and where the
 * kernel cannot say it. */
int nv_is_on_huge_pages(uint64_t address, uint64_t nbytes) {
  struct region small;
  uint64_t low = (address + HUGE_PAGE - 1) & -HUGE_PAGE, high = (address + nbytes) & -HUGE_PAGE;
  if (low >= high) {
    low = address & -SMALL_PAGE;
    high = (address + nbytes + SMALL_PAGE - 1) & -SMALL_PAGE;
  }
  return find(low, high, IS_HUGE, 0, 1, &small) == 0;
}
