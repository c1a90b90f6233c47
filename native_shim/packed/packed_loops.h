/* The loops of packed.c for one kind of CPU, whose operations are the macros defined before. */

/* Of a group what its elements are made with, and LANES of them, from the bytes of their steps. */
#ifdef TABLE
#define OPENED(bits, dtype, scale, low)                                                        \
  ((bits) == 4 ? ROUNDED(SCALED(STEPS, SPLAT(scale), SPLAT(low)), dtype) : SPLAT(scale))
#define ELEMENTS(bits, dtype, bytes, high, opened, low)                                        \
  ((bits) == 4 ? CHOSEN(bytes, high, opened)                                                   \
               : ROUNDED(SCALED(STEPS8(bytes), opened, SPLAT(low)), dtype))
#else
#define OPENED(bits, dtype, scale, low) SPLAT(scale)
#define ELEMENTS(bits, dtype, bytes, high, opened, low)                                        \
  ROUNDED(SCALED((bits) == 4 ? STEPS4(bytes, high) : STEPS8(bytes), opened, SPLAT(low)), dtype)
#endif

/* `m` rows from `row` on, times `n` inputs from `first` on. */
TARGET INLINE void NAME(multiply)(const nv_packed *of, int bits, int dtype, uint64_t row,
                                  uint64_t first, const int m, const int n) {
  const uint32_t size = of->group_size, run = bits == 4 ? size / 2 : size;
  const uint64_t width = of->groups * size;
  const float *input = of->input + first * width;
  NAME(vector) sums[8][8], opened[8];
  float low[8];
#pragma GCC unroll 8
  for (int r = 0; r < m; r++)
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) sums[r][i] = SPLAT(0);
  for (uint64_t g = 0; g < of->groups; g++, input += size) {
#pragma GCC unroll 8
    for (int r = 0; r < m; r++) {
      low[r] = of->minima[(row + r) * of->groups_stride + g];
      opened[r] = OPENED(bits, dtype, of->scales[(row + r) * of->groups_stride + g], low[r]);
    }
    const uint8_t *steps = of->steps + row * of->steps_stride + g * run;
    /* Of the rows that come next: a CPU's prefetching seems to follow one row a page. */
    for (uint32_t at = 0; at < run; at += 64)
#pragma GCC unroll 8
      for (int r = 0; r < m; r++) __builtin_prefetch(steps + (m + r) * of->steps_stride + at);
    for (uint32_t at = 0; at < run; at += LANES) {
      for (int high = 0; high < (bits == 4 ? 2 : 1); high++) {
        const float *x = input + at + (high ? run : 0);
        NAME(vector) w[8];
#pragma GCC unroll 8
        for (int r = 0; r < m; r++)
          w[r] = ELEMENTS(bits, dtype, steps + r * of->steps_stride + at, high, opened[r], low[r]);
#pragma GCC unroll 8
        for (int i = 0; i < n; i++)
#pragma GCC unroll 8
          for (int r = 0; r < m; r++)
            sums[r][i] = ADD_PRODUCT(w[r], LOAD(x + i * width), sums[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < n; i++)
#pragma GCC unroll 8
    for (int r = 0; r < m; r++) {
      float sum = SUM(sums[r][i]) + (of->bias ? of->bias[row + r] : 0);
      put(of->out, (first + i) * of->out_stride + row + r, sum, dtype);
    }
}

TARGET INLINE void NAME(widen)(const nv_packed *of, int bits, int dtype, uint64_t row) {
  const uint32_t size = of->group_size, run = bits == 4 ? size / 2 : size;
#ifdef TABLE
  if (bits == 4 && dtype != FLOAT32 && run % 32 == 0) {
    NAME(widen_halves)(of, dtype, row);
    return;
  }
#endif
  for (uint64_t g = 0; g < of->groups; g++) {
    float low = of->minima[row * of->groups_stride + g];
    NAME(vector) opened = OPENED(bits, dtype, of->scales[row * of->groups_stride + g], low);
    const uint8_t *steps = of->steps + row * of->steps_stride + g * run;
    uint64_t to = row * of->out_stride + g * size;
    for (uint32_t at = 0; at < run; at += LANES) {
      STORE(of->out, to + at, ELEMENTS(bits, dtype, steps + at, 0, opened, low), dtype);
      if (bits == 4)
        STORE(of->out, to + run + at, ELEMENTS(bits, dtype, steps + at, 1, opened, low), dtype);
    }
  }
}

TARGET INLINE void NAME(with)(const nv_packed *of, int bits, int dtype, uint64_t first,
                              uint64_t last) {
  if (!of->inputs) {
    for (uint64_t row = first; row < last; row++) NAME(widen)(of, bits, dtype, row);
    return;
  }
  for (uint64_t i = 0; i < of->inputs;) {
    uint64_t left = of->inputs - i, row = first;
    if (MOST_INPUTS == 8 && left >= 8) {
      for (; row + 2 <= last; row += 2) NAME(multiply)(of, bits, dtype, row, i, 2, 8);
      for (; row < last; row++) NAME(multiply)(of, bits, dtype, row, i, 1, 8);
      i += 8;
    } else if (left >= 4) {
      for (; row + 2 <= last; row += 2) NAME(multiply)(of, bits, dtype, row, i, 2, 4);
      for (; row < last; row++) NAME(multiply)(of, bits, dtype, row, i, 1, 4);
      i += 4;
    } else if (left >= 2) {
      for (; row + 4 <= last; row += 4) NAME(multiply)(of, bits, dtype, row, i, 4, 2);
      for (; row < last; row++) NAME(multiply)(of, bits, dtype, row, i, 1, 2);
      i += 2;
    } else {
      for (; row + 4 <= last; row += 4) NAME(multiply)(of, bits, dtype, row, i, 4, 1);
      for (; row < last; row++) NAME(multiply)(of, bits, dtype, row, i, 1, 1);
      i += 1;
    }
  }
}

TARGET static void NAME(work)(const nv_packed *of, uint64_t first, uint64_t last) {
  if (of->bits == 4 && of->dtype == FLOAT32) NAME(with)(of, 4, FLOAT32, first, last);
  if (of->bits == 4 && of->dtype == BFLOAT16) NAME(with)(of, 4, BFLOAT16, first, last);
  if (of->bits == 4 && of->dtype == FLOAT16) NAME(with)(of, 4, FLOAT16, first, last);
  if (of->bits == 8 && of->dtype == FLOAT32) NAME(with)(of, 8, FLOAT32, first, last);
  if (of->bits == 8 && of->dtype == BFLOAT16) NAME(with)(of, 8, BFLOAT16, first, last);
  if (of->bits == 8 && of->dtype == FLOAT16) NAME(with)(of, 8, FLOAT16, first, last);
}

#undef OPENED
#undef ELEMENTS
#undef NAME
#undef TARGET
#undef LANES
#undef MOST_INPUTS
#undef SPLAT
#undef STEPS8
#undef STEPS4
#undef SCALED
#undef ROUNDED
#undef LOAD
#undef ADD_PRODUCT
#undef SUM
#undef STORE
