/* Weights of 4 or 8 bits an element: widened, or multiplied with as they are.
 *
 * A row is cut into groups; each has steps, a scale and a minimum, and an element is
 * step * scale + minimum in float32, rounded to the model's dtype: both give the very same elements
 * (so there is no fused multiply-add in making them). Of four bits, the first half of a group lies
 * in the low halves of its bytes. Products are summed in float32. packed_loops.h has the loops, which
 * are compiled for several kinds of CPU; rows are dealt to the threads that torch computes with, so
 * that there are not twice as many. */
#include "internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

static float bits_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint32_t float_as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* To the nearest, ties to even; infinities and NaN stay what they are. */
static uint16_t to_bfloat16(float value) {
  uint32_t bits = float_as_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t to_float16(float value) {
  uint32_t bits = float_as_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more */
  if (size < 0x38800000) /* a subnormal: adding 0.5 leaves its bits at the end, rounded */
    return (uint16_t)(sign | (float_as_bits(bits_as_float(size) + 0.5f) - 0x3f000000));
  return (uint16_t)(sign | ((size + 0xc8000fff + (size >> 13 & 1)) >> 13));
}

static float from_float16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = half & 0x7fff;
  if (size >= 0x7c00) return bits_as_float(sign | 0x7f800000 | size << 13);
  if (size < 0x400) {
    float value = (float)size * 0x1p-24f;
    return sign ? -value : value;
  }
  return bits_as_float(sign | ((size << 13) + 0x38000000));
}

INLINE float rounded(float value, int dtype) {
  if (dtype == BFLOAT16) return bits_as_float((uint32_t)to_bfloat16(value) << 16);
  return dtype == FLOAT16 ? from_float16(to_float16(value)) : value;
}

INLINE void put(void *out, uint64_t at, float value, int dtype) {
  if (dtype == FLOAT32) ((float *)out)[at] = value;
  if (dtype == BFLOAT16) ((uint16_t *)out)[at] = to_bfloat16(value);
  if (dtype == FLOAT16) ((uint16_t *)out)[at] = to_float16(value);
}

/* Of any CPU, and groups of any size: one element at a time. */
#define NAME(function) function##_plain
#define TARGET
#define LANES 1
#define MOST_INPUTS 4
typedef float NAME(vector);
#define SPLAT(value) (value)
#define STEPS8(bytes) ((float)*(bytes))
#define STEPS4(bytes, high) ((float)((high) ? *(bytes) >> 4 : *(bytes) & 15))
#define SCALED(steps, scale, low) ((steps) * (scale) + (low))
#define ROUNDED(v, dtype) rounded(v, dtype)
#define LOAD(at) (*(at))
#define ADD_PRODUCT(a, b, sum) ((a) * (b) + (sum))
#define SUM(v) (v)
#define STORE(out, at, v, dtype) put(out, at, v, dtype)
#include "packed_loops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define NAME(function) function##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define MOST_INPUTS 4
typedef __m256 NAME(vector);
TARGET INLINE __m256 NAME(nearest)(__m256 v, int dtype) {
  if (dtype == FLOAT16) return _mm256_cvtph_ps(_mm256_cvtps_ph(v, 0));
  if (dtype == FLOAT32) return v;
  __m256i bits = _mm256_castps_si256(v), odd = _mm256_srli_epi32(bits, 16);
  odd = _mm256_add_epi32(_mm256_and_si256(odd, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
  bits = _mm256_and_si256(_mm256_add_epi32(bits, odd), _mm256_set1_epi32((int)0xffff0000));
  return _mm256_castsi256_ps(bits);
}
TARGET INLINE float NAME(total)(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
TARGET INLINE __m256i NAME(bytes)(const uint8_t *at) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
}
TARGET INLINE void NAME(store)(void *out, uint64_t at, __m256 v, int dtype) {
  if (dtype == FLOAT32) {
    _mm256_storeu_ps((float *)out + at, v);
  } else if (dtype == FLOAT16) {
    _mm_storeu_si128((__m128i *)((uint16_t *)out + at), _mm256_cvtps_ph(v, 0));
  } else { /* rounded before */
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i *)((uint16_t *)out + at), packed);
  }
}
#define SPLAT(value) _mm256_set1_ps(value)
#define STEPS8(at) _mm256_cvtepi32_ps(NAME(bytes)(at))
#define STEPS4(at, high)                                                                     \
  _mm256_cvtepi32_ps((high) ? _mm256_srli_epi32(NAME(bytes)(at), 4)                          \
                            : _mm256_and_si256(NAME(bytes)(at), _mm256_set1_epi32(15)))
