"""Training with state on disk: nvmeio against memory, fio and DeepSpeed's ZeRO-3.

    python benchmarks/offload.py --dir /mnt/nvme --json result.json
    python benchmarks/offload.py --only step,deepspeed --repeats 7
    python benchmarks/offload.py --quick

`--size` is that of the weights and moments of Adam in fp32, 12 bytes a parameter; twice that is on
the disk. All contenders take turns within one run, starting with another one each time.
"""

from __future__ import annotations

import sys

from _program import Program
from offload_rows import ROWS

CONDITIONS = (
    "A step is timed without fsync on both sides: nvmeio's runs beside the next forward pass, and "
    "is waited for before the clock starts.",
    "Up to three subgroups of a step are read before it is asked for, beside the forward pass, "
    "which is not timed; the bytes of the step are counted with them.",
    "fio reads and writes at the same time, as many bytes as a step does, over files written "
    "before, on huge pages where they can be had; its time is that of the slower job. It goes over "
    "32 or 128 MiB of memory for each direction again and again (see benchmarks/windows.py).",
)


if __name__ == "__main__":
    sys.exit(Program(__doc__, ROWS, CONDITIONS, 3 << 30, 3 << 27).run(sys.argv[1:]))
