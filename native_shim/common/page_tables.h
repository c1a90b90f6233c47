/* What page_tables.c tells the libraries that are built with it. */
#ifndef NVMEIO_PAGE_TABLES_H
#define NVMEIO_PAGE_TABLES_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>

#include "decl.h"

int nv_page_tables_open(void); /* the descriptor, opened once; -1 without one */
int nv_page_tables_kept(uint64_t low, uint64_t high);

#endif
