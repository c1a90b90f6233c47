"""Inference with weights on disk: nvmeio against fio, memory, accelerate, DeepSpeed and others.

    python benchmarks/inference.py --dir /mnt/nvme --json result.json
    python benchmarks/inference.py --only pass,resident --repeats 7
    python benchmarks/inference.py --quick

The model is a Llama from a configuration with random weights, in float32. Each side has a process
of its own; they take turns, starting with another one each time; figures are medians. A peer that
is missing is skipped by name, with the command that installs it.

One run of one model, as DeepSpeed's run_model.py has it, with its flags:

    python benchmarks/inference.py --model /models/opt-30b --batch-size 8 --prompt-len 512 \\
        --gen-len 32 --disk-offload --kv-offload --quant-bits 4 --loops 3
    python benchmarks/inference.py --model llama-1b --dummy --dir /mnt/nvme --disk-offload
"""

from __future__ import annotations

import sys

from _program import Program
from inference_rows import ROWS, run_model

CONDITIONS = (
    "A pass is one decoded token of every prompt, one where no number is said. The page cache is "
    "dropped before nvmeio's passes, which leave it empty, and before each pass of accelerate, "
    "which fills it; where a row says warm it holds the whole model for both.",
    "nvmeio holds an eighth of the weights, window included, unless the row says otherwise. "
    "What the host or the drive caches is warm for all.",
    "fio goes over 32 or 128 MiB of memory again and again, as a window of that size would; "
    "benchmarks/windows.py measures what other sizes cost.",
)


if __name__ == "__main__":
    if any(argument.split("=")[0] == "--model" for argument in sys.argv[1:]):
        sys.exit(run_model.main(sys.argv[1:], __doc__))
    sys.exit(Program(__doc__, ROWS, CONDITIONS, 2 << 30, 1 << 28).run(sys.argv[1:]))