#define SCALED(steps, scale, low) _mm256_add_ps(_mm256_mul_ps(steps, scale), low)
#define ROUNDED(v, dtype) NAME(nearest)(v, dtype)
#define LOAD(at) _mm256_loadu_ps(at)
#define ADD_PRODUCT(a, b, sum) _mm256_fmadd_ps(a, b, sum)
#define SUM(v) NAME(total)(v)
#define STORE(out, at, v, dtype) NAME(store)(out, at, v, dtype)
#include "packed_loops.h"

/* All 16 elements that a group of four bits can have are a register: its steps choose from it. */
#define NAME(function) function##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define LANES 16
#define MOST_INPUTS 8
#define TABLE
typedef __m512 NAME(vector);
TARGET INLINE __m512 NAME(nearest)(__m512 v, int dtype) {
  if (dtype == FLOAT16) return _mm512_cvtph_ps(_mm512_cvtps_ph(v, 0));
  if (dtype == FLOAT32) return v;
  __m512i bits = _mm512_castps_si512(v), odd = _mm512_srli_epi32(bits, 16);
  odd = _mm512_add_epi32(_mm512_and_si512(odd, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
  bits = _mm512_and_si512(_mm512_add_epi32(bits, odd), _mm512_set1_epi32((int)0xffff0000));
  return _mm512_castsi512_ps(bits);
}
TARGET INLINE __m512i NAME(bytes)(const uint8_t *at) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
}
TARGET INLINE __m256i NAME(halves)(__m512 v, int dtype) {
  if (dtype == FLOAT16) return _mm512_cvtps_ph(v, 0);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16));
}
TARGET INLINE void NAME(store)(void *out, uint64_t at, __m512 v, int dtype) {
  if (dtype == FLOAT32)
    _mm512_storeu_ps((float *)out + at, v);
  else
    _mm256_storeu_si256((__m256i *)((uint16_t *)out + at), NAME(halves)(v, dtype));
}
/* Elements of 16 bits: 32 at once from a table that holds all of them twice, as an index of the
 * lower half of a byte has a bit of the upper one. */
TARGET INLINE void NAME(widen_halves)(const nv_packed *of, int dtype, uint64_t row) {
  const uint32_t run = of->group_size / 2;
  const __m512 steps = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const uint8_t *from = of->steps + row * of->steps_stride;
  uint16_t *to = (uint16_t *)of->out + row * of->out_stride;
  for (uint64_t g = 0; g < of->groups; g++, to += run) {
    __m512 scale = _mm512_set1_ps(of->scales[row * of->groups_stride + g]);
    __m512 low = _mm512_set1_ps(of->minima[row * of->groups_stride + g]);
    __m512 all = NAME(nearest)(_mm512_add_ps(_mm512_mul_ps(steps, scale), low), dtype);
    __m512i table = _mm512_broadcast_i64x4(NAME(halves)(all, dtype));
    for (uint32_t at = 0; at < run; at += 32, from += 32, to += 32) {
      __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from));
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(bytes, table));
      bytes = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table);
      _mm512_storeu_si512(to + run, bytes);
    }
  }
}
#define SPLAT(value) _mm512_set1_ps(value)
#define STEPS8(at) _mm512_cvtepi32_ps(NAME(bytes)(at))
#define STEPS _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define CHOSEN(at, high, table)                                                              \
  _mm512_permutexvar_ps((high) ? _mm512_srli_epi32(NAME(bytes)(at), 4) : NAME(bytes)(at), table)
