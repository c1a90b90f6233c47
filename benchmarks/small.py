"""Many small pieces at once beside fio: gathers, scatters, coroutines, tensors of all sizes.

    python benchmarks/small.py --dir /mnt/nvme --json result.json
    python benchmarks/small.py --only gather,scatter --repeats 7
    python benchmarks/small.py --quick

All contenders use one file, written whole by this program first, and take turns within one run,
starting with another one each time; figures are medians. fio has the depth of nvmeio's handle, and
its own clock and CPU accounting: the start of its process is in neither. nvmeio's time is that of
the call, sorting and copying included.
"""

from __future__ import annotations

import sys

from _program import Program
from small_rows import ROWS

CONDITIONS = (
    "O_DIRECT on both sides, no fsync within any timing, overwrites hit blocks written before.",
    "Memory: nvmeio's rows and tensors have places of their own, which were touched before. fio at "
    "depth n has n blocks of memory and uses them again and again; a line says where it has more, "
    "or where nvmeio's memory is as small.",
    "CPU time is that of the whole process, user and system, in the timed part of its life.",
)


if __name__ == "__main__":
    sys.exit(Program(__doc__, ROWS, CONDITIONS, 8 << 30, 1 << 28).run(sys.argv[1:]))
