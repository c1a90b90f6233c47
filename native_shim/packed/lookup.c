/* Weights whose bytes stand for elements by a table: FP8, a byte for each, and MXFP4, for two.
 *
 * The tables are torch's: an element is what torch makes of its step and its scale. */
#include "internal.h"

#include <string.h>

#define STEPS 256     /* of a byte */
#define VALUES 16     /* of half a byte */
#define GROUP 32      /* elements of MXFP4 that share an exponent */
#define AT_ONCE 32    /* rows of MXFP4 that are written side by side: a cache line of 16-bit ones */

#define LOOPS(element)                                                                       \
  static void bytes_##element(const nv_packed *of, uint64_t first, uint64_t last) {          \
    for (uint64_t row = first; row < last; row++) {                                          \
      const uint8_t *from = of->steps + row * of->steps_stride;                              \
      element *to = (element *)of->out + row * of->out_stride;                               \
      const element *own = of->table;                                                        \
      own += row / of->block_rows * of->groups * STEPS;                                      \
      for (uint64_t g = 0; g < of->groups; g++, own += STEPS)                                \
        for (uint32_t at = 0; at < of->group_size; at++) *to++ = own[*from++];               \
    }                                                                                        \
  }                                                                                          \
  static void halves_##element(const nv_packed *of, uint64_t first, uint64_t last) {         \
    element turned[GROUP][AT_ONCE];                                                          \
    for (uint64_t row = first; row < last; row += AT_ONCE) {                                 \
      uint64_t rows = last - row < AT_ONCE ? last - row : AT_ONCE;                           \
      element *to = (element *)of->out + row;                                                \
      for (uint64_t g = 0; g < of->groups; g++) {                                            \
        for (uint64_t n = 0; n < rows; n++) {                                                \
          const uint8_t *from = of->steps + (row + n) * of->steps_stride + g * (GROUP / 2);  \
          const element *own = of->table;                                                    \
          own += VALUES * of->exponents[(row + n) * of->groups_stride + g];                  \
          for (uint32_t at = 0; at < GROUP / 2; at++) {                                      \
            turned[2 * at][n] = own[from[at] & 15];                                          \
            turned[2 * at + 1][n] = own[from[at] >> 4];                                      \
          }                                                                                  \
        }                                                                                    \
        for (uint32_t at = 0; at < GROUP; at++, to += of->out_stride)                        \
          memcpy(to, turned[at], rows * sizeof(element));                                    \
      }                                                                                      \
    }                                                                                        \
  }

LOOPS(uint16_t)
LOOPS(uint32_t)

uint64_t nv_packed_looked_up_at_once(const nv_packed *of) { return of->exponents ? AT_ONCE : 4; }

void nv_packed_look_up(const nv_packed *of, uint64_t first, uint64_t last) {
  if (of->dtype == 0)
    (of->exponents ? halves_uint32_t : bytes_uint32_t)(of, first, last);
  else
    (of->exponents ? halves_uint16_t : bytes_uint16_t)(of, first, last);
}
