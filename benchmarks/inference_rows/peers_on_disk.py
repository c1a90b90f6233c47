"""Rows `accelerate` and `deepspeed`: the same model, weights on disk on both sides."""

from __future__ import annotations

from functools import partial

from _lines import Line, at_least, compare
from _measure import Contender
from _session import Session, calling
from checkpoint_rows._state import drop_from_cache

from inference_rows._model import PASSES, streaming
from inference_rows.passes import tokens_per_s


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
        drop = partial(drop_from_cache, directory)
        samples = session.measure(
            "accelerate's disk offload",
            [
                calling(
                    "nvmeio", worker, "passes", directory=str(directory), share=8, count=PASSES
                ),
                Contender("cold", partial(peer.call, "passes", count=1), drop),
                Contender("warm", partial(peer.call, "passes", count=PASSES)),
            ],
        )
    return [
        compare(
            "accelerate",
            "tokens/s, one prompt",
            f"accelerate, {cache} cache",
            "tokens/s",
            tokens_per_s,
            samples["nvmeio"],
            samples[cache],
            at_least(least),
            note,
        )
        for cache, least, note in (
            ("cold", 3.0, "every layer on disk, as device_map has it"),
            ("warm", 1.0, "the whole model in the page cache"),
        )
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
                    "nvmeio", worker, "passes", directory=str(directory), share=8, count=PASSES
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
