/* Widens and multiplies with packed weights without Python, so that sanitizers and valgrind can watch.
 *
 *     drive_packed [ROUNDS [SEED]]
 *
 * Linked with the files of native_shim/packed. Matrices have odd sizes and groups, rows that
 * are apart, and memory that ends where they end and begins at any address its type may have. Each
 * result is compared with one that is made an element at a time; 0 is returned if all agree. */
#include "packed/internal.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };
static const char *const NAMES[] = {"float32", "bfloat16", "float16"};

/* The linker has packed.c call this one (-Wl,--wrap): its threads must leave all signals to others. */
int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
static unsigned threads_begun;

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument) {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  if (!sigismember(&blocked, SIGINT) || !sigismember(&blocked, SIGTERM)) {
    fprintf(stderr, "a thread for products takes signals of the program\n");
    abort();
  }
  threads_begun++;
  return __real_pthread_create(thread, attributes, run, argument);
}

static uint64_t state = 88172645463325252u;

static uint64_t chance(uint64_t below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % below;
}

static float any(void) { return (float)chance(2001) / 1000.0f - 1.0f; }

/* Of exactly so many bytes, so that the next one is another's; `shift` bytes after an aligned one. */
typedef struct {
  char *whole, *at;
} memory;

static memory of_bytes(uint64_t nbytes, uint64_t shift) {
  memory made = {malloc(nbytes + shift), NULL};
  if (!made.whole) abort();
  made.at = made.whole + shift;
  return made;
}

/* --- elements, one at a time and in double -------------------------------------------------------- */

static double rounded(double value, int dtype) {
  if (dtype == FLOAT32 || value == 0) return (float)value;
  int exponent, digits = dtype == BFLOAT16 ? 8 : 11, least = dtype == BFLOAT16 ? -125 : -13;
  frexp(value, &exponent);
  if (exponent < least) exponent = least;
  return ldexp(nearbyint(ldexp(value, digits - exponent)), exponent - digits);
}

static double element(const nv_packed *of, uint64_t row, uint64_t column) {
  uint64_t group = column / of->group_size, at = column % of->group_size;
  const uint8_t *bytes = of->steps + row * of->steps_stride + group * of->group_size * of->bits / 8;
  uint32_t half = of->group_size / 2;
  int step = of->bits == 8 ? bytes[at] : at < half ? bytes[at] & 15 : bytes[at - half] >> 4;
  float scaled = (float)step * of->scales[row * of->groups_stride + group];
  return rounded(scaled + of->minima[row * of->groups_stride + group], of->dtype);
}

static double stored(const void *memory, uint64_t at, int dtype) {
  uint16_t half;
  uint32_t bits;
  float value;
  if (dtype == FLOAT32) {
    memcpy(&value, (const char *)memory + at * 4, 4);
    return value;
  }
  memcpy(&half, (const char *)memory + at * 2, 2);
  if (dtype == BFLOAT16) {
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, 4);
    return value;
  }
  int exponent = half >> 10 & 31, digits = half & 1023;
  double size = exponent ? ldexp(digits + 1024, exponent - 25) : ldexp(digits, -24);
  return half >> 15 ? -size : size;
}

/* --- one matrix ----------------------------------------------------------------------------------- */

