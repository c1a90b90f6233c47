/* Declared for Python and for the other libraries: plain declarations, as in pump/decl.h. */

/* Copies memory and continues the CRC-32 `crc` with the copied bytes. It is fast if nv_can_copy_crc32,
 * and a bit at a time otherwise. `to` equal to `from` stores nothing. */
uint32_t nv_copy_crc32(uint64_t to, uint64_t from, uint64_t nbytes, uint32_t crc);
int nv_can_copy_crc32(void);

int nv_is_on_huge_pages(uint64_t address, uint64_t nbytes); /* as the kernel says, since Linux 6.7 */
