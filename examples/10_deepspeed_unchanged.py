"""DeepSpeed's ZeRO-3 with optimizer and parameters on disk, as it is always written, on nvmeio.

    nvmeio deepspeed -- python examples/10_deepspeed_unchanged.py
    nvmeio deepspeed -- python examples/10_deepspeed_unchanged.py --dir /mnt/nvme
    python examples/10_deepspeed_unchanged.py      # the same on DeepSpeed's own op

There is no nvmeio in this file: DeepSpeed is told to use it from outside. The losses are the same
either way. Needs `pip install deepspeed`; for its own op also a C++ compiler and libaio-dev, and
minutes to compile it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

# One process on the CPU, unless a launcher (torchrun, deepspeed) has said otherwise.
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
if "MASTER_PORT" not in os.environ:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
os.environ.setdefault("DS_ACCELERATOR", "cpu")

try:
    import deepspeed
except ImportError:
    sys.exit("this example needs DeepSpeed: DS_BUILD_OPS=0 pip install deepspeed==0.19.8")

WIDTH, STEPS = 1024, 5


def configuration(directory: str) -> dict[str, Any]:
    on_disk = {"device": "nvme", "nvme_path": directory}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**on_disk, "buffer_count": 6, "buffer_size": 2 * WIDTH**2},
            "offload_optimizer": {
                **on_disk,
                "buffer_count": 12,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
        "zero_allow_untested_optimizer": True,  # torch's Adam; DeepSpeed's own has to be compiled
        "zero_force_ds_cpu_optimizer": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", default=None, help="where the files go, by default here")
    parser.add_argument("--local_rank", type=int, default=0, help="set by DeepSpeed's launcher")
    directory = parser.parse_args().dir or os.getcwd()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled as well
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    # What ends a job (kill, a scheduler) raises SystemExit: the directory is removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="zero3-", dir=directory) as files:
        config = configuration(files)
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4), config=config
        )
        for step in range(STEPS):
            start = time.perf_counter()
            loss = engine(torch.randn(4, WIDTH)).square().mean()
            engine.backward(loss)
            engine.step()
            took = 1000 * (time.perf_counter() - start)
            print(f"step {step}: loss {loss.item():.7f}, {took:.0f} ms")
        op = deepspeed.ops.op_builder.AsyncIOBuilder().load().aio_handle.__module__
        print(f"DeepSpeed's disk I/O was done by {op}")
        engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
