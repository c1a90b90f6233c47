/* Declared for Python: plain declarations, as in pump/decl.h. */

/* Snapshots of memory by write protection; see copy_on_write.c. */
enum {
  NV_SNAPSHOT_ANY_WRITE = 1, /* userfaultfd(2): writes by the kernel are seen too */
  NV_SNAPSHOT_DEVICE = 2,    /* the same, by /dev/userfaultfd */
  NV_SNAPSHOT_USER_MODE = 3, /* system calls that write to protected memory fail with EFAULT */
};
typedef struct nv_snapshot nv_snapshot;
typedef struct {
  uint64_t aside_bytes;   /* copied because somebody wrote */
  uint64_t spilled_bytes; /* of these, into the file */
  uint64_t held_ns;       /* how long writers waited, together */
} nv_snapshot_counters;
int nv_snapshot_open(int which); /* one for the process: what there is, or -errno */
/* Registers memory, by address; of each range 0, or why it cannot be: -EBUSY, another snapshot has it.
 * What lies behind a range may be protected with it, as far as `limits` and the end of its last cell:
 * then no huge page is split. */
nv_snapshot *nv_snapshot_new(uint32_t count, const uint64_t *addresses, const uint64_t *sizes,
                             const uint64_t *limits, int *results, const char *spill_directory);
/* From now on what was registered is as it is now. After an error it has ended. */
int nv_snapshot_protect(nv_snapshot *, uint64_t arena, uint64_t arena_nbytes);
/* Copies bytes of one range, and goes on with their CRC-32 unless it is NULL; each but once, in order.
 * To 0: they are summed only, and are still to be read.
 * 0 or -errno: why a write could not be copied aside; -ESTALE: they were read before; -EBADFD: the
 * memory lost its protection, by something else in this process; -EOWNERDEAD: a handler's thread has
 * ended. */
int nv_snapshot_read(nv_snapshot *, uint64_t address, uint64_t nbytes, uint64_t to, uint32_t *crc);
/* Somebody else has read whole pages where they lie, in order. Those that nobody wrote to before now are
 * as read; the first others are left in [*address, *address + *nbytes), and have to be read. Errors as
 * above. */
int nv_snapshot_settle(nv_snapshot *, uint64_t *address, uint64_t *nbytes);
void nv_snapshot_end(nv_snapshot *); /* nothing is protected any more */
void nv_snapshot_free(nv_snapshot *);
void nv_snapshot_count(nv_snapshot *, nv_snapshot_counters *);
void nv_snapshot_give_up(uint64_t address, uint64_t nbytes); /* the kernel is about to write there */
