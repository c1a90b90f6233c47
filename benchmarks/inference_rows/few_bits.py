"""Row `fewbits`: a token of the same weights in 8 and 4 bits, by nvmeio and by others."""

from __future__ import annotations

import contextlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from _files import drop_from_cache
from _lines import Line, compare
from _measure import Contender, Sample
from _session import Session, calling

from inference_rows._model import PASSES, streaming
from inference_rows.passes import cpu_per_pass, tokens_per_s
from nvmeio.cli.measure.worker import Worker

# In memory: who, what it calls its bits, how many they are, and what its `prepare` is told.
PEERS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama.cpp", "Q8_0", 8, {"kind": "Q8_0", "mapped": False}),
    ("llama.cpp", "Q4_0", 4, {"kind": "Q4_0", "mapped": False}),
    ("bitsandbytes", "4 bits", 4, {}),
    ("torchao", "int4", 4, {}),
)
MAPPED = tuple(
    ("llama.cpp", kind, bits, {"kind": kind, "mapped": True})
    for kind, bits in (("Q8_0", 8), ("Q4_0", 4))
)


def measure(session: Session) -> list[Line]:
    """Everything in memory; and llama.cpp mapped, beside nvmeio with as much memory."""
    ready = streaming(session)
    if ready is None:
        return []
    worker, directory = ready
    lines = []
    for peers, share, note in (
        (PEERS, -1, "all in memory"),
        (MAPPED, 8, "an eighth of each one's weights in memory, llama.cpp mapped"),
    ):
        for name, kind, bits, options in peers:
            packed = session.directory / f"packed-{bits}"
            arguments = {"directory": str(directory), "packed": str(packed)}
            if not packed.exists() and not session.attempt(
                "streaming", worker, "pack_model", dtype="bfloat16", quant_bits=bits, **arguments
            ):
                continue
            lines += _beside(session, (name, kind, bits), options, directory, packed, share, note)
    return lines


def _beside(
    session: Session,
    who: tuple[str, str, int],
    options: dict[str, Any],
    directory: Path,
    packed: Path,
    share: int,
    note: str,
) -> list[Line]:
    name, kind, bits = who
    ours, theirs = f"nvmeio, {bits} bits", f"{name} {kind}"
    copy = session.directory / "copy-few-bits"
    if name == "llama.cpp":
        options = {**options, "copy": str(copy)}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, copy, ignore_errors=True)
        own = stack.enter_context(session.fresh_worker("streaming"))
        peer = stack.enter_context(session.fresh_worker(name))
        if own is None or peer is None:
            return []
        if not session.attempt(name, peer, "prepare", directory=str(directory), **options):
            return []

        def ready_for(who: Worker, weights: Path) -> None:
            who.call("begin", prompts=1)
            if share > 0:
                drop_from_cache(weights)

        own.call("passes", directory=str(packed), share=share, count=1)
        # What a mapped file has read stays in the cache: the second pass would be a warm one.
        count = 1 if share > 0 else PASSES
        samples: dict[str, list[Sample]] = session.measure(
            f"{theirs}, {note}",
            [
                _passes(ours, own, partial(ready_for, own, packed), PASSES, packed, share),
                calling(theirs, peer, "passes", before=partial(ready_for, peer, copy), count=count),
            ],
        )
    return [
        compare("fewbits", what, theirs, unit, figure, samples[ours], samples[theirs], None, note)
        for what, unit, figure in (
            (f"tokens/s, {bits} bits", "tokens/s", tokens_per_s),
            (f"CPU time a token, {bits} bits", "CPU s", cpu_per_pass),
        )
    ]


def _passes(
    name: str, worker: Worker, before: Any, count: int, packed: Path, share: int
) -> Contender:
    return calling(
        name, worker, "passes", before=before, directory=str(packed), share=share, count=count
    )
