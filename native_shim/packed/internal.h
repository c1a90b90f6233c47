/* Shared by the files of packed weights. */
#ifndef NVMEIO_PACKED_INTERNAL_H
#define NVMEIO_PACKED_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "decl.h"

/* --- packed_tiles.c ---------------------------------------------------------------------- */

int nv_packed_tiled(const nv_packed *);
void nv_packed_pairs(const nv_packed *, uint64_t first, uint64_t last);   /* rows of the weight */
uint64_t nv_packed_rows_at_once(const nv_packed *);
uint64_t nv_packed_room(const nv_packed *); /* bytes that each thread needs */
void nv_packed_arrange(const nv_packed *, uint64_t first, uint64_t last); /* blocks of 16 inputs */
void nv_packed_tiles(const nv_packed *, uint64_t first, uint64_t last);   /* rows of the weight */

/* --- lookup.c ---------------------------------------------------------------------------- */

uint64_t nv_packed_looked_up_at_once(const nv_packed *);
void nv_packed_look_up(const nv_packed *, uint64_t first, uint64_t last); /* rows of the steps */

#endif
