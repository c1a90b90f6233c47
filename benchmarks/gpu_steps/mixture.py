"""A step of gpu_check.py (part B): experts of a mixture, kept on the device, below it, or read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import nvmeio
from gpu_steps.common import Step, check
from gpu_steps.training import timed
from nvmeio.checkpoint.safetensors import save_safetensors

LAYERS, EXPERTS, TOP, PASSES = 4, 16, 2, 48


class Experts(nn.Module):
    """Fused experts; the routing is given as numbers, so that nothing waits for the device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, width) / width**0.5)

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            out = out + nn.functional.silu(x @ self.up[expert]) @ self.down[expert]
        return out


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, routing: list[torch.Tensor]) -> torch.Tensor:
        for layer, experts in zip(self.layers, routing, strict=True):
            x = nn.functional.normalize(x + layer(x, experts))
        return x


def routings() -> list[list[torch.Tensor]]:
    """For each pass and layer, experts: three of four times those of the pass before."""
    generator = torch.Generator().manual_seed(0)
    found: list[list[torch.Tensor]] = []
    for number in range(PASSES):
        fresh = [
            torch.randperm(EXPERTS, generator=generator)[None, : EXPERTS if number == 20 else TOP]
            for _ in range(LAYERS)
        ]
        stays = torch.rand(LAYERS, generator=generator) < 0.75
        last = found[-1] if number not in (0, 21) else fresh
        found.append([old if s else new for s, old, new in zip(stays, last, fresh, strict=True)])
    return found


def mixture(step: Step) -> dict[str, Any]:
    """Experts of a mixture, a quarter of them on the device: values are those in its memory."""
    width = max(64, int((step.size / (LAYERS * EXPERTS * 2 * 4)) ** 0.5) // 64 * 64)
    torch.manual_seed(0)
    whole = Mixture(width).requires_grad_(False)
    path = step.file.parent / "mixture.safetensors"
    save_safetensors(whole.state_dict(), path)
    experts = sum(p.nbytes for p in whole.parameters())
    layer = experts // LAYERS
    with torch.device("meta"):
        empty = Mixture(width)
    on_gpu = step.device == "cuda"
    rows = torch.randn(1, width)
    x = rows.to(step.device) if on_gpu else rows
    passes = routings()
    with torch.no_grad():
        whole = whole.to(step.device) if on_gpu else whole
        wanted = [whole(x, routing).cpu() for routing in passes]
        in_memory_s, _ = timed(partial(whole, x, passes[-1]), step.device)
        del whole
        streamed = nvmeio.stream_model(
            empty,
            path,
            device=step.device,
            resident_bytes=layer + experts // 4 + (1 << 20),
            **({"host_bytes": layer + experts // 2 + (2 << 20)} if on_gpu else {}),
        )
        stream = streamed.weight_stream
        try:
            for number, (routing, expected) in enumerate(zip(passes, wanted, strict=True)):
                found = streamed(x, routing)
                check(torch.equal(found.cpu(), expected), f"the mixture's values in pass {number}")
            seconds, _ = timed(lambda: streamed(x, passes[-1]), step.device)
            stats = stream.stats.experts
        finally:
            stream.close()
            path.unlink()
    return {
        "checked": PASSES,
        "hit_rate": round(stats.hits / (stats.hits + stats.misses), 3),
        "uploads": stats.uploads,
        "bytes_read": stats.bytes_read,
        "pass_s": seconds,
        "in_memory_s": in_memory_s,
    }
