"""Row `train`: a step of adapters over a base on the drive, beside the larger of its bounds."""

from __future__ import annotations

from functools import partial

from _files import drop_from_cache
from _lines import Line, at_most, best, compare, gb_per_s
from _measure import Contender, Sample, median
from _session import Session, calling
from peers import fio

from inference_rows._model import streaming, weights_file

STEPS = 2
TOKENS = (8, 32)


def seconds_per_step(sample: Sample) -> float:
    return sample.seconds / sample.operations


def measure(session: Session) -> list[Line]:
    lines = []
    for tokens in TOKENS:
        lines += _measure(session, tokens)
    return lines


def _measure(session: Session, tokens: int) -> list[Line]:
    written = streaming(session)
    if written is None or not session.has_fio():
        return []
    directory = written[1]
    file = weights_file(directory)
    size = file.stat().st_size >> 20 << 20
    settings = fio.DEFAULT_BUFFERS
    with session.fresh_worker("streaming") as worker, session.fresh_worker("streaming") as whole:
        if worker is None or whole is None:
            return []
        step = {"directory": str(directory), "tokens": tokens, "count": STEPS}
        contenders = [
            calling(
                "nvmeio",
                worker,
                "tune",
                before=partial(drop_from_cache, directory),
                share=4,
                **step,
            ),
            calling("in memory", whole, "tune_whole", **step),
            *(Contender(s.name, partial(fio.sequential, file, size, False, s)) for s in settings),
        ]
        samples = session.measure(f"step of {tokens} tokens", contenders)
    name, drive = best(samples, [s.name for s in settings], gb_per_s, "fio")
    rate = median([gb_per_s(sample) for sample in drive])
    if rate is None:
        return []
    ours, compute = samples["nvmeio"], samples["in memory"]
    bound = [
        Sample(
            seconds=max(mine.nbytes / mine.operations / rate / 1e9, seconds_per_step(other)),
            operations=1,
        )
        for mine, other in zip(ours, compute, strict=False)
    ]
    found = compare(
        "train",
        f"step with adapters, {tokens} tokens",
        f"max(bytes / {name}, compute)",
        "s",
        seconds_per_step,
        ours,
        bound,
        at_most(1.1),
        "a quarter of the base in memory, forward and backward read it",
    )
    if ours and compute and ours[-1].extra["loss"] != compute[-1].extra["loss"]:
        raise AssertionError("the losses are not those of the base in memory")
    if compute:
        found.note += f"; in memory {median([seconds_per_step(s) for s in compute]):.2f} s"
    return [found]
