/* Products of packed weights in bfloat16 on a CPU that multiplies such numbers: few inputs by its
 * instructions for pairs (AVX512-BF16), more in its tile registers (AMX).
 *
 * In tiles some rows of the weight are widened at a time, a part of each, into memory that stays in the
 * first-level cache, and multiplied from there with all inputs: 16 rows by 16 inputs by 32 elements an
 * instruction, summed in float32. The elements are those of widening, the sums one for each row and
 * input. Subnormal numbers are taken as 0, as torch's products in bfloat16 do on such a CPU. */
#include "internal.h"

#if defined(__x86_64__) && (__GNUC__ >= 11 || (defined(__clang__) && __clang_major__ >= 12))
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")))
#define TILED(name) TARGET static inline __attribute__((always_inline)) name

enum {
  SIDE = 16,             /* rows of a tile */
  WIDE = 32,             /* elements in each of them */
  TILE = SIDE * WIDE,    /* elements of a tile of inputs, SIDE * SIDE pairs of them */
  DEPTH = 512,           /* elements of a row that are widened at a time, at most */
  STRIDE = DEPTH + WIDE, /* from one row to the next, so that they share no sets of the cache */
  FEWEST = 3,            /* inputs: fewer are multiplied faster without tiles */
  FEW = 64,              /* inputs that stay in the cache beside few rows */
  FEW_ROWS = 2 * SIDE,   /* that are widened at a time for these; for more inputs MANY_ROWS */
  MANY_ROWS = 256,
  MOST_INPUTS = 512, /* that have sums at a time */
};

uint64_t nv_packed_rows_at_once(const nv_packed *of) { return of->inputs > FEW ? MANY_ROWS : FEW_ROWS; }

static uint64_t sums_of(const nv_packed *of) {
  return of->inputs < MOST_INPUTS ? (of->inputs + SIDE - 1) / SIDE * SIDE : MOST_INPUTS;
}

/* What a thread needs. */
uint64_t nv_packed_room(const nv_packed *of) {
  return nv_packed_rows_at_once(of) * (STRIDE * 2 + sums_of(of) * 4);
}

int nv_packed_tiled(const nv_packed *of) { return of->inputs >= FEWEST; }

/* That a product takes `halves`, in tiles or in pairs. */
int nv_packed_has_tiles(const nv_packed *of) {
  enum { NONE = 1, PAIRS, TILES };
  static atomic_int known;
  int has = atomic_load(&known);
  if (!has) {
    enum { ASK_FOR = 0x1023, TILE_DATA = 18, BOTH = 1 << 22 | 1 << 24 }; /* asm/prctl.h; AMX-BF16, -TILE */
    unsigned a, b, c, d = 0;
    has = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
              ? PAIRS
              : NONE;
    if (has == PAIRS && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BOTH) == BOTH &&
        !syscall(SYS_arch_prctl, ASK_FOR, TILE_DATA))
      has = TILES;
    atomic_store(&known, has);
  }
  return has >= (nv_packed_tiled(of) ? TILES : PAIRS) && of->dtype == 1 && of->inputs &&
         of->group_size <= DEPTH && of->group_size % (of->bits == 4 ? 64 : 32) == 0;
}

/* What tiles of inputs are made of: of SIDE inputs each pair of elements side by side. */
void nv_packed_arrange(const nv_packed *of, uint64_t first, uint64_t last) {
  const uint64_t pairs = of->groups * of->group_size / 2;
  for (uint64_t block = first; block < last; block++) {
    const uint32_t *from = (const uint32_t *)of->halves + block * SIDE * pairs;
    uint32_t *to = (uint32_t *)of->arranged + block * SIDE * pairs;
    const uint64_t count = of->inputs - block * SIDE < SIDE ? of->inputs - block * SIDE : SIDE;
    if (count < SIDE) memset(to, 0, SIDE * pairs * sizeof *to);
    for (uint64_t at = 0; at < pairs; at += SIDE)
      for (uint64_t i = 0; i < count; i++)
        for (uint64_t j = 0; j < SIDE; j++) to[(at + j) * SIDE + i] = from[i * pairs + at + j];
  }
}