static unsigned trial(int dtype, uint32_t bits, uint32_t group_size, uint64_t groups, uint64_t rows,
                      uint64_t inputs, uint32_t threads) {
  const uint64_t width = groups * group_size, row_bytes = width * bits / 8;
  const uint64_t item = dtype == FLOAT32 ? 4 : 2, columns = inputs ? rows : width;
  nv_packed of = {.rows = rows, .groups = groups, .group_size = group_size, .bits = bits};
  of.dtype = dtype, of.inputs = inputs;
  of.steps_stride = row_bytes + chance(2) * chance(70);
  of.groups_stride = groups + chance(2) * chance(5);
  of.out_stride = columns + (inputs ? chance(2) * chance(9) : 0);
  memory steps = of_bytes((rows - 1) * of.steps_stride + row_bytes, chance(64));
  memory scales = of_bytes(((rows - 1) * of.groups_stride + groups) * 4, chance(16) * 4);
  memory minima = of_bytes(((rows - 1) * of.groups_stride + groups) * 4, chance(16) * 4);
  const uint64_t out_rows = inputs ? inputs : rows;
  const uint64_t out_items = (out_rows - 1) * of.out_stride + columns;
  memory out = of_bytes(out_items * item, chance(32) * item);
  memory bias = of_bytes(rows * 4, chance(16) * 4);
  of.steps = (uint8_t *)steps.at, of.out = out.at;
  of.scales = (float *)scales.at, of.minima = (float *)minima.at;
  for (uint64_t i = 0; i < (rows - 1) * of.steps_stride + row_bytes; i++) steps.at[i] = (char)chance(256);
  for (uint64_t i = 0; i < (rows - 1) * of.groups_stride + groups; i++) {
    ((float *)scales.at)[i] = (1.0f + any()) / 16;
    ((float *)minima.at)[i] = any();
  }
  for (uint64_t i = 0; i < rows; i++) ((float *)bias.at)[i] = any();
  memset(out.at, 0xa5, out_items * item);
  if (inputs && chance(2)) of.bias = (float *)bias.at;

  const int halves = inputs && nv_packed_has_tiles(&of);
  memory given = of_bytes(inputs * width * (halves ? 2 : 4) + !inputs, chance(16) * 4);
  for (uint64_t i = 0; i < inputs * width; i++) {
    float value = (float)rounded(any(), dtype);
    uint32_t whole;
    memcpy(&whole, &value, 4);
    uint16_t half = (uint16_t)(whole >> 16);
    if (halves)
      memcpy(given.at + i * 2, &half, 2);
    else
      memcpy(given.at + i * 4, &value, 4);
  }
  if (halves)
    of.halves = (uint16_t *)given.at;
  else
    of.input = (float *)given.at;

  if (nv_packed_run(&of, threads)) abort();
  double most = 0;
  for (uint64_t i = 0; i < out_rows; i++) {
    for (uint64_t j = 0; j < columns; j++) {
      double wanted = 0, size = 0, found = stored(out.at, i * of.out_stride + j, dtype);
      if (!inputs) {
        wanted = element(&of, i, j);
      } else {
        wanted = size = of.bias ? of.bias[j] : 0;
        size = fabs(size);
        for (uint64_t k = 0; k < width; k++) {
          double product = element(&of, j, k) * stored(given.at, i * width + k, halves ? BFLOAT16 : FLOAT32);
          wanted += product, size += fabs(product);
        }
      }
      /* Widened elements are exact; sums have float32's error and one rounding. */
      double least = dtype == BFLOAT16 ? 0x1p-8 : dtype == FLOAT16 ? 0x1p-11 : 0;
      double bound = inputs ? 1e-5 * size + least * fabs(wanted) + 0x1p-24 : 0;
      if (!(fabs(found - wanted) <= bound)) {
        fprintf(stderr,
                "%s, %u bits, groups of %u: %lu rows of %lu, %lu inputs, %u threads: [%lu, %lu] is %.9g, "
                "not %.9g\n",
                NAMES[dtype], bits, group_size, (unsigned long)rows, (unsigned long)width,
                (unsigned long)inputs, threads, (unsigned long)i, (unsigned long)j, found, wanted);
        abort();
      }
      most = fmax(most, fabs(found - wanted));
    }
    for (uint64_t j = columns; j < of.out_stride && i + 1 < out_rows; j++)
      for (uint64_t k = 0; k < item; k++)
        if ((unsigned char)out.at[(i * of.out_stride + j) * item + k] != 0xa5) {
          fprintf(stderr, "written between rows of the output\n");
          abort();
        }
  }
  free(steps.whole), free(scales.whole), free(minima.whole);
  free(out.whole), free(bias.whole), free(given.whole);
  return halves ? 2 : 1;
}

/* --- elements that a table has ------------------------------------------------------------------- */

static void fill(memory of, uint64_t nbytes) {
  for (uint64_t at = 0; at < nbytes; at++) of.at[at] = (char)chance(256);
}

/* FP8: a byte for each element, in blocks of `block_rows` x `width`. MXFP4 with `block_rows` 0: half a
 * byte, in groups of 32 with an exponent; the output is transposed. */
