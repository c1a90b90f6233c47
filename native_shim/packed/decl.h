/* Declared for Python: plain declarations, as in pump/decl.h. */

/* Weights of 4 or 8 bits; see packed.c. Strides are in bytes of steps, groups, and elements of `out`. */
typedef struct {
  const uint8_t *steps;
  const float *scales, *minima;
  uint64_t rows, groups; /* of the part that is asked for */
  uint64_t steps_stride, groups_stride, out_stride;
  uint32_t group_size, bits;
  int dtype;             /* of elements and `out`: 0 float32, 1 bfloat16, 2 float16 */
  uint64_t inputs;       /* rows of `input`; 0: widen */
  const float *input;    /* inputs x (groups * group_size) */
  const uint16_t *halves; /* the same in bfloat16, in its place where nv_packed_has_tiles */
  const float *bias;     /* of each row, or NULL */
  /* Of others' formats; see lookup.c. `groups` then are blocks of `group_size` columns. */
  const void *table;        /* like `out`: for each block [256], or [256 exponents][16]; or NULL */
  uint32_t block_rows;
  const uint8_t *exponents; /* of groups of MXFP4, whose `out` is transposed; or NULL */
  void *out;             /* rows x elements; of a product, inputs x rows */
  uint16_t *arranged;    /* its own: `halves` as tiles of inputs, and room for what each thread widens */
  void *room;
} nv_packed;
/* -ENOMEM, or 0. */
int nv_packed_run(const nv_packed *, uint32_t threads);
int nv_packed_has_tiles(const nv_packed *); /* a product takes `halves`; packed_tiles.c */