#define STEPS _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)

/* All 16 elements that a group of 4 bits can have, twice: an index has a bit of the upper half. */
TILED(__m512i all_elements)(float scale, float low) {
  __m512 all = _mm512_add_ps(_mm512_mul_ps(STEPS, _mm512_set1_ps(scale)), _mm512_set1_ps(low));
  return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(all));
}

/* 32 bytes of steps of 4 bits, each in the low half of 16 bits, and 32 elements of 8 bits. */
TILED(__m512i steps_at)(const uint8_t *at) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)at));
}

TILED(__m512i elements_at)(const uint8_t *at, __m512 scale, __m512 low) {
  __m512 part[2];
  for (int i = 0; i < 2; i++) {
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(at + 16 * i)));
    part[i] = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(bytes), scale), low);
  }
  return (__m512i)_mm512_cvtne2ps_pbh(part[1], part[0]);
}

/* --- few inputs --------------------------------------------------------------------------------- */

/* `m` rows from `row` on, times `n` inputs: pairs of elements at once, as tiles sum them. */
TILED(void pairs)(const nv_packed *of, int bits, uint64_t row, const int m, const int n) {
  const uint32_t size = of->group_size, run = bits == 4 ? size / 2 : size;
  const uint64_t width = of->groups * size;
  const uint16_t *x = of->halves;
  __m512 sums[4][2];
#pragma GCC unroll 8
  for (int r = 0; r < m; r++)
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) sums[r][i] = _mm512_setzero_ps();
  for (uint64_t g = 0; g < of->groups; g++, x += size) {
    const uint8_t *steps = of->steps + row * of->steps_stride + g * run;
    __m512i table[4];
    __m512 scale[4], low[4];
#pragma GCC unroll 8
    for (int r = 0; r < m; r++) {
      const uint64_t at = (row + r) * of->groups_stride + g;
      scale[r] = _mm512_set1_ps(of->scales[at]), low[r] = _mm512_set1_ps(of->minima[at]);
      if (bits == 4) table[r] = all_elements(of->scales[at], of->minima[at]);
      for (uint32_t to = 0; to < run; to += 64)
        _mm_prefetch((const char *)steps + (m + r) * of->steps_stride + to, _MM_HINT_T0);
    }
    for (uint32_t at = 0; at < run; at += 32) {
#pragma GCC unroll 8
      for (int r = 0; r < m; r++) {
        const uint8_t *from = steps + r * of->steps_stride + at;
        __m512i few = bits == 4 ? steps_at(from) : elements_at(from, scale[r], low[r]), more = few;
        if (bits == 4) {
          more = _mm512_permutexvar_epi16(_mm512_srli_epi16(few, 4), table[r]);
          few = _mm512_permutexvar_epi16(few, table[r]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
          const uint16_t *by = x + i * width + at;
          sums[r][i] = _mm512_dpbf16_ps(sums[r][i], (__m512bh)few, (__m512bh)_mm512_loadu_si512(by));
          if (bits == 4)
            sums[r][i] =
                _mm512_dpbf16_ps(sums[r][i], (__m512bh)more, (__m512bh)_mm512_loadu_si512(by + run));
        }
      }
    }
  }
  for (int r = 0; r < m; r++)
    for (int i = 0; i < n; i++) {
      const __m128 sum = _mm_set_ss(_mm512_reduce_add_ps(sums[r][i]) + (of->bias ? of->bias[row + r] : 0));
      const __m128i rounded = (__m128i)_mm_cvtneps_pbh(sum);
      ((uint16_t *)of->out)[i * of->out_stride + row + r] = (uint16_t)_mm_extract_epi16(rounded, 0);
    }
}

