"""A trainer that leaves memory while a server generates, as loops of reinforcement learning do.

    python examples/21_park_while_generating.py --dir /mnt/nvme
    python examples/21_park_while_generating.py --dir /mnt/nvme --width 1024 --layers 16

Each round the trainer makes some steps, and a server takes its weights. Then `park` writes weights,
gradients and the optimizer's state to the drive and gives their memory back, while the server
samples. Weights come back first, to score the samples, and the rest at the end of the block, all as
the same objects. The losses are those of a training that was never parked, bit for bit. A process
that is killed while it is parked leaves everything to the next one.
"""

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import _common
import torch
from _common import say, verify

from nvmeio.offload import park, resume_parked

VOCABULARY, CONTEXT, STEPS = 256, 32, 3


class Model(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def trainer(width: int, layers: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(width, layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(model: Model, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> Iterator[float]:
    """Steps over what was sampled."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(samples[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def sampled(server: torch.nn.Module, number: int) -> torch.Tensor:
    """Generate as a server does; the same for the same weights."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
    while tokens.shape[1] < CONTEXT:
        odds = server(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=generator)], 1)
    return tokens


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def killed_while_parked(folder: Path, width: int, layers: int) -> None:
    """Train for a round, park, and be killed."""
    model, optimizer = trainer(width, layers)
    list(train(model, optimizer, sampled(model, 0)))
    with park(model, optimizer, swap_dir=folder):
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, width: int, layers: int, rounds: int) -> None:
    samples = [sampled(Model(width, layers), 0)]
    model, optimizer = trainer(width, layers)
    server = Model(width, layers).eval()
    losses: list[float] = []
    for number in range(rounds):
        losses += train(model, optimizer, samples[-1])
        server.load_state_dict(model.state_dict())
        before = resident_mb()
        with park(model, optimizer, swap_dir=folder) as parked:
            left = before - resident_mb()
            verify(left > 0.8 * parked.freed_bytes / 1e6, "memory is given back")
            samples.append(sampled(server, number + 1))
            parked.restore("parameters", "buffers")  # to score the samples, say
            with torch.no_grad():
                scores = model(samples[-1])
            verify(scores.equal(server(samples[-1])), "the weights are those of the server")
        say(
            f"round {number + 1}",
            f"{left:.0f} MB left memory: {parked.nbytes / 1e6:.0f} MB written in "
            f"{parked.park_s:.2f} s, read in {parked.restore_s:.2f} s",
        )
    never_parked, stepping = trainer(width, layers)
    wanted = [loss for seen in samples[:-1] for loss in train(never_parked, stepping, seen)]
    verify(losses == wanted, "the losses are those of a training that was never parked")

    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=killed_while_parked, args=(folder, width, layers))
    process.start()
    process.join()
    verify(process.exitcode == -signal.SIGKILL, "the process was killed")
    again, stepping = trainer(width, layers)
    resume_parked(again, stepping, swap_dir=folder)
    found = list(train(again, stepping, samples[1]))
    verify(found == wanted[STEPS : 2 * STEPS], "the losses after a kill are the same")
    say("resumed", "a process was killed while it was parked, and another one went on")
    _common.verified(f"{len(losses)} steps, parked {rounds} times, to the bit")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (8)")
    parser.add_argument("--rounds", type=int, default=3, help="two or more (3)")
    options = parser.parse_args()
    with _common.scratch(options.dir, 16 * 13 * options.width**2 * options.layers) as scratch:
        main(scratch, options.width, options.layers, max(2, options.rounds))
