"""Row `small`: thousands of small tensors, saved and loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from _files import drop_from_cache, remove
from _lines import Line, at_least, compare, gb_per_s
from _measure import Contender
from _session import Session

from checkpoint_rows._state import NAME, touch_memory

COUNT, QUICK_COUNT = 10_000, 1_000
MEAN_BYTES = 130 << 10

# Who saves, who loads what was saved, in which file; ours and theirs by turns.
FORMATS = (
    ("pt", "nvmeio.save", "torch", "nvmeio.load", "torch.load"),
    ("st", "nvmeio.save_safetensors", "safetensors", "nvmeio.load_safetensors", "safetensors"),
)


def bytes_needed(_: int, quick: bool) -> int:
    """Four files of it."""
    return 4 * MEAN_BYTES * (QUICK_COUNT if quick else COUNT)


def measure(session: Session) -> list[Line]:
    count = QUICK_COUNT if session.quick else COUNT
    lines: list[Line] = []
    with session.fresh_worker(NAME) as worker:
        if worker is None or not session.attempt(NAME, worker, "prepare_small", count=count):
            return []
        nbytes = count * MEAN_BYTES
        for ending, our_save, their_save, our_load, their_load in FORMATS:
            saves = ((our_save, "ours"), (their_save, "theirs"))
            paths = {how: session.directory / f"small-{side}.{ending}" for how, side in saves}
            saved = session.measure(
                f"small tensors, {ending}",
                [
                    Contender(
                        how,
                        partial(worker.call, "small_save", how=how, path=str(path)),
                        partial(remove, path),
                    )
                    for how, path in paths.items()
                ],
            )
            loads = dict(zip((our_load, their_load), paths.values(), strict=True))
            loaded = session.measure(
                f"small tensors, {ending}, loads",
                [
                    Contender(
                        how,
                        partial(worker.call, "load", how=how, path=str(path)),
                        partial(_make_cold, path, nbytes),
                    )
                    for how, path in loads.items()
                ],
            )
            remove(*paths.values())
            for samples, ours, theirs in (
                (saved, our_save, their_save),
                (loaded, our_load, their_load),
            ):
                lines.append(
                    compare(
                        "small",
                        f"{ours}, {count} tensors of 4 to 256 KiB",
                        theirs,
                        "GB/s",
                        gb_per_s,
                        samples[ours],
                        samples[theirs],
                        at_least(3.0),
                        "durable" if samples is saved else "cold",
                    )
                )
    return lines


def _make_cold(path: Path, nbytes: int) -> None:
    drop_from_cache(path)
    touch_memory(nbytes)