TILED(void in_pairs)(const nv_packed *of, int bits, uint64_t first, uint64_t last, const int n) {
  uint64_t row = first;
  for (; row + 4 <= last; row += 4) pairs(of, bits, row, 4, n);
  for (; row < last; row++) pairs(of, bits, row, 1, n);
}

TARGET void nv_packed_pairs(const nv_packed *of, uint64_t first, uint64_t last) {
  if (of->bits == 4 && of->inputs == 1) in_pairs(of, 4, first, last, 1);
  if (of->bits == 4 && of->inputs == 2) in_pairs(of, 4, first, last, 2);
  if (of->bits == 8 && of->inputs == 1) in_pairs(of, 8, first, last, 1);
  if (of->bits == 8 && of->inputs == 2) in_pairs(of, 8, first, last, 2);
}

/* --- tiles -------------------------------------------------------------------------------------- */

/* Some groups of a row; those that come next are `ahead` bytes of steps behind. */
TILED(void widen)(const nv_packed *of, int bits, uint64_t row, uint64_t first, uint64_t last, int64_t ahead,
                  uint16_t *to) {
  const uint32_t size = of->group_size, run = bits == 4 ? size / 2 : size;
  const float *scales = of->scales + row * of->groups_stride, *minima = of->minima + row * of->groups_stride;
  const uint8_t *from = of->steps + row * of->steps_stride + first * run;
  for (uint64_t g = first; g < last; g++, from += run, to += size) {
    __m512 scale = _mm512_set1_ps(scales[g]), low = _mm512_set1_ps(minima[g]);
    for (uint32_t at = 0; at < run; at += 64) _mm_prefetch((const char *)from + ahead + at, _MM_HINT_T0);
    if (bits == 4) {
      __m512i table = all_elements(scales[g], minima[g]);
      for (uint32_t at = 0; at < run; at += 32) {
        __m512i bytes = steps_at(from + at);
        _mm512_storeu_si512(to + at, _mm512_permutexvar_epi16(bytes, table));
        _mm512_storeu_si512(to + run + at, _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table));
      }
      continue;
    }
    for (uint32_t at = 0; at < run; at += 32)
      _mm512_storeu_si512(to + at, elements_at(from + at, scale, low));
  }
}

