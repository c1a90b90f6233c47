"""A small ZeRO-3 training on CPU, as anybody might write it for DeepSpeed: nothing here of nvmeio.

    python _deepspeed_train.py RESULT.json '{"last": 3, "offload": {…}, …}'

Ranks come from RANK and WORLD_SIZE, as torchrun sets them. Rank 0 writes losses, a checksum of the
final parameters and what module async_io was.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

# DeepSpeed swaps tensors of 1 MiB and more: the first two layers' weights, in each of up to two
# ranks; the biases stay in memory. The odd sizes are no multiples of any block. With them,
# DeepSpeed's own op reads gradients wrong, because they lie in memory at odd addresses.
SIZES = {"odd": (515, 1031), "even": (512, 1024)}


class Model(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width), nn.Linear(width, 3)
        )

    def forward(self, batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch), target)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Any]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "cpu_adam": lambda parameters: deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, lr=1e-3),
}


def configuration(options: dict[str, Any], numel: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if offload := options.get("offload"):  # {"device": "nvme", "nvme_path": …}
        pipelined = options.get("pipelined", False)
        zero["offload_optimizer"] = {
            **offload,
            "buffer_count": 12,  # pipelined Adam needs three tensors, a gradient, and all twice
            "pipeline_read": pipelined,
            "pipeline_write": pipelined,
        }
        zero["offload_param"] = {
            **offload,
            "buffer_count": 6,
            "buffer_size": numel + 4096,
        }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, **options.get("aio", {})},
        **options.get("config", {}),
    }


def main() -> None:
    result_path, options = sys.argv[-2], json.loads(sys.argv[-1])  # a launcher puts its own first
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(1)
    torch.set_num_threads(1)
    if not options.get("shm_op"):
        # An op for all-reduce between processes of one host, which takes a minute to compile.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    width, hidden = SIZES[options.get("sizes", "odd")]
    config = configuration(options, width * hidden)
    # Outside of this context DeepSpeed would keep the parameters on disk in half precision.
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Model(width, hidden)
    optimizer = OPTIMIZERS[options.get("optimizer", "adam")](model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    draw = torch.Generator()

    def step(number: int) -> float:
        draw.manual_seed(1000 * number + rank)
        batch = torch.randn(4, width, generator=draw).to(dtype)
        loss = engine(batch, torch.randn(4, 3, generator=draw).to(dtype))
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    first, last = options.get("first", 0), options["last"]
    if options.get("load"):
        # DeepSpeed reads the optimizer's state from disk only if there is one in memory already,
        # and never Adam's step count: as many steps as the checkpoint has, of other data.
        for number in range(first):
            step(900 + number)
        engine.load_checkpoint(options["load"])
    losses, seconds = [], []
    for number in range(first, last):
        started = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - started)
        if options.get("save") and number + 1 == options["save_after"]:
            engine.save_checkpoint(options["save"])
    digest = hashlib.sha256()
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            digest.update(parameter.detach().float().numpy().tobytes())
    op = deepspeed.ops.op_builder.OpBuilder._loaded_ops.get("async_io")
    if rank == 0:
        result = {
            "losses": losses,
            "seconds": seconds,
            "parameters": digest.hexdigest(),
            "op": None if op is None else op.aio_handle.__module__,
        }
        with open(result_path, "w", encoding="utf-8") as file:
            json.dump(result, file)
    engine.destroy()
    torch.distributed.barrier()
    ranks = torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    if ranks > 1 or op is None:
        # On a busy machine gloo's threads now and then abort the process at its very end
        # ("terminate called without an active exception"), with no nvmeio in it either.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
