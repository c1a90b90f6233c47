"""What nvmeio is for, in three lines: how long a checkpoint holds up training, saved and loaded.

    python examples/00_first_look.py --dir /mnt/nvme --size 1G

A model and its AdamW are saved, durably, by torch.save and an fsync, and by nvmeio; training goes
on while nvmeio writes. Then both files are loaded, cold. Each way is done three times, by turns,
and the medians are shown. All that was loaded is compared with what was saved, bit for bit: the
state as it was when the save was called, whatever the steps behind it changed.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _common
import torch
from _common import console, verify

import nvmeio

ROUNDS = 3


class Training:
    """AdamW over one matrix."""

    def __init__(self, nbytes: int) -> None:
        self.weight = torch.nn.Parameter(torch.randn(max(64, nbytes // (3 * 4 * 1024)), 1024) / 32)
        self.optimizer = torch.optim.AdamW([self.weight], lr=1e-3)
        self.step()

    def step(self) -> None:
        loss = (torch.randn(8, 1024) @ self.weight.T).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight.detach(), "optimizer": self.optimizer.state_dict()}


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def same(loaded: Any, saved: list[torch.Tensor]) -> bool:
    found = tensors(loaded)
    return len(found) == len(saved) and all(map(torch.equal, found, saved))


def with_fsync(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def cold(path: Path) -> Path:
    """The next read of the file comes from the drive."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def timed(times: list[float], work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    times.append(time.perf_counter() - began)
    return result


def main(folder: Path, nbytes: int) -> None:
    training = Training(nbytes)
    plain = folder / "torch.pt"
    held: dict[str, list[float]] = {"torch": [], "nvmeio": []}
    durable: dict[str, list[float]] = {"torch": [], "nvmeio": []}
    loading: dict[str, list[float]] = {"torch": [], "nvmeio": []}
    with nvmeio.Checkpointer(folder / "steps", keep=2) as checkpointer:
        for number in range(ROUNDS):
            state = training.state()
            as_it_was = [tensor.clone() for tensor in tensors(state)]
            timed(held["torch"], lambda state=state: with_fsync(state, plain))
            began = time.perf_counter()
            timed(held["nvmeio"], lambda s=state, n=number: checkpointer.save_sync(s, n))
            training.step()  # writes over what is being saved
            report = checkpointer.wait_sync()
            durable["nvmeio"].append(time.perf_counter() - began)
            path = Path(report.path)
            loaded = timed(loading["torch"], lambda: torch.load(cold(plain)))
            verify(same(loaded, as_it_was), "torch.load reads what torch.save wrote")
            loaded = timed(loading["nvmeio"], lambda path=path: nvmeio.load(cold(path)))
            verify(same(loaded, as_it_was), "nvmeio.load reads the state as it was when saved")
            verify(same(torch.load(path), as_it_was), "torch.load reads what nvmeio wrote")
    durable["torch"] = held["torch"]
    size = sum(tensor.nbytes for tensor in as_it_was) / 1e9
    for what, times in (
        (f"saving {size:.2f} GB holds up training for", held),
        ("  it is durable, a step further on, after", durable),
        ("loading it, cold, takes", loading),
    ):
        ours, theirs = (statistics.median(times[side]) for side in ("nvmeio", "torch"))
        console.print(f"{what:<42} {ours:6.2f} s   torch {theirs:6.2f} s")
    _common.verified(f"{ROUNDS} checkpoints, read by torch and by nvmeio, equal bit for bit")


if __name__ == "__main__":
    parser = _common.arguments(__doc__)
    parser.add_argument("--size", type=_common.nbytes, default="512M", help="of the state (512M)")
    options, _ = parser.parse_known_args()  # `make demo` gives both examples the same
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    with _common.scratch(options.dir, 4 * options.size) as folder:
        main(folder, options.size)