/* Two tiles of rows by one or two of inputs; `sums` has four of SIDE * SIDE. */
TILED(void multiply)(const uint16_t *rows, const uint16_t *inputs, uint64_t next, uint64_t depth, float *sums,
                     int begins, const int both) {
  float *at[4] = {sums, sums + SIDE * SIDE, sums + 2 * SIDE * SIDE, sums + 3 * SIDE * SIDE};
  if (begins) {
    _tile_zero(0);
    _tile_zero(1);
    if (both) _tile_zero(2);
    if (both) _tile_zero(3);
  } else {
    _tile_loadd(0, at[0], SIDE * 4);
    _tile_loadd(1, at[1], SIDE * 4);
    if (both) _tile_loadd(2, at[2], SIDE * 4);
    if (both) _tile_loadd(3, at[3], SIDE * 4);
  }
  for (uint64_t k = 0; k < depth; k += WIDE, inputs += TILE) {
    _tile_loadd(6, inputs, WIDE * 2);
    _tile_loadd(4, rows + k, STRIDE * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, rows + SIDE * STRIDE + k, STRIDE * 2);
    _tile_dpbf16ps(1, 5, 6);
    if (both) {
      _tile_loadd(7, inputs + next, WIDE * 2);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, at[0], SIDE * 4);
  _tile_stored(1, at[1], SIDE * 4);
  if (both) _tile_stored(2, at[2], SIDE * 4);
  if (both) _tile_stored(3, at[3], SIDE * 4);
}

/* Sums of `count` inputs from `first` on, with at most two tiles of rows. */
TILED(void put)(const nv_packed *of, const float *sums, uint64_t row, uint64_t m, uint64_t first, uint64_t count) {
  const __m512i across = _mm512_slli_epi32(
      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4); /* SIDE apart */
  for (uint64_t half = 0; half * SIDE < m; half++) {
    const uint64_t left = m - half * SIDE, start = row + half * SIDE;
    const __mmask16 mask = left < SIDE ? (__mmask16)((1u << left) - 1) : 0xffff;
    __m512 bias = of->bias ? _mm512_maskz_loadu_ps(mask, of->bias + start) : _mm512_setzero_ps();
    for (uint64_t i = 0; i < count; i++) {
      const float *tile = sums + (i / SIDE * 2 + half) * SIDE * SIDE + i % SIDE;
      __m512 sum = _mm512_add_ps(_mm512_i32gather_ps(across, tile, 4), bias);
      uint16_t *to = (uint16_t *)of->out + (first + i) * of->out_stride + start;
      _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

TILED(void with)(const nv_packed *of, int bits, uint64_t first, uint64_t last) {
  const uint64_t width = of->groups * of->group_size, step = DEPTH / of->group_size;
  const uint64_t most = nv_packed_rows_at_once(of), most_sums = sums_of(of);
  uint16_t *rows = of->room;
  float *sums = (float *)(rows + most * STRIDE);
  for (uint64_t row = first; row < last; row += most) {
    const uint64_t m = last - row < most ? last - row : most;
    if (m < most) memset(rows, 0, most * STRIDE * 2);
    for (uint64_t input = 0; input < of->inputs; input += MOST_INPUTS) {
      const uint64_t n = of->inputs - input < MOST_INPUTS ? of->inputs - input : MOST_INPUTS;
      for (uint64_t g = 0; g < of->groups; g += step) {
        const uint64_t end = g + step < of->groups ? g + step : of->groups, size = of->group_size;
        const uint64_t run = of->bits == 4 ? size / 2 : size;
        const int64_t ahead = end < of->groups ? (int64_t)((end - g) * run)
                                               : (int64_t)(most * of->steps_stride) - (int64_t)(g * run);
        for (uint64_t r = 0; r < m; r++) widen(of, bits, row + r, g, end, ahead, rows + r * STRIDE);
        __asm__ volatile("" ::: "memory"); /* loads of tiles do not say that they read */
        for (uint64_t i = 0; i < n; i += 2 * SIDE) {
          const uint16_t *from = of->arranged + (input + i) * width + g * size * SIDE;
          for (uint64_t r = 0; r < m; r += 2 * SIDE) {
            float *to = sums + r * most_sums + 2 * SIDE * i;
            if (i + SIDE < n)
              multiply(rows + r * STRIDE, from, SIDE * width, (end - g) * size, to, !g, 1);
            else
              multiply(rows + r * STRIDE, from, SIDE * width, (end - g) * size, to, !g, 0);
          }
        }
      }
      for (uint64_t r = 0; r < m; r += 2 * SIDE)
        put(of, sums + r * most_sums, row + r, m - r < 2 * SIDE ? m - r : 2 * SIDE, input, n);
    }
  }
}

TARGET void nv_packed_tiles(const nv_packed *of, uint64_t first, uint64_t last) {
  struct {
    uint8_t palette, start, unused[14];
    uint16_t width[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < 8; i++) shape.width[i] = WIDE * 2, shape.rows[i] = SIDE;
  __asm__ volatile("" ::"r"(&shape) : "memory");
  _tile_loadconfig(&shape);
  if (of->bits == 4)
    with(of, 4, first, last);
  else
    with(of, 8, first, last);
  _tile_release();
}
#else
int nv_packed_tiled(const nv_packed *of) { return 0; }
int nv_packed_has_tiles(const nv_packed *of) { return 0; }
void nv_packed_pairs(const nv_packed *of, uint64_t first, uint64_t last) {}
uint64_t nv_packed_rows_at_once(const nv_packed *of) { return 1; }
uint64_t nv_packed_room(const nv_packed *of) { return 0; }
void nv_packed_arrange(const nv_packed *of, uint64_t first, uint64_t last) {}
void nv_packed_tiles(const nv_packed *of, uint64_t first, uint64_t last) {}
#endif
