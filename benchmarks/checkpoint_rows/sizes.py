"""Row `sizes`: files from 1 KB up, in place of torch.save and torch.load, and of safetensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from _lines import Line, at_least, at_most, compare
from _measure import Contender, Sample
from _session import Session, calling

from nvmeio.cli.measure.worker import Worker

NAME = "sizes"
KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
FORMATS = (("nvmeio", "torch", "pt"), ("nvmeio.safetensors", "safetensors", "safetensors"))
QUICK_SIZES = (KB, MB)
FIRST_BYTES = 64 * KB
# One turn of a size: as many calls as this moves, 20 at the most.
TURN_BYTES = 256 * MB
MOST_CALLS = 20


def bytes_needed(_: int, quick: bool) -> int:
    """Two files of the largest, and the one that takes the place of one of them."""
    return 3 * (QUICK_SIZES if quick else SIZES)[-1]


def measure(session: Session) -> list[Line]:
    worker = session.worker(NAME)
    if worker is None:
        return []
    lines: list[Line] = []
    for nbytes in QUICK_SIZES if session.quick else SIZES:
        lines += _of_size(session, worker, nbytes)
    return lines + _first_calls(session, worker)


def _of_size(session: Session, worker: Worker, nbytes: int) -> list[Line]:
    size = f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
    count = max(1, min(MOST_CALLS, TURN_BYTES // nbytes))
    if session.quick:
        count = min(count, 3)
    lines = []
    for ours, theirs, kind in FORMATS:
        files = {side: session.directory / f"size-{side}.{kind}" for side in (ours, theirs)}
        for verb, note in (("save", "durable, over the file before"), ("load", "cold")):
            options = {"nbytes": nbytes, "count": count}
            samples = session.measure(
                f"{verb} {size}, {kind}",
                [
                    calling(side, worker, verb, how=side, path=str(path), **options)
                    for side, path in files.items()
                ],
            )
            peer = f"{theirs}.{verb}" + (" and fsync" if verb == "save" else "")
            work = f"{verb} {size} in 8 tensors" + (", safetensors" if kind != "pt" else "")
            both = samples[ours], samples[theirs]
            lines.append(compare(NAME, work, peer, "calls/s", _per_s, *both, at_least(1.0), note))
        for path in files.values():
            path.unlink(missing_ok=True)
    return lines


def _first_calls(session: Session, worker: Worker) -> list[Line]:
    """Of processes that have imported torch; in ms, so that 80 ms more can be seen."""
    lines = []
    files = {side: session.directory / f"first-{side}.pt" for side in ("nvmeio", "torch")}
    for verb in ("save", "load"):
        samples = session.measure(
            f"first {verb}",
            [_first(worker, f"{side}.{verb}", path) for side, path in files.items()],
        )
        ours, theirs = samples[f"nvmeio.{verb}"], samples[f"torch.{verb}"]
        work, note = f"first {verb} of a process, imports included", "64 KB, torch is imported"
        lines.append(
            compare(NAME, work, f"torch.{verb}", "ms", _ms, ours, theirs, at_most(1.0), note)
        )
    for path in files.values():
        path.unlink(missing_ok=True)
    return lines


def _first(worker: Worker, how: str, path: Path) -> Contender:
    run = partial(worker.call, "first", how=how, path=str(path), nbytes=FIRST_BYTES)
    return Contender(how, run)


def _per_s(sample: Sample) -> float:
    return sample.operations / sample.seconds


def _ms(sample: Sample) -> float:
    return sample.seconds * 1e3
