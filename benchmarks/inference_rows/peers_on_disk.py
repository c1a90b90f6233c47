"""Rows `accelerate`, `deepspeed`, `airllm`, `llamacpp`: the same weights, on disk on both sides."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from _files import bring_into_cache, drop_from_cache
from _lines import Line, at_least, compare
from _measure import Sample
from _session import Session, calling

from inference_rows._model import PASSES, streaming
from inference_rows.passes import tokens_per_s
from nvmeio.cli.measure.worker import Worker

MANY = 64  # prompts whose token takes about as long to compute as the weights to come
TOKENS = 4
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


def measure_airllm(session: Session) -> list[Line]:
    """Row `airllm`."""
    return _beside(session, "airllm", "AirLLM", "one layer in memory, one on its way")


def measure_llama_cpp(session: Session) -> list[Line]:
    """Row `llamacpp`."""
    return _beside(
        session, "llamacpp", "llama.cpp", "mapped, with an eighth of it and 64 MiB as memory"
    )


def _beside(session: Session, row: str, name: str, what: str) -> list[Line]:
    """A token of one prompt, from a cold cache, by who makes a copy of the checkpoint first."""
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    copy = session.directory / f"copy-{row}"
    with session.fresh_worker(name) as peer:
        try:
            if peer is None or not session.attempt(
                name, peer, "prepare", directory=str(directory), copy=str(copy)
            ):
                return []

            def ready_for(who: Worker, weights: Path) -> None:
                who.call("begin", prompts=1)
                drop_from_cache(weights)

            model = {"directory": str(directory), "share": 8}
            same = worker.call("tokens", count=TOKENS, **model) == peer.call("tokens", count=TOKENS)
            samples = session.measure(
                name,
                [
                    calling(
                        "nvmeio",
                        worker,
                        "passes",
                        before=partial(ready_for, worker, directory),
                        count=PASSES,
                        **model,
                    ),
                    # What it reads stays in the cache: the second pass would be a warm one.
                    calling(name, peer, "passes", before=partial(ready_for, peer, copy), count=1),
                ],
            )
            needs = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file()) / 1e9
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    ours, theirs = samples["nvmeio"], samples[name]
    tokens = f"{TOKENS} tokens: {'the same' if same else 'others'}"
    return [
        compare(
            row,
            "tokens/s, one prompt, cold",
            name,
            "tokens/s",
            tokens_per_s,
            ours,
            theirs,
            note=f"{what}; {tokens}",
        ),
        compare(
            row,
            "memory of the process at most",
            name,
            "GB",
            _peak_gb,
            ours,
            theirs,
            note=f"mapped files included; {name} needs {needs:.2f} GB on disk for its copy",
        ),
    ]


def _peak_gb(sample: Sample) -> float:
    return sample.extra["peak_gb"]
