"""Rows `accelerate` and `deepspeed`: the same model, weights on disk on both sides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from _files import bring_into_cache, drop_from_cache
from _lines import Line, at_least, compare
from _session import Session, calling

from inference_rows._model import PASSES, streaming
from inference_rows.passes import tokens_per_s
from nvmeio.cli.measure.worker import Worker

MANY = 64  # prompts whose token takes about as long to compute as the weights to come
ALL_ON_DISK = "every layer on disk, as device_map has it"
CACHES = (
    ("cold", 1, drop_from_cache, 3.0, ALL_ON_DISK),
    ("cold", MANY, drop_from_cache, 3.0, ALL_ON_DISK),
    ("warm", 1, bring_into_cache, 1.0, "the whole model in the page cache"),
)


def measure_accelerate(session: Session) -> list[Line]:
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    with session.fresh_worker("accelerate offload") as peer:
        if peer is None or not session.attempt(
            "accelerate offload", peer, "prepare", directory=str(directory)
        ):
            return []

        def ready_for(who: Worker, prompts: int, cache: Callable[[Path], None]) -> None:
            """What `passes` then decodes, and where its weights come from."""
            who.call("begin", prompts=prompts)
            cache(directory)

        worker.call("passes", directory=str(directory), share=8, count=1)
        sides = [
            side
            for cache, prompts, before, _, _ in CACHES
            for side in (
                calling(
                    f"nvmeio, {cache}, {prompts}",
                    worker,
                    "passes",
                    before=partial(ready_for, worker, prompts, before),
                    directory=str(directory),
                    share=8,
                    count=PASSES,
                ),
                calling(
                    f"accelerate, {cache}, {prompts}",
                    peer,
                    "passes",
                    before=partial(ready_for, peer, prompts, before),
                    # What it reads stays in the cache: the second pass would be a warm one.
                    count=1 if cache == "cold" else PASSES,
                ),
            )
        ]
        samples = session.measure("accelerate's disk offload", sides)
    return [
        compare(
            "accelerate",
            f"tokens/s, {prompts} prompt{'s' if prompts > 1 else ''}",
            f"accelerate, {cache} cache for both",
            "tokens/s",
            tokens_per_s,
            samples[f"nvmeio, {cache}, {prompts}"],
            samples[f"accelerate, {cache}, {prompts}"],
            at_least(least),
            note,
        )
        for cache, prompts, _, least, note in CACHES
    ]


def measure_deepspeed(session: Session) -> list[Line]:
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    with session.fresh_worker("ZeRO-3 inference") as peer:
        if peer is None or not session.attempt(
            "ZeRO-3 inference",
            peer,
            "prepare",
            directory=str(directory),
            nvme=str(session.directory / "zero"),
        ):
            return []
        samples = session.measure(
            "DeepSpeed ZeRO-3 inference",
            [
                calling(
                    "nvmeio",
                    worker,
                    "passes",
                    before=partial(drop_from_cache, directory),
                    directory=str(directory),
                    share=8,
                    count=PASSES,
                ),
                calling("DeepSpeed", peer, "passes", count=PASSES),
            ],
        )
    return [
        compare(
            "deepspeed",
            "tokens/s, one prompt",
            "DeepSpeed ZeRO-3, parameters on NVMe",
            "tokens/s",
            tokens_per_s,
            samples["nvmeio"],
            samples["DeepSpeed"],
            at_least(1.2),
        )
    ]