static void look_up(int dtype, uint64_t rows, uint64_t groups, uint32_t width, uint32_t block_rows,
                    unsigned threads) {
  const uint64_t item = dtype == FLOAT32 ? 4 : 2, columns = groups * width, halves = !block_rows;
  nv_packed of = {.rows = rows, .groups = groups, .group_size = width, .dtype = dtype,
                  .block_rows = block_rows};
  of.steps_stride = columns / (1 + halves) + chance(5);
  of.groups_stride = groups + chance(3);
  of.out_stride = (halves ? rows : columns) + chance(5);
  const uint64_t out_rows = halves ? columns : rows, out_columns = halves ? rows : columns;
  const uint64_t entries = halves ? 256 * 16 : (rows + block_rows - 1) / block_rows * groups * 256;
  const uint64_t nbytes = (rows - 1) * of.steps_stride + columns / (1 + halves);
  const uint64_t out_nbytes = ((out_rows - 1) * of.out_stride + out_columns) * item;
  const uint64_t exponents_nbytes = (rows - 1) * of.groups_stride + groups;
  memory steps = of_bytes(nbytes, chance(16)), table = of_bytes(entries * item, chance(4) * item);
  memory exponents = of_bytes(exponents_nbytes, chance(16));
  memory out = of_bytes(out_nbytes, chance(4) * item);
  fill(steps, nbytes), fill(table, entries * item), fill(exponents, exponents_nbytes);
  memset(out.at, 0xa5, out_nbytes);
  of.steps = (const uint8_t *)steps.at, of.table = table.at, of.out = out.at;
  if (halves) of.exponents = (const uint8_t *)exponents.at;
  if (nv_packed_run(&of, threads)) abort();
  for (uint64_t row = 0; row < rows; row++)
    for (uint64_t column = 0; column < columns; column++) {
      uint64_t entry, at = row * of.out_stride + column;
      if (halves) {
        const uint8_t both = of.steps[row * of.steps_stride + column / 2];
        entry = of.exponents[row * of.groups_stride + column / 32] * 16u;
        entry += column % 2 ? both >> 4 : both & 15;
        at = column * of.out_stride + row;
      } else {
        entry = (row / block_rows * groups + column / width) * 256;
        entry += of.steps[row * of.steps_stride + column];
      }
      if (memcmp(out.at + at * item, table.at + entry * item, item)) {
        fprintf(stderr, "%s, %lu x %lu in %u x %u: another element at (%lu, %lu)\n", NAMES[dtype],
                (unsigned long)rows, (unsigned long)columns, block_rows, width, (unsigned long)row,
                (unsigned long)column);
        abort();
      }
    }
  for (uint64_t row = 0; row + 1 < out_rows; row++)
    for (uint64_t at = (row * of.out_stride + out_columns) * item; at < (row + 1) * of.out_stride * item;
         at++)
      if ((unsigned char)out.at[at] != 0xa5) {
        fprintf(stderr, "written between rows of a looked up output\n");
        abort();
      }
  free(steps.whole), free(table.whole), free(exponents.whole), free(out.whole);
}

int main(int count, char **arguments) {
  const unsigned rounds = count > 1 ? (unsigned)atoi(arguments[1]) : 1;
  if (count > 2) state += strtoull(arguments[2], NULL, 10);
  /* Of no kind of CPU's width, of AVX2's, of AVX-512's, of tiles, and too large for these. */
  static const uint32_t SIZES[] = {2, 6, 8, 16, 24, 32, 64, 128, 512, 576};
  static const uint64_t INPUTS[] = {0, 1, 2, 3, 5, 8, 13, 16, 17, 33, 65};
  unsigned done = 0, tiled = 0;
  for (unsigned round = 0; round < rounds; round++)
    for (unsigned size = 0; size < sizeof SIZES / sizeof *SIZES; size++)
      for (int dtype = FLOAT32; dtype <= FLOAT16; dtype++)
        for (uint32_t bits = 4; bits <= 8; bits += 4)
          for (unsigned i = 0; i < sizeof INPUTS / sizeof *INPUTS; i++) {
            const uint64_t groups = 1 + chance(SIZES[size] < 64 ? 9 : 3);
            const uint64_t rows = 1 + chance(INPUTS[i] > 8 ? 40 : 90);
            tiled += trial(dtype, bits, SIZES[size], groups, rows, INPUTS[i], 1) == 2;
            done++;
          }
  /* Large enough to be dealt to threads; more inputs than have sums at a time. */
  for (int dtype = FLOAT32; dtype <= FLOAT16; dtype++)
    for (uint32_t bits = 4; bits <= 8; bits += 4) {
      trial(dtype, bits, 64, 33, 67, 0, 3);
      tiled += trial(dtype, bits, 64, 17, 131, 1, 3) == 2;
      trial(dtype, bits, 64, 9, 77, 9, 5);
      tiled += trial(dtype, bits, 64, 3, 37, 515, 2) == 2;
      done += 4;
    }
  for (int dtype = FLOAT32; dtype <= FLOAT16; dtype++)
    for (unsigned trials = 0; trials < 6 * (rounds + 1); trials++) {
      look_up(dtype, 1 + chance(90), 1 + chance(4), 1 + (uint32_t)chance(70), 1 + (uint32_t)chance(50), 1);
      look_up(dtype, 1 + chance(90), 1 + chance(4), 32, 0, 1);
      done += 2;
    }
  for (int dtype = FLOAT32; dtype <= FLOAT16; dtype++) {
    look_up(dtype, 261, 5, 128, 128, 3);
    look_up(dtype, 261, 17, 32, 0, 3);
    done += 2;
  }
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  if (!threads_begun || sigismember(&blocked, SIGINT)) abort(); /* the caller's mask is as before */
  printf("%u products and widened matrices with packed weights, %u in bfloat16\n", done, tiled);
  return 0;
}
