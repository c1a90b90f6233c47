"""Tools that every measurement here is made with: `nvmeio bench`, and those of benchmarks/.

All that benchmarks/ takes from the command line is in here: `worker` (a process of its own for a
peer, and who runs when), `peers` (fio and DeepSpeed's op), `disk` (directories to
measure in, what the drive and the page cache had to do with it), `machine` (what there is to
measure on, cuFile too).
"""

from typing import Literal

from nvmeio._checks import parse_size as parse_size

Op = Literal["read", "write"]
UNIT = "GB = 10^9 bytes"
