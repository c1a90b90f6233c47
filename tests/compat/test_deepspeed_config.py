"""One configuration, trained by DeepSpeed's engine and by `offload`: the losses are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import run_python

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

PROGRAM = """
import json, os
os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
import deepspeed, torch
from nvmeio.offload import offload

cases, drive = json.loads(os.environ["CASES"]), os.environ["DRIVE"]
torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
deepspeed.init_distributed(dist_backend="gloo")


def model(dtype):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)]
    return torch.nn.Sequential(*layers).to(dtype)


def loss_of(forward, number, dtype):
    draw = torch.Generator().manual_seed(number)
    batch = torch.randn(4, 64, generator=draw).to(dtype)
    target = torch.randn(4, 8, generator=draw)
    return torch.nn.functional.mse_loss(forward(batch).float(), target)


def theirs(config, dtype, passes):
    made = model(dtype)
    engine, *_ = deepspeed.initialize(
        model=made, model_parameters=made.parameters(), config=json.loads(json.dumps(config))
    )
    losses = []
    for number in range(passes):
        loss = loss_of(engine, number, dtype)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def ours(config, dtype, passes):
    nvme = {"device": "nvme", "nvme_path": drive}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
    made = offload(model(dtype), config={**config, "zero_optimization": zero})
    count, losses = made.batch_sizes.accumulation_steps, []
    for number in range(passes):
        loss = loss_of(made.module, number, dtype)
        (loss / count).backward()
        losses.append(loss.item())
        if (number + 1) % count == 0:
            made.optimizer.step()
            if made.scheduler is not None:
                made.scheduler.step()
            made.optimizer.zero_grad()
    made.close()
    return losses


found = {}
for name, config in cases.items():
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    found[name] = [run(config, dtype, 8) for run in (theirs, ours)]
print("\\nFOUND" + json.dumps(found))
"""
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 6, "warmup_max_lr": 0.01, "warmup_num_steps": 3},
}
# DeepSpeed 0.19.8 clips to 1.0 unless it is told not to.
PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}
CASES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": {**ADAMW, "type": "Adam"}},
    "scheduled": {"optimizer": ADAMW, "scheduler": SCHEDULE},
    "accumulated": {
        "optimizer": ADAMW,
        "scheduler": SCHEDULE,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
    },
    "bf16": {
        "optimizer": ADAMW,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {"stage": 3},
    },
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}},
    "adagrad": {"optimizer": {"type": "Adagrad"}, "zero_optimization": {"stage": 1}},
}
CLIPPED = {"optimizer": ADAMW, "gradient_clipping": 0.5, "zero_optimization": {"stage": 3}}


def test_losses_are_deepspeeds(tmp_path: Path) -> None:
    """Bit for bit, except where DeepSpeed clips: it divides in another order than torch."""
    cases = {name: {**PLAIN, **case} for name, case in {**CASES, "clipped": CLIPPED}.items()}
    ran = run_python(PROGRAM, CASES=json.dumps(cases), DRIVE=str(tmp_path), fresh=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.split("\nFOUND")[1])
    for name, (theirs, ours) in found.items():
        assert len(set(theirs)) > 5
        if name == "clipped":
            assert ours == pytest.approx(theirs, rel=1e-6)
        else:
            assert ours == theirs, name
