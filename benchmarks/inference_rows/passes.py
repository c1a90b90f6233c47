"""Rows `pass`, `resident`, `checksums`, `packed`, `blocks`: a pass and what changes it."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from _files import drop_from_cache, huge_pages
from _lines import Line, at_least, at_most, best, compare, gb_per_s
from _measure import Contender, Sample, median
from _session import Session, calling
from peers import fio

from inference_rows._model import PASSES, streaming, weights_file
from nvmeio.cli.measure.worker import Worker


def seconds_per_pass(sample: Sample) -> float:
    return sample.seconds / sample.operations


def cpu_per_pass(sample: Sample) -> float:
    return sample.cpu_seconds / sample.operations


def tokens_per_s(sample: Sample) -> float:
    return sample.operations / sample.seconds


def measure_pass(session: Session) -> list[Line]:
    """Row `pass`."""
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    file = weights_file(directory)
    with session.fresh_worker("streaming") as whole:
        contenders = [
            calling(
                "nvmeio",
                worker,
                "passes",
                before=partial(drop_from_cache, directory),
                directory=str(directory),
                share=8,
                count=PASSES,
            )
        ]
        if whole is not None and session.attempt(
            "in memory", whole, "load_whole", directory=str(directory)
        ):
            contenders.append(calling("in memory", whole, "whole_passes", count=PASSES))
        with huge_pages(max(setting.buffer_bytes for setting in fio.HUGE_PAGES)) as refused:
            settings = [*fio.DEFAULT_BUFFERS, *([] if refused else fio.HUGE_PAGES)]
            if not session.has_fio():
                settings = []
            size = file.stat().st_size >> 20 << 20
            contenders += [
                Contender(s.name, partial(fio.sequential, file, size, False, s)) for s in settings
            ]
            samples = session.measure("forward pass", contenders)
    name, drive = best(samples, [s.name for s in settings], gb_per_s, "fio")
    ours, compute = samples["nvmeio"], samples.get("in memory", [])
    rate = median([gb_per_s(sample) for sample in drive])
    bound: list[Sample] = []
    if rate:
        for sample, whole_sample in zip(ours, compute, strict=False):
            reading = sample.nbytes / sample.operations / rate / 1e9
            computing = seconds_per_pass(whole_sample)
            bound.append(Sample(seconds=max(reading, computing), operations=1))
    lines = [
        compare(
            "pass",
            "forward pass",
            f"max(bytes / {name}, compute)",
            "s",
            seconds_per_pass,
            ours,
            bound,
            at_most(1.05),
            "an eighth of the weights in memory",
        )
    ]
    if ours:
        busy = median([sample.gb_per_s / rate if rate else 0.0 for sample in ours])
        lines[0].note += f"; the drive was busy {busy:.0%} of the time" if busy else ""
    return lines


def measure_resident(session: Session) -> list[Line]:
    """Row `resident`."""
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    samples = session.measure(
        "half of the layers resident",
        [
            calling(
                name,
                worker,
                "passes",
                before=partial(drop_from_cache, directory),
                directory=str(directory),
                share=share,
                count=PASSES,
            )
            for name, share in (("half", -2), ("none", 0))
        ],
    )
    return [
        compare(
            "resident",
            "tokens/s, half of the layers resident",
            "none resident",
            "tokens/s",
            tokens_per_s,
            samples["half"],
            samples["none"],
            at_least(1.8),
            "where the drive is the bound: see `pass`",
        )
    ]


def measure_checksums(session: Session) -> list[Line]:
    """Row `checksums`: passes of a packed model whose bytes are compared, and are not."""
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    packed = session.directory / "packed"
    if not packed.exists() and not session.attempt(
        "streaming", worker, "pack_model", directory=str(directory), packed=str(packed)
    ):
        return []
    with session.fresh_worker("streaming") as other:
        if other is None:
            return []
        samples = session.measure(
            "checksums",
            [
                calling(
                    name,
                    each,
                    "passes",
                    before=partial(drop_from_cache, packed),
                    directory=str(packed),
                    share=8,
                    count=PASSES,
                    checksum=checksum,
                )
                for name, each, checksum in (("with", worker, True), ("without", other, False))
            ],
        )
    return [
        compare(
            "checksums",
            "packed model, checksums compared",
            "checksum=False",
            "s",
            seconds_per_pass,
            samples["with"],
            samples["without"],
            at_most(1.05),
            "an eighth of the weights in memory",
        )
    ]


def measure_packed(session: Session) -> list[Line]:
    """Row `packed`: bfloat16 as it is, and in 8 and 4 bits that are computed with."""
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    lines = []
    with contextlib.ExitStack() as stack:
        workers: dict[str, tuple[Worker, Path]] = {}
        for name, bits in (("bfloat16", None), ("8 bits", 8), ("4 bits", 4)):
            packed = session.directory / f"packed-{bits or 16}"
            options = {"dtype": "bfloat16", "quant_bits": bits}
            where = {"directory": str(directory), "packed": str(packed)}
            own = stack.enter_context(session.fresh_worker("streaming"))
            made = packed.exists() or session.attempt(
                "streaming", worker, "pack_model", **where, **options
            )
            if own is None or not made:
                return []
            workers[name] = own, packed
        for share, note, most in (
            (8, "an eighth of each one's weights in memory", (0.65, 0.45)),
            (-1, "all in memory", (1.0, 1.0)),
        ):
            samples = session.measure(
                f"packed, {note}",
                [
                    calling(
                        name,
                        own,
                        "passes",
                        before=partial(drop_from_cache, packed),
                        directory=str(packed),
                        share=share,
                        count=PASSES,
                    )
                    for name, (own, packed) in workers.items()
                ],
            )
            for name, target in zip(("8 bits", "4 bits"), most, strict=True):
                for what, figure in (("s", seconds_per_pass), ("CPU s", cpu_per_pass)):
                    lines.append(
                        compare(
                            "packed",
                            f"a pass of {name}",
                            "bfloat16",
                            what,
                            figure,
                            samples[name],
                            samples["bfloat16"],
                            at_most(target),
                            note,
                        )
                    )
    return lines


def measure_blocks(session: Session) -> list[Line]:
    """Row `blocks`: eight prompts, in one micro-batch after the other and in lockstep."""
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    samples = session.measure(
        "micro-batches",
        [
            calling(
                name,
                worker,
                "batches",
                directory=str(directory),
                share=8,
                count=8,
                together=together,
            )
            for name, together in (("lockstep", True), ("one by one", False))
        ],
    )
    return [
        compare(
            "blocks",
            "8 micro-batches in lockstep",
            "one by one",
            "tokens/s",
            tokens_per_s,
            samples["lockstep"],
            samples["one by one"],
            None,
            "4 tokens each",
        )
    ]
