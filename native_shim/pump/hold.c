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

#define BUCKETS 4096

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

/* With the mutex held. */
static void hold_flag(nv_hold *hold, uint64_t address) {
  unsigned char *flag = (unsigned char *)(uintptr_t)address;
  nv_held *held = find(flag);
  if (!held && *flag && (held = malloc(sizeof *held))) {
    nv_held **bucket = bucket_of(flag);
    *held = (nv_held){flag, 0, generation, *bucket};
    *bucket = held;
    *flag = 0;
  }
  if (held) held->count++;
  hold->held = held;
}

void nv_hold_flag(nv_hold *hold, uint64_t address) {
  pthread_mutex_lock(&mutex);
  hold_flag(hold, address);
  pthread_mutex_unlock(&mutex);
}

uint64_t nv_hold_flags(nv_holds *holds, const uint64_t *addresses) {
  uint64_t held = 0;
  pthread_mutex_lock(&mutex);
  for (uint64_t i = 0; i < holds->count; i++) {
    hold_flag(&holds->each[i], addresses[i]);
    held += holds->each[i].held != NULL;
  }
  pthread_mutex_unlock(&mutex);
  return held;
}

void nv_unhold_all(nv_holds *holds) {
  for (uint64_t i = 0; i < holds->count; i++) nv_unhold(&holds->each[i]);
}

void nv_unhold(nv_hold *hold) {
  /* By its owner and by a lane at the same time: whoever returns knows that it is over. */
  pthread_mutex_lock(&mutex);
  nv_held *held = hold->held;
  hold->held = NULL;
  if (!held) {
    pthread_mutex_unlock(&mutex);
    return;
  }
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
