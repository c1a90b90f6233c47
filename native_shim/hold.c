/* Flags that are cleared while anybody holds them: torch's "this storage may be resized".
 *
 * Several operations may be in flight in one storage, so holds are counted: the first clears the
 * flag, the last sets it again. A flag that was clear before is nobody's to set, and not held. The
 * owner of the flag's memory must outlive every hold of it.
 *
 * Here and not in Python, where an interrupt, a destructor that the collector runs, or another
 * thread could come in the middle of it. */
#include "internal.h"

#include <stdlib.h>

#define BUCKETS 256

struct nv_hold {
  unsigned char *flag;
  uint64_t count;
  unsigned generation;
  nv_hold *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static nv_hold *buckets[BUCKETS];
static unsigned generation; /* of forks */

static nv_hold **bucket_of(const unsigned char *flag) {
  return &buckets[((uintptr_t)flag >> 6) % BUCKETS];
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&mutex); }

/* Operations stay with the parent; in the child nothing is in flight. Their holds are left to
 * whoever drops them, nv_unhold finds them to be of another generation. */
static void after_fork_in_child(void) {
  for (int i = 0; i < BUCKETS; i++) {
    for (nv_hold *hold = buckets[i]; hold; hold = hold->next) *hold->flag = 1;
    buckets[i] = NULL;
  }
  generation++;
  pthread_mutex_unlock(&mutex);
}

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

nv_hold *nv_hold_flag(uint64_t address) {
  unsigned char *flag = (unsigned char *)(uintptr_t)address;
  nv_hold **bucket = bucket_of(flag), *hold;
  pthread_mutex_lock(&mutex);
  for (hold = *bucket; hold && hold->flag != flag; hold = hold->next) {
  }
  if (!hold && *flag && (hold = malloc(sizeof *hold))) {
    *hold = (nv_hold){flag, 0, generation, *bucket};
    *bucket = hold;
    *flag = 0;
  }
  if (hold) hold->count++;
  pthread_mutex_unlock(&mutex);
  return hold;
}

void nv_unhold(nv_hold *hold) {
  pthread_mutex_lock(&mutex);
  /* After a fork the parent's count is left as it was, so its last hold here frees it too. */
  int last = --hold->count == 0;
  if (last && hold->generation == generation) {
    nv_hold **at = bucket_of(hold->flag);
    while (*at != hold) at = &(*at)->next;
    *at = hold->next;
    *hold->flag = 1;
  }
  pthread_mutex_unlock(&mutex);
  if (last) free(hold);
}
