/* Shared by the files of write protection. */
#ifndef NVMEIO_PROTECTION_INTERNAL_H
#define NVMEIO_PROTECTION_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "../common/page_tables.h"
#include "decl.h"

/* --- write_protection.c ------------------------------------------------------------------ */

int nv_wp_open(int which);
int nv_wp_is_open(int fd);
int nv_wp_register(int fd, uint64_t low, uint64_t high);
int nv_wp_protect(int fd, uint64_t low, uint64_t high);
void nv_wp_wake(int fd, uint64_t low, uint64_t high);
void nv_wp_lift(int fd, uint64_t low, uint64_t high);
void nv_wp_unregister(int fd, uint64_t low, uint64_t high);
int nv_wp_read_fault(int fd, uint64_t *address);
int nv_wp_is_merging(void);

#endif
