"""Checkpoints: nvmeio against torch, DCP, safetensors and its loaders, fio and DeepSpeed.

    python benchmarks/checkpoint.py --dir /mnt/nvme --json result.json
    python benchmarks/checkpoint.py --only save,steady --repeats 7
    python benchmarks/checkpoint.py --quick

The state is a GPT-2's from a transformers config, with the moments of Adam. One process holds it,
and all contenders save the same tensors in turn, starting with another one each time; figures are
medians. A peer that is missing is skipped by name, with the command that installs it.
"""

from __future__ import annotations

import sys

from _program import Program
from checkpoint_rows import ROWS

CONDITIONS = (
    "The same durability on both sides: a save ends with fsync. New files are new: the old one is "
    "removed and the removal settled before each save.",
    "Loads are cold: the file is dropped from the page cache before each one (what the host or the "
    "drive caches is warm), and every page of what was loaded lazily is touched.",
    "fio at depth n goes over n blocks of memory again and again; a checkpoint lies in memory of "
    "its size, which may be slower (benchmarks/windows.py measures how much): fio is the limit of "
    "the drive here, not the same work.",
)


if __name__ == "__main__":
    sys.exit(Program(__doc__, ROWS, CONDITIONS, 2 << 30, 1 << 28).run(sys.argv[1:]))
