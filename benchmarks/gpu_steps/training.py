"""Steps of gpu_check.py that compute: training beyond the device's memory, streamed weights.

Each also runs on the CPU, so that a machine without a GPU can tell whether the steps work.
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer

ROWS = 64
PARTS = 8
PASSES = 3


class Part(nn.Module):
    """Two matrices and a norm, beside what goes past them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(nbytes: int, device: str = "cpu") -> tuple[nn.Sequential, int]:
    """Parts whose parameters take so many bytes together, about; and their width."""
    width = max(32, int((nbytes / PARTS / 32) ** 0.5) // 32 * 32)
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*(Part(width) for _ in range(PARTS))), width


def bytes_of(made: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in made.parameters())


def half_swapped(made: nn.Module, folder: str, device: str) -> SwappedModule:
    """The model with half of it in memory, and on CUDA three parts of it on the device."""
    whole = bytes_of(made)
    there: dict[str, Any] = {"device": "cuda", "device_bytes": 3 * whole // PARTS + (1 << 20)}
    return SwappedModule(
        made,
        swap_dir=folder,
        resident_bytes=whole // 2 + (1 << 20),
        stage_bytes=whole // PARTS + 4096,
        **(there if device == "cuda" else {}),
    )


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(made: Any, optimizer: Any, width: int, device: str) -> dict[str, Any]:
    """Two micro-batches a step, clipped; losses, and seconds of the last pass and step."""
    losses: list[float] = []
    told: dict[str, Any] = {"losses": losses}
    for step in range(PASSES):
        synchronize(device)
        began = time.perf_counter()
        for number in range(2):
            generator = torch.Generator().manual_seed(10 * step + number)
            x = torch.randn(ROWS, width, generator=generator).to(device)
            loss = made(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        synchronize(device)
        told["passes_s"] = round(time.perf_counter() - began, 4)
        began = time.perf_counter()
        clip(made, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        told["step_s"] = round(time.perf_counter() - began, 4)
    return told


def compared(losses: list[float], wanted: list[float], most: float) -> dict[str, Any]:
    """That losses are those wanted, within `most` of each; NaN, which is in new memory, is not."""
    pairs = list(zip(losses, wanted, strict=True))
    if not all(abs(mine - other) <= most * abs(other) for mine, other in pairs):
        raise SystemExit(f"WRONG: losses differ by more than {most:.0e} of theirs: {pairs}")
    return {"checked": len(pairs), "losses_equal": losses == wanted}


def clip(made: Any, optimizer: Any) -> None:
    if isinstance(optimizer, SwappedOptimizer):
        optimizer.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(list(made.parameters()), 1.0)


@contextlib.contextmanager
def in_memory(made: nn.Module, folder: Path, options: dict[str, Any]) -> Iterator[Any]:
    """What a step is compared with: the CPU's, in files; where the device steps, torch's own."""
    if "device" in options:
        yield torch.optim.AdamW(made.parameters(), lr=options["lr"])
        return
    with SwappedOptimizer(
        torch.optim.AdamW, made.parameters(), swap_dir=folder, **options
    ) as optimizer:
        yield optimizer


def training(
    directory: Path,
    size: int,
    device: str,
    gradients: str,
    stepped_there: bool = False,
    handle: nvmeio.AioHandle | None = None,
) -> dict[str, Any]:
    """Parameters, gradients and state on the drive: is it the training in memory, and how fast?

    With a `GdsHandle` also which way parameters went, and how many bytes of whole blocks went into
    whole pages without host memory.
    """
    with tempfile.TemporaryDirectory(dir=directory) as made_in:
        folder = Path(made_in)
        for name in ("theirs", "ours"):
            (folder / name).mkdir()
        wanted, width = model(size // 32)
        wanted.to(device)
        options: dict[str, Any] = {"lr": 1e-3, "gradients": gradients}
        options["subgroup_bytes"] = max(1 << 20, min(64 << 20, size // 64))
        if stepped_there:
            options["device"] = device
        with in_memory(wanted, folder / "theirs", options) as optimizer:
            theirs = train(wanted, optimizer, width, device)
        ours, _ = model(size // 32)
        whole = bytes_of(ours)
        there: dict[str, Any] = {"device": "cuda", "device_bytes": 3 * whole // PARTS + (1 << 20)}
        with (
            SwappedModule(
                ours,
                swap_dir=folder / "ours",
                resident_bytes=whole // 2 + (1 << 20),
                stage_bytes=whole // PARTS + 4096,
                handle=handle,
                **(there if device == "cuda" else {}),
            ) as module,
            SwappedOptimizer(
                torch.optim.AdamW, module.parameters(), swap_dir=folder / "ours", **options
            ) as optimizer,
        ):
            made = handle.stats.direct_bytes if handle is not None else 0
            found = train(module, optimizer, width, device)
            went: dict[str, Any] = {}
            if isinstance(handle, nvmeio.GdsHandle):
                went = {"mode": handle.mode, "straight_to_the_device": module.direct}
                went["direct_mb"] = round((handle.stats.direct_bytes - made) / 1e6, 1)
            saved = module.state_dict()
            same = sum(
                torch.equal(saved[name].cpu(), tensor.cpu())
                for name, tensor in wanted.state_dict().items()
            )
            read = module.bytes_read
            buffers = optimizer.plan.device_bytes
        return {
            **compared(found["losses"], theirs["losses"], 1e-3),
            "weights_equal": f"{same} of {len(saved)}",
            "parameter_mb": round(whole / 1e6, 1),
            "read_mb": round(read / 1e6, 1),
            "device_buffer_mb": round(buffers / 1e6, 1),
            "passes_s": found["passes_s"],
            "passes_in_memory_s": theirs["passes_s"],
            "step_s": found["step_s"],
            "step_with_parameters_in_memory_s": theirs["step_s"],
            **went,
        }


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    synchronize(device)
    began = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - began, result


def streaming(directory: Path, size: int, device: str) -> dict[str, Any]:
    """Weights read while they are computed with, a third of them in memory."""
    with tempfile.TemporaryDirectory(dir=directory) as made_in, torch.no_grad():
        file = Path(made_in) / "model.safetensors"
        made, width = model(size // 4)
        whole = bytes_of(made)
        nvmeio.save_safetensors(made.state_dict(), file)
        x = torch.randn(ROWS, width).to(device)
        wanted = made.to(device)(x)
        del made
        empty, _ = model(size // 4, "meta")
        streamed = nvmeio.stream_model(
            empty, file, device=device, resident_bytes=whole // PARTS * 5 + (1 << 20)
        )
        try:
            if not torch.equal(streamed(x), wanted):
                raise SystemExit("WRONG: the streamed model gives other values")
            seconds, found = timed(lambda: streamed(x), device)
            if not torch.equal(found, wanted):
                raise SystemExit("WRONG: the second pass gives other values")
            read = streamed.weight_stream.stats.bytes_read
        finally:
            streamed.weight_stream.close()
        return {
            "checked": 2,
            "weights_mb": round(whole / 1e6, 1),
            "read_mb": round(read / 1e6, 1),
            "pass_s": round(seconds, 4),
        }


class Adapted(nn.Module):
    """A linear layer with two matrices of low rank beside it."""

    def __init__(self, base: nn.Linear, device: str, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=device)
        generator = torch.Generator().manual_seed(base.in_features)
        for each in (self.down, self.up):
            values = torch.randn(each.weight.shape, generator=generator) / base.in_features
            each.weight.data.copy_(values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(made: Any, width: int, device: str) -> dict[str, Any]:
    """Adapters trained beside a frozen base; losses, and seconds of the last step."""
    made.requires_grad_(False)
    for part in made:
        part.up, part.down = Adapted(part.up, device), Adapted(part.down, device)
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-3)
    losses, seconds = [], 0.0

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = made(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for number in range(PASSES):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(ROWS, width, generator=generator).to(device)
        seconds, loss = timed(lambda x=x: step(x), device)
        losses.append(loss.item())
    return {"losses": losses, "step_s": round(seconds, 4)}


def adapters(directory: Path, size: int, device: str) -> dict[str, Any]:
    """Adapters over a base that is read while it is computed with, half of it in memory."""
    with tempfile.TemporaryDirectory(dir=directory) as made_in:
        file = Path(made_in) / "model.safetensors"
        made, width = model(size // 4)
        whole = bytes_of(made)
        nvmeio.save_safetensors(made.state_dict(), file)
        wanted = adapt(made.to(device), width, device)
        del made
        empty, _ = model(size // 4, "meta")
        streamed = nvmeio.stream_model(
            empty,
            file,
            trainable=True,
            device=device,
            resident_bytes=whole // PARTS * 5 + (1 << 20),
        )
        try:
            found = adapt(streamed, width, device)
            read = streamed.weight_stream.stats.bytes_read
        finally:
            streamed.weight_stream.close()
        pairs = list(zip(found["losses"], wanted["losses"], strict=True))
        if any(mine != theirs for mine, theirs in pairs):
            raise SystemExit(f"WRONG: losses differ from those in memory: {pairs}")
        return {
            "checked": len(pairs),
            "weights_mb": round(whole / 1e6, 1),
            "read_mb": round(read / 1e6, 1),
            "step_s": found["step_s"],
            "step_in_memory_s": wanted["step_s"],
        }


@contextlib.contextmanager
def one_rank(folder: Path, device: str) -> Iterator[Any]:
    """A mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    is_real = device == "cuda" and torch.version.cuda
    dist.init_process_group(
        "nccl" if is_real and dist.is_nccl_available() else "gloo",
        store=dist.FileStore(str(folder / "store"), 1),
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        yield init_device_mesh(device, (1,))
    finally:
        dist.destroy_process_group()


def fsdp(directory: Path, size: int, device: str) -> dict[str, Any]:
    """Shards of FSDP2 on the drive, which the device gathers, beside FSDP2's own in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def sharded(mesh: Any) -> tuple[Any, int]:
        made, width = model(size // 32)
        options = {"mesh": mesh, "offload_policy": CPUOffloadPolicy()}
        for part in made:
            fully_shard(part, **options)
        return fully_shard(made, **options), width

    with (
        tempfile.TemporaryDirectory(dir=directory) as made_in,
        one_rank(Path(made_in), device) as mesh,
    ):
        theirs, width = sharded(mesh)
        whole = bytes_of(theirs)
        wanted = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3), width, device)
        del theirs
        ours, _ = sharded(mesh)
        with (
            SwappedModule(ours, swap_dir=made_in, resident_bytes=whole // 2 + (1 << 20)) as module,
            SwappedOptimizer(
                torch.optim.AdamW, module.parameters(), swap_dir=made_in, lr=1e-3
            ) as optimizer,
        ):
            found = train(module, optimizer, width, device)
            read, pinned = module.bytes_read, module.pinned
        return {
            **compared(found["losses"], wanted["losses"], 1e-5),
            "window_is_page_locked": pinned,
            "parameter_mb": round(whole / 1e6, 1),
            "read_mb": round(read / 1e6, 1),
            "passes_s": found["passes_s"],
            "passes_in_memory_s": wanted["passes_s"],
        }
