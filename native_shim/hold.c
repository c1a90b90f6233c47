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

struct nv_held {
  unsigned char *flag;
  uint64_t count;
  unsigned generation;
  nv_held *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static nv_held *buckets[BUCKETS];
static unsigned generation; /* of forks */

static nv_held **bucket_of(const unsigned char *flag) {
  return &buckets[((uintptr_t)flag >> 6) % BUCKETS];
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&mutex); }

/* Operations stay with the parent; in the child nothing is in flight. Their holds are left to
 * whoever drops them, nv_unhold finds them to be of another generation. */
static void after_fork_in_child(void) {
  for (int i = 0; i < BUCKETS; i++) {
    for (nv_held *hold = buckets[i]; hold; hold = hold->next) *hold->flag = 1;
    buckets[i] = NULL;
  }
  generation++;
  pthread_mutex_unlock(&mutex);
}

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* With the mutex held. */
static nv_held *find(unsigned char *flag) {
  nv_held *held = *bucket_of(flag);
  while (held && held->flag != flag) held = held->next;
  return held;
}

int nv_can_hold(uint64_t address) {
  unsigned char *flag = (unsigned char *)(uintptr_t)address;
  pthread_mutex_lock(&mutex);
  int can = *flag || find(flag);
  pthread_mutex_unlock(&mutex);
  return can;
}

void nv_hold_flag(nv_hold *hold, uint64_t address) {
  unsigned char *flag = (unsigned char *)(uintptr_t)address;
  pthread_mutex_lock(&mutex);
  nv_held *held = find(flag);
  if (!held && *flag && (held = malloc(sizeof *held))) {
    nv_held **bucket = bucket_of(flag);
    *held = (nv_held){flag, 0, generation, *bucket};
    *bucket = held;
    *flag = 0;
  }
  if (held) held->count++;
  hold->held = held;
  pthread_mutex_unlock(&mutex);
}

void nv_unhold(nv_hold *hold) {
  nv_held *held = hold->held;
  if (!held) return;
  hold->held = NULL;
  pthread_mutex_lock(&mutex);
  /* After a fork the parent's count is left as it was, so its last hold here frees it too. */
  int last = --held->count == 0;
  if (last && held->generation == generation) {
    nv_held **at = bucket_of(held->flag);
    while (*at != held) at = &(*at)->next;
    *at = held->next;
    *held->flag = 1;
  }
  pthread_mutex_unlock(&mutex);
  if (last) free(held);
}
