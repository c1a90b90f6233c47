"""Adapters trained over a base that stays on the drive, read in both directions of each step.

    python examples/18_finetune_beyond_memory.py --dir /mnt/nvme
    python examples/18_finetune_beyond_memory.py --dir /mnt/nvme --width 2048 --layers 24

The base is read from its own safetensors file, and a quarter of it is in memory at any moment.
The adapters, two small matrices beside each large one, lie in memory and belong to a plain AdamW.
Losses are those of the base in memory, bit for bit. With a model of transformers all of it is

    model = nvmeio.stream_model("Llama-3-70B", resident_bytes="24G", trainable=True)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
"""

import time
from pathlib import Path

import _common
import torch
from _common import say, verify
from torch import nn

import nvmeio


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))


class Adapted(nn.Module):
    """A frozen matrix, and one of low rank that is trained beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def make(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(layers)))


def train(base: nn.Sequential, width: int, steps: int) -> tuple[list[float], list[float]]:
    """Losses, and seconds that each step took."""
    torch.manual_seed(1)
    for block in base:
        block.wide, block.back = Adapted(block.wide), Adapted(block.back)
    optimizer = torch.optim.AdamW([p for p in base.parameters() if p.requires_grad], lr=1e-3)
    losses, seconds = [], []
    for step in range(steps):
        began = time.perf_counter()
        x = torch.randn(64, width, generator=torch.manual_seed(step))
        loss = (base(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def main(folder: Path, width: int, layers: int, steps: int) -> None:
    torch.manual_seed(0)
    whole = make(width, layers)
    # Aligned, its tensors are read to where they are computed with, and not copied there.
    nvmeio.save_safetensors(whole.state_dict(), folder / "base.safetensors", align=True)
    nbytes = sum(p.nbytes for p in whole.parameters())
    expected, in_memory = train(whole.requires_grad_(False), width, steps)
    say("in memory", f"{nbytes / 1e6:.0f} MB of base, {min(in_memory):.3f} s a step")

    with torch.device("meta"):
        empty = make(width, layers)
    model = nvmeio.stream_model(
        empty, folder / "base.safetensors", resident_bytes=nbytes // 4, trainable=True
    )
    with model.weight_stream as stream:
        losses, seconds = train(model, width, steps)
        stats = stream.stats
        held = stats.resident_bytes + stats.window_bytes
        say("streamed", f"{held / 1e6:.0f} MB of it in memory, {min(seconds):.3f} s a step")
        per_step = stats.bytes_read / steps
        waited = f"{stats.waited_s / steps:.3f} s of it waited for"
        say("read", f"{per_step / 1e6:.0f} MB a step, forward and backward, {waited}")
        verify(losses == expected, "the losses are those of the base in memory")
        verify(losses[-1] < losses[0], "it learns")
        verify(per_step <= 2.1 * nbytes, "each layer is read twice a step at most")
        saved = sum(value.nbytes for value in model.state_dict().values())
        say("saved", f"{saved / 1e6:.1f} MB: state_dict() has the adapters alone")
        verify(saved < nbytes // 4, "the base is in no state dict")
    _common.verified(f"{steps} steps over a base four times the memory, to the bit")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--width", type=int, default=384, help="of the model (384)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (12)")
    parser.add_argument("--steps", type=int, default=5, help="to train (5)")
    options = parser.parse_args()
    with _common.scratch(options.dir, 9 * 4 * options.width**2 * options.layers) as scratch:
        main(scratch, options.width, options.layers, options.steps)
