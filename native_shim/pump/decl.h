/* What Python sees of the shim. Read twice: by the C compiler through internal.h, and by cffi as
 * its cdef, so plain declarations only. Who may call what, and what is kept alive how long, is
 * told in request.c. Errors are returned as -errno; sizes and offsets are bytes. */

/* The kernel's AIO calls, through libaio or directly. */
typedef struct nv_kaio nv_kaio;
nv_kaio *nv_kaio_open(const char *libaio_path); /* NULL: the system calls themselves */
const char *nv_kaio_error(void); /* why the last nv_kaio_open of this thread gave NULL */
const char *nv_kaio_path(nv_kaio *);            /* file that libaio was loaded from, or "" */

/* An engine: lanes, each with an AIO context, and the requests given to them. */
typedef struct nv_engine nv_engine;
typedef struct nv_cq nv_cq;
typedef struct nv_request nv_request;

typedef struct {
  uint64_t block_size;
  uint32_t queue_depth;
  uint32_t lanes;
  uint32_t bounce_blocks; /* at most so many bounce blocks a lane, <= queue_depth */
  int single_submit;
  int overlap_events;
} nv_options;

typedef struct {
  uint64_t bytes_read;
  uint64_t bytes_written;
  uint64_t operations;
  uint64_t direct_bytes;
  uint64_t bounced_bytes;
  uint64_t buffered_bytes;
  uint64_t errors;
  uint64_t cancelled;
  uint64_t in_flight;
  uint64_t rows;
  uint64_t row_blocks;
  uint64_t row_bytes_saved;
} nv_counters;

typedef struct {
  int32_t error;     /* errno, 0, or ECANCELED */
  int32_t preallocated;
  uint64_t transferred;
  uint64_t direct_bytes;
  uint64_t bounced_bytes;
  uint64_t buffered_bytes;
} nv_result;

nv_engine *nv_engine_new(nv_kaio *, const nv_options *, int *error);
int nv_lane_run(nv_engine *, uint32_t lane); /* parks the calling thread until nv_engine_stop */
void nv_engine_stop(nv_engine *);
void nv_engine_close(nv_engine *); /* after the lanes have returned */
void nv_engine_free(nv_engine *);
void nv_engine_counters(nv_engine *, nv_counters *);

nv_cq *nv_cq_new(nv_engine *);
int nv_cq_fd(nv_cq *);
int nv_cq_reap(nv_cq *, uint64_t *tokens, int max);
int nv_cq_peek(nv_cq *, uint64_t *tokens, int max); /* leaves them there */
int nv_cq_peek_ends(nv_cq *, int64_t *ends, int max); /* of each its token, and what nv_moved says */
void nv_cq_acknowledge(nv_cq *, const uint64_t *tokens, int n);
void nv_cq_wake(nv_cq *);
void nv_cq_close(nv_cq *); /* nothing arrives any more; still safe to reap and wake */
void nv_cq_free(nv_cq *);

/* opcode: 0 read, 1 write, 2 fsync, 3 fdatasync. foreign: memory that may be read-only or not there,
 * which only the kernel may touch. Nothing happens before nv_start. */
nv_request *nv_prepare(nv_engine *, nv_cq *, uint64_t token, int opcode, int direct_fd,
                       int buffered_fd, uint64_t address, uint64_t nbytes, uint64_t file_offset,
                       uint64_t span_start, uint64_t span_end, uint32_t offset_alignment,
                       uint32_t memory_alignment, int bounce, int preallocate, int foreign);
/* A gather (opcode 0) or scatter (1): `count` rows of `row_bytes`, at the int64_t that `offsets` points at,
 * which are read until the request is done. */
nv_request *nv_prepare_rows(nv_engine *, nv_cq *, uint64_t token, int opcode, int direct_fd,
                            int buffered_fd, uint64_t address, uint64_t count, uint64_t row_bytes,
                            uint64_t offsets, uint32_t offset_alignment, uint32_t memory_alignment,
                            int foreign);
/* Many transfers as one request: as nv_prepare takes them. */
typedef struct {
  int opcode, direct_fd, buffered_fd;
  uint64_t address, nbytes, file_offset, span_start, span_end;
  uint32_t offset_alignment, memory_alignment;
  int bounce, preallocate, foreign;
} nv_transfer;
nv_request *nv_prepare_batch(nv_engine *, nv_cq *, uint64_t token, const nv_transfer *,
                             uint64_t count);
const nv_result *nv_batch_result(nv_request *, uint64_t member); /* of one of them, once all are done */
/* Where short pieces go: of a file, what is the same for all of them. */
typedef struct {
  nv_engine *engine;
  int direct_fd, buffered_fd; /* one of them is -1 */
  uint32_t offset_alignment, memory_alignment;
  int opcode;
} nv_place;
/* A transfer of one block at most, which begins with the hold of its memory (nv_can_hold): that ends when the
 * kernel is done with it, but where it refused (EINVAL). What Python owns is filled, so that no
 * interrupt finds a request that is nobody's. */
typedef struct {
  nv_request *request;
} nv_short;
int nv_short_prepare(nv_short *, const nv_place *, nv_cq *, uint64_t token,
                     uint64_t flag); /* 1: held, 0: not; or -ENOMEM */
void nv_short_start(nv_short *, const nv_place *, uint64_t address, uint64_t nbytes,
                    uint64_t file_offset, int foreign);
