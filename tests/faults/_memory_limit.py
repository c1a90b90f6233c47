"""One public call in a process whose memory runs out in the middle of it, and the same call again.

python -m faults._memory_limit SCENARIO FOLDER SEED TRIALS
prints how many of the calls were refused. A trial that hangs ends the process, with all stacks.
"""

from __future__ import annotations

import faulthandler
import random
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import interrupts._inference as inference
import interrupts._offload as offload
import torch
from faults._support import MIB, mapped_bytes
from interrupts import _checkpoints as checkpoints
from torch import nn

import nvmeio

# Tensors are mapped one by one (the test sets MALLOC_MMAP_THRESHOLD_), so each may be refused.
HANG_S = 90.0
WIDTH = 256
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))


def loss_of(made: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    loss: torch.Tensor = made(torch.randn(512, WIDTH, generator=generator)).square().mean()
    return loss


def swapped(made: nn.Module, folder: Path, **options: Any) -> nvmeio.SwappedModule:
    return nvmeio.SwappedModule(
        made,
        swap_dir=folder,
        resident_bytes=3 * (LAYER_BYTES + 8192),
        stage_bytes=LAYER_BYTES,
        **options,
    )


offload.net, offload.loss_of, offload.swapped = net, loss_of, swapped
offload.WIDTH = WIDTH


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.nn.functional.gelu(block(x))
        return x


class Forward(inference.Forward):
    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        self.folder, self.given, self.poke = folder, handle, lambda: None
        torch.manual_seed(0)
        self.whole = Net().eval()  # type: ignore[assignment]
        nvmeio.save_safetensors(self.whole.state_dict(), folder / "net.safetensors")
        self.x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
        with torch.device("meta"):
            empty = Net().eval()
        self.model = nvmeio.stream_model(
            empty, folder / "net.safetensors", resident_bytes=3 * MIB + 65536, window=2
        )


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"w{n}": torch.randn(512, 301, generator=generator) for n in range(8)}
    return {**weights, "step": seed}


checkpoints.state = state


SCENARIOS: dict[str, Any] = {
    "step": offload.StepInMemory,
    "step-on-disk": offload.StepOnDisk,
    "passes": offload.Passes,
    "passes-on-disk": offload.PassesOnDisk,
    "stream": Forward,
    "load": checkpoints.Load,
    "save": checkpoints.Save,
    "checkpointer": checkpoints.CheckpointerSave,
}
# What says plainly that memory is missing; torch's allocators raise RuntimeError.
WORDS = ("memory", "start new thread", "allocate", "bad_alloc", "undone", "mmap")


def says_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (MemoryError, nvmeio.NvmeioError)):
            return True
        if any(word in str(error).lower() for word in WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def limited(work: Any, after_s: float, room: int) -> Any:
    """Run it; so long after it begins nothing can be mapped beyond `room` bytes more."""

    def limit() -> None:
        time.sleep(after_s)
        if not over.is_set():
            set_limit(mapped_bytes() + room)

    over = threading.Event()
    setter = threading.Thread(target=limit)
    setter.start()
    try:
        return work()
    finally:
        over.set()
        setter.join()
        set_limit(resource.RLIM_INFINITY)


def set_limit(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.RLIM_INFINITY))


def main() -> None:
    name, folder, seed, trials = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    chance = random.Random(seed)
    scenario = SCENARIOS[name](folder)
    scenario.prepare()
    began = time.monotonic()
    scenario.check(scenario.work())
    usual_s = time.monotonic() - began
    refused: list[str] = []
    for number in range(trials):
        scenario.prepare()
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        room = chance.choice((0, 64 << 10, MIB // 2, MIB, 2 * MIB))
        try:
            found = limited(scenario.work, chance.choice((0, chance.random() * usual_s)), room)
        except Exception as error:
            assert says_memory(error), (number, repr(error))
            refused.append(type(error).__name__)
            try:
                found = scenario.again()
            except nvmeio.NvmeioError as said:  # a step that could not be undone says so
                assert isinstance(said, nvmeio.ClosedError) or "could not be undone" in str(said)
                refused.append("broken")
                break
        scenario.check(found)
        faulthandler.cancel_dump_traceback_later()
    scenario.close()
    print(len(refused), "refused:", *sorted(set(refused)))


if __name__ == "__main__":
    main()
