"""Train a GPT of 1 B parameters, with 16 GB of state, in 4 GB of memory.

    python examples/13_train_beyond_memory.py --dir /mnt/nvme
    python examples/13_train_beyond_memory.py --parameters 50M --memory 400M --steps 5

Parameters, gradients and the state of AdamW are on the drive; what is in memory is a window of
parameters, a few buffers and the activations, which are checkpointed. The limit is the kernel's
(RLIMIT_DATA): a byte more, and it refuses. The model is made on the drive as well, layer by layer.
"""

import argparse
import ctypes
import resource
import threading
import time
from pathlib import Path

import _common
import torch
from _common import say, verify
from torch.utils.checkpoint import checkpoint

import nvmeio
from nvmeio.offload import SwappedModule, SwappedOptimizer

CONTEXT, VOCABULARY = 128, 8192


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Gpt(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.places = torch.nn.Embedding(CONTEXT, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return torch.nn.functional.cross_entropy(
            self.head(self.norm(x[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten()
        )


def sizes(parameters: int) -> tuple[int, int]:
    """Width and layers of about so many parameters."""
    width = next(w for w in (256, 512, 1024, 2048) if 24 * 12 * w**2 >= parameters or w == 2048)
    return width, max(2, round((parameters - 2 * VOCABULARY * width) / (12 * width**2)))


def status(field: str) -> int:
    """A figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def limit(nbytes: int) -> None:
    """Refuse this process more than so many bytes of memory, beyond what it has mapped so far."""
    # glibc keeps freed memory of up to 32 MB a piece, unless the threshold is set by hand
    # (man 3 mallopt, M_MMAP_THRESHOLD).
    ctypes.CDLL(None).mallopt(-3, 1 << 20)
    threading.stack_size(1 << 20)  # the limit counts whole stacks, of 8 MB otherwise
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + nbytes,) * 2)


def main(folder: Path, options: argparse.Namespace, width: int, layers: int) -> None:
    before = status("RssAnon")
    limit(options.memory)
    torch.manual_seed(0)
    with torch.device("meta"):
        gpt = Gpt(width, layers)
    began = time.perf_counter()
    with (
        nvmeio.AioHandle(queue_depth=32) as handle,
        SwappedModule(
            gpt, swap_dir=folder, resident_bytes=options.memory // 4, handle=handle
        ) as module,
        SwappedOptimizer(
            torch.optim.AdamW,
            module.parameters(),
            swap_dir=folder,
            gradients="disk",
            subgroup_bytes=options.memory // 32,
            handle=handle,
            lr=3e-4,
            fused=True,
        ) as optimizer,
    ):
        plan = optimizer.plan
        state = 16 * plan.parameters
        say("model", f"{plan.parameters / 1e6:.0f} M parameters, {state / 1e9:.2f} GB of state, "
            f"made in {time.perf_counter() - began:.1f} s")  # fmt: skip
        window, buffers = module.resident_bytes / 1e6, plan.memory_bytes / 1e6
        say("memory", f"a window of {window:.0f} MB, buffers of {buffers:.0f} MB")
        say("each step", f"reads {plan.read_bytes / 1e9:.2f} GB and writes "
            f"{plan.written_bytes / 1e9:.2f}")  # fmt: skip
        tokens = torch.randint(0, VOCABULARY, (1, CONTEXT))
        losses = []
        for _ in range(options.steps):
            start = time.perf_counter()
            loss = module(tokens)
            loss.backward()
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            used = status("RssAnon") - before
            say("step", f"loss {losses[-1]:.3f}; forward and backward {middle - start:.1f} s, "
                f"optimizer {time.perf_counter() - middle:.1f} s; "
                f"{used / 1e6:.0f} MB in memory")  # fmt: skip
        say("written", f"{optimizer.bytes_written / 1e9:.2f} GB in all, for the drive's endurance")
    verify(losses[-1] < losses[0], "the loss falls")
    verify(state > 3 * options.memory, "the state is several times the memory")
    _common.verified(f"{options.steps} steps in {options.memory / 1e9:.2f} GB of memory")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--parameters", type=_common.nbytes, default="1G", help="about so many")
    parser.add_argument("--memory", type=_common.nbytes, default="4G", help="the limit")
    parser.add_argument("--steps", type=int, default=3)
    chosen = parser.parse_args()
    wide, deep = sizes(chosen.parameters)
    count = 12 * deep * wide**2 + 2 * VOCABULARY * wide
    with _common.scratch(chosen.dir, 36 * count) as scratch:
        main(scratch, chosen, wide, deep)
