"""nvmeio against its peers, as one table: what was promised, what was measured here.

    python benchmarks/compare_peers.py --dir /mnt/nvme --json result.json
    python benchmarks/compare_peers.py --only sequential,random --repeats 7
    python benchmarks/compare_peers.py --quick

Peers run in processes of their own and take turns within one run, starting with another one each
time; figures are medians. A peer that is missing is skipped by name, with the command that
installs it. Reads and writes are O_DIRECT except caio's, whose file is dropped from the page
cache before each run; nothing else is dropped, and nobody calls fsync within the timing. As root,
the run reserves some huge pages for fio and gives them back.
"""

from __future__ import annotations

import sys

from _program import Program
from rows import ROWS

CONDITIONS = (
    "O_DIRECT reads and writes: the page cache has no part in them, nothing is dropped beforehand "
    "(caio reads through the page cache, cold), and what the host or the drive caches is warm.",
    "No fsync within any timing; overwrites hit blocks written before; every file was written "
    "whole by this program first, and all contenders use the same one.",
    "Memory: nvmeio and DeepSpeed move each byte to a place of its own. fio at depth n goes over n "
    "blocks of memory again and again, which may be faster (benchmarks/windows.py measures how "
    "much); where it has as many blocks as the file, the line says that the work is the same.",
)


if __name__ == "__main__":
    sys.exit(Program(__doc__, ROWS, CONDITIONS).run(sys.argv[1:]))
