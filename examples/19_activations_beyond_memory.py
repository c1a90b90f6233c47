"""Training whose activations do not fit: written to the drive by forward, read back by backward.

    python examples/19_activations_beyond_memory.py --dir /mnt/nvme
    python examples/19_activations_beyond_memory.py --dir /mnt/nvme --tokens 4096 --layers 32

Any model, unchanged: what autograd saves goes through a window of memory. Gradients are those of
training in memory, bit for bit, and nothing is computed twice.
"""

import time
from pathlib import Path

import _common
import torch
from _common import say, verify
from torch import nn

from nvmeio.offload import SwappedActivations


def make(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, batch_first=True)
            for _ in range(layers)
        )
    )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def main(folder: Path, width: int, layers: int, tokens: int) -> None:
    model = make(width, layers)
    batch = torch.randn(2, tokens // 2, width)

    def forward() -> torch.Tensor:
        torch.manual_seed(1)  # the same dropout
        return model(batch).square().mean()

    began = time.perf_counter()
    forward().backward()
    say("in memory", f"{time.perf_counter() - began:.3f} s forward and backward")
    expected = gradients(model)

    window = 12 * batch.nbytes
    with SwappedActivations(swap_dir=folder, resident_bytes=window, min_bytes="64K") as activations:
        for step in range(3):
            began = time.perf_counter()
            with activations.saving():
                loss = forward()
            there = activations.on_drive_bytes
            loss.backward()
            seconds = time.perf_counter() - began
            verify(
                all(map(torch.equal, gradients(model), expected)),
                f"step {step}: the gradients are those in memory",
            )
        say("on the drive", f"{seconds:.3f} s, {there / 1e6:.0f} MB there after forward")
        say("window", f"{window / 1e6:.0f} MB of memory, half of it for reading ahead")
        verify(there > window, "most of what autograd saved was on the drive")
        say("room", f"{activations.file_bytes / 1e6:.0f} MB of the drive, the same in each step")
    verify(not list(folder.iterdir()), "nothing is left in the directory")
    _common.verified(f"three steps over {layers} layers, to the bit")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--width", type=int, default=256, help="of the model (256)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (8)")
    parser.add_argument("--tokens", type=int, default=512, help="of the batch (512)")
    options = parser.parse_args()
    needed = 40 * 4 * options.width * options.tokens * options.layers + (256 << 20)
    with _common.scratch(options.dir, needed) as scratch:
        main(scratch, options.width, options.layers, options.tokens)