int64_t nv_short_moved(nv_short *);
void nv_short_let_go(nv_short *); /* of the memory: after a refusal, or where it was not started */
void nv_short_end(nv_short *);
void nv_start(nv_request *);
int nv_is_started(nv_request *);
void nv_cancel(nv_request *);
int nv_is_done(nv_request *);
int nv_wait(nv_request *, double timeout_s);
void nv_move(nv_request *, nv_cq *);
int64_t nv_moved(nv_request *); /* once done: bytes, or -errno */
const nv_result *nv_request_result(nv_request *);
typedef struct nv_rows nv_rows;
nv_rows *nv_request_rows(nv_request *);
void nv_request_free(nv_request *);

/* The rows of a gather or scatter: what rows.c does for lanes, for an engine in Python. */
typedef struct {
  uint64_t offset;
  uint64_t nbytes;
  uint64_t address; /* the caller's memory, or 0: rows lie in a block of the engine's */
  uint64_t first;   /* the rows in it, as they are sorted */
  uint64_t count;
} nv_block;
typedef struct {
  int32_t error;       /* errno, or 0 */
  uint64_t failed_row; /* the first that is not whole because of it; the number of rows: none */
  uint64_t failed_offset;
  uint64_t whole;
  uint64_t blocks;
  uint64_t saved_bytes; /* not read again for rows that share units of the file */
} nv_rows_result;

nv_rows *nv_rows_new(int opcode, uint64_t address, uint64_t count, uint64_t row_bytes,
                     uint64_t offsets, uint64_t block_size, uint32_t offset_alignment,
                     uint32_t memory_alignment, int direct, int foreign, uint32_t shares);
void nv_rows_free(nv_rows *);
void nv_rows_stop(nv_rows *);
int nv_rows_plan(nv_rows *); /* 0 or -errno */
int nv_rows_preallocate(nv_rows *, int fd);
int nv_rows_next(nv_rows *, uint32_t share, nv_block *);
int nv_rows_more(nv_rows *, uint32_t share);
uint64_t nv_rows_wanted(nv_rows *, const nv_block *);
int nv_rows_collect(nv_rows *, const nv_block *, char *into); /* 0 or -errno */
uint64_t nv_rows_landed(nv_rows *, uint32_t share, const nv_block *, char *memory, uint64_t done,
                        int error);
int nv_rows_has_edges(nv_rows *);
uint64_t nv_rows_write_edges(nv_rows *, int fd);
const nv_rows_result *nv_rows_conclude(nv_rows *, int error);
const nv_rows_result *nv_rows_outcome(const nv_rows *);
void nv_rows_overlap(nv_rows *, uint64_t *one, uint64_t *other);
void nv_rows_mask(nv_rows *, uint8_t *whole);

/* A byte that is 0 while it is held, and 1 again afterwards. One that was 0 before is not held. */
typedef struct nv_held nv_held;
typedef struct {
  nv_held *held; /* NULL: nothing */
} nv_hold;
int nv_can_hold(uint64_t address);
void nv_hold_flag(nv_hold *, uint64_t address);
void nv_unhold(nv_hold *);
typedef struct {
  uint64_t count;
  nv_hold each[];
} nv_holds;
uint64_t nv_hold_flags(nv_holds *, const uint64_t *addresses); /* how many of them are held */
void nv_unhold_all(nv_holds *);

/* Descriptors of one file, or -1. */
typedef struct {
  int direct;
  int buffered;
  int lost; /* -errno of closing them, or 0 */
} nv_fds;
int nv_fds_open(nv_fds *, int direct, const char *path, int flags); /* the descriptor, or -errno */
int nv_fds_duplicate(nv_fds *, int fd);
int nv_fds_close(nv_fds *); /* whatever is open; -errno of this or an earlier call, or 0 */

/* A small file in place of another, whole and durable; replace.c. */
enum {
  NV_REPLACE_OPEN,
  NV_REPLACE_TAKE,       /* somebody else has the temporary file */
  NV_REPLACE_ATTRIBUTES, /* the old one has more than a mode to carry over */
  NV_REPLACE_WRITE,
  NV_REPLACE_SYNC,
  NV_REPLACE_RENAME,
  NV_REPLACE_NAME, /* the file is in its place */
};
typedef struct {
  const char *address;
  uint64_t nbytes;
} nv_bytes;
typedef struct {
  const char *temporary, *target, *directory;
  const nv_bytes *parts;
  uint32_t count;
  int durable, sent; /* sent: a journal keeps the order of bytes and names */
  int step;          /* the last that was begun */
} nv_replacement;
int nv_replace(nv_replacement *); /* 0 or -errno; nothing is left behind but after NV_REPLACE_NAME */

/* Protected memory: the protection library registers here what copies it aside. nv_give_up is called
 * before the kernel writes to memory, and does nothing until a function is registered. */
typedef void (*nv_give_up_function)(uint64_t address, uint64_t nbytes);
void nv_on_give_up(nv_give_up_function);
void nv_give_up(uint64_t address, uint64_t nbytes);

/* Copies between memory of ours and memory that may not be there; 0 or -EFAULT. */
int nv_copy_foreign(char *ours, char *theirs, uint64_t nbytes, int into);

/* What statx(2) tells about an open file. */
enum {
  NV_MODE,
  NV_BLOCK_SIZE,
  NV_SIZE,
  NV_DEVICE,
  NV_INODE,
  NV_HAS_DIO,           /* the kernel knows; else the two below say nothing */
  NV_MEMORY_ALIGNMENT,  /* 0: this file takes no direct I/O */
  NV_OFFSET_ALIGNMENT,
  NV_FACTS,
};
int nv_file_facts(int fd, uint64_t facts[]); /* NV_FACTS of them */