#define SCALED(steps, scale, low) _mm512_add_ps(_mm512_mul_ps(steps, scale), low)
#define ROUNDED(v, dtype) NAME(nearest)(v, dtype)
#define LOAD(at) _mm512_loadu_ps(at)
#define ADD_PRODUCT(a, b, sum) _mm512_fmadd_ps(a, b, sum)
#define SUM(v) _mm512_reduce_add_ps(v)
#define STORE(out, at, v, dtype) NAME(store)(out, at, v, dtype)
#include "packed_loops.h"

typedef void (*loop)(const nv_packed *, uint64_t first, uint64_t last);

static loop choose(const nv_packed *of) {
  uint32_t run = of->bits == 4 ? of->group_size / 2 : of->group_size;
  if (run % 16 == 0 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return work_avx512;
  if (run % 8 == 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return work_avx2;
  return work_plain;
}
#else
typedef void (*loop)(const nv_packed *, uint64_t first, uint64_t last);

static loop choose(const nv_packed *of) { return work_plain; }
#endif

/* --- threads --------------------------------------------------------------------------------- */

#define ROWS 4 /* at once, at most */
#define SMALL (1 << 17) /* so many products take less time than waking a thread */

typedef struct {
  const nv_packed *of;
  loop run;
  uint64_t all, step, room;
  atomic_ullong next, thread;
} shared;

/* Shares are small and taken as they come: a core that is busy with something else gets fewer. */
static void take_shares(void *argument) {
  shared *of = argument;
  nv_packed own = *of->of;
  if (of->room) own.room = (char *)own.room + atomic_fetch_add(&of->thread, 1) * of->room;
  for (;;) {
    uint64_t first = atomic_fetch_add(&of->next, of->step);
    if (first >= of->all) return;
    of->run(&own, first, first + of->step < of->all ? first + of->step : of->all);
  }
}

static void *take_in_thread(void *argument) {
  take_shares(argument);
  return NULL;
}

/* `all` rows, or blocks of inputs, some `unit`s of them at a time. */
static void share(const nv_packed *of, loop run, uint64_t all, uint64_t unit, uint32_t threads) {
  shared work = {.of = of, .run = run, .all = all, .room = of->room ? nv_packed_room(of) : 0};
  if (threads < 2) {
    run(of, 0, all);
    return;
  }
  work.step = (all / (threads * 8) + unit) / unit * unit;
  /* torch's own threads, of GNU's OpenMP or of one that has its entry points. */
  void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = NULL;
  *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  if (parallel) {
    parallel(take_shares, &work, threads, 0);
    return;
  }
  pthread_t others[64];
  uint32_t n = 0;
  sigset_t every, before;
  sigfillset(&every); /* signals are for threads of the program */
  pthread_sigmask(SIG_SETMASK, &every, &before);
  while (n + 1 < threads && !pthread_create(&others[n], NULL, take_in_thread, &work)) n++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  take_shares(&work);
  while (n) pthread_join(others[--n], NULL);
}

int nv_packed_run(const nv_packed *of, uint32_t threads) {
  uint64_t width = of->groups * of->group_size;
  if (threads > 64) threads = 64;
  if (!threads) threads = 1;
  if (of->rows * width * (of->inputs ? of->inputs : 1) < SMALL) threads = 1;
  if (of->table) {
    share(of, nv_packed_look_up, of->rows, nv_packed_looked_up_at_once(of), threads);
    return 0;
  }
  if (!of->halves) {
    share(of, choose(of), of->rows, ROWS, threads);
    return 0;
  }
  if (!nv_packed_tiled(of)) {
    share(of, nv_packed_pairs, of->rows, ROWS, threads);
    return 0;
  }
  nv_packed tiled = *of;
  uint64_t blocks = (of->inputs + 15) / 16, arranged = blocks * 16 * width * sizeof *tiled.arranged;
  tiled.arranged = aligned_alloc(64, arranged + threads * nv_packed_room(of));
  if (!tiled.arranged) return -ENOMEM;
  tiled.room = (char *)tiled.arranged + arranged;
  share(&tiled, nv_packed_arrange, blocks, 1, blocks < 4 ? 1 : threads);
  share(&tiled, nv_packed_tiles, of->rows, nv_packed_rows_at_once(of), threads);
  free(tiled.arranged);
  return 0;
}
