"""Contenders for a mixture that does not fit: nvmeio, accelerate's disk offload, llama.cpp."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

MEMORY, OFFLOAD, LLAMA = "memory", "disk offload", "llama.cpp"
ALONE = " alone"  # behind the name of a kind
OFFLOADED_TOKENS = 6
BESIDE_BYTES = 64 << 20  # for computing, where a control group counts it all


class Answer(NamedTuple):
    """The tokens of one generation, and its times."""

    tokens: list[list[int]]
    prompt_s: float
    decode_s: float


class _Marks:
    """The times at which transformers had the prompt, and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        return


class Model:
    """A model of transformers', in memory or not."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._stream = getattr(model, "weight_stream", None)

    @torch.no_grad()
    def answer(self, ids: torch.Tensor, count: int) -> Answer:
        marks = _Marks()
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            streamer=marks,
        )
        began, first, *_, last = [*marks.times, marks.times[-1]]
        return Answer(found.tolist(), first - began, last - first)

    def bytes_read(self) -> int:
        if self._stream is None:
            return process_bytes_read()
        return int(self._stream.stats.bytes_read)

    def reads(self) -> int:
        """Reads of experts that were begun, where this nvmeio counts them."""
        if not hasattr(self._stream, "expert_stats"):
            return 0
        each = [len((*e.direct[0].reads, *e.staged[0].reads)) for e in self._stream.experts]
        counts = [c.misses + c.read_ahead for c in self._stream.expert_stats]
        return sum(map(operator.mul, each, counts))

    def kept_bytes(self) -> int:
        """Memory for experts that are kept."""
        return int(getattr(self._stream and self._stream.stats, "expert_bytes", 0))


class LlamaCpp:
    """llama.cpp in the wheel of xllamacpp, with the mapped file."""

    def __init__(self, path: Path) -> None:
        from peers import llama_cpp

        self._cpp = llama_cpp
        self._model = llama_cpp.opened(path)

    def answer(self, ids: torch.Tensor, count: int) -> Answer:
        (prompt,) = ids.tolist()
        found = self._cpp.completed(self._model, prompt, count, keeps_prompt=False)
        took = found["timings"]
        made = [int(piece) for piece in re.findall(r"\d+", found["choices"][0]["text"])]
        return Answer([prompt + made], took["prompt_ms"] / 1e3, took["predicted_ms"] / 1e3)

    def bytes_read(self) -> int:
        return process_bytes_read()

    def reads(self) -> int:
        return 0

    def kept_bytes(self) -> int:
        return 0


def process_bytes_read() -> int:
    """Bytes that the kernel has read from drives for this process, by mapped files as well."""
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@contextlib.contextmanager
def opened(directory: Path, kind: str, budget: int, layer_bytes: int) -> Iterator[Any]:
    """One contender's model, with `budget` bytes for weights.

    The others have it by a control group, page cache included, as far as this machine lets us make
    one. accelerate gets a layer more, since what it reads has no room in what it was told to keep.
    """
    with contextlib.ExitStack() as stack:
        if kind == LLAMA:
            _limit(stack, budget + BESIDE_BYTES)
            yield LlamaCpp(directory / "model.gguf")
            return
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        cls = transformers.Qwen3MoeForCausalLM
        if kind == MEMORY:
            yield Model(cls.from_pretrained(directory / "saved"))
        elif kind == OFFLOAD:
            _limit(stack, budget + layer_bytes + BESIDE_BYTES)
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=directory.parent))
            places = {"device_map": "auto", "max_memory": {"cpu": budget}}
            model = cls.from_pretrained(directory / "saved", offload_folder=folder, **places)
            yield Model(model)
        else:
            import nvmeio

            folder = directory / kind.removesuffix(ALONE)
            made = nvmeio.stream_model(folder, resident_bytes=budget)
            if kind.endswith(ALONE):
                _wait_for_all(made.weight_stream)
            yield Model(made)


def _limit(stack: contextlib.ExitStack, nbytes: int) -> None:
    from nvmeio.cli.measure.worker import PeerUnavailable
    from peers._memory_group import limited

    with contextlib.suppress(PeerUnavailable):  # `run` says that there was none
        stack.enter_context(limited(nbytes))


def _wait_for_all(stream: Any) -> None:
    """The cache alone: all of a call's reads are waited for before it computes, none is early.

    There is no such switch, so it is taken out of the running program. Guesses of the next layer's
    experts are not made at all, and have no row (docs/decisions/measured.md: they gained nothing).
    """
    cache = type(stream._cache)
    cache._read_ahead = lambda *_: None
    sys.modules[cache.__module__].__dict__["show_arriving"] = lambda *_: False


def run(directory: Path, kind: str, budget: int, count: int) -> dict[str, Any]:
    """Generate to fill the cache, then after the prompt alone, then what is timed.

    accelerate keeps nothing for the next token, so each of its tokens costs the same: it generates
    `OFFLOADED_TOKENS`, once. Every pass reads most of the model.
    """
    from _mixture_model import FIRST_ID

    import nvmeio

    facts = json.loads((directory / "facts.json").read_text())
    prompts, length = facts["prompts"], facts["length"]
    answers = torch.arange(FIRST_ID, FIRST_ID + prompts * length).reshape(prompts, length)
    ids = answers[:, : length - count]
    count = min(count, OFFLOADED_TOKENS) if kind == OFFLOAD else count
    group = Path("/proc/self/cgroup").read_text
    with opened(directory, kind, budget, facts["layer_bytes"]) as model:
        found = []
        at = [(model.bytes_read(), model.reads())]
        for tokens in (1, 1, count) if kind == OFFLOAD else (count, 1, count):
            found.append(model.answer(ids, tokens))
            at.append((model.bytes_read(), model.reads()))
        limited = "nvmeio-bench-" in group()
    decoded, reads = (
        max(0, (after - mid) - (mid - before)) for before, mid, after in zip(*at[1:], strict=True)
    )
    return {
        "tokens_per_s": prompts * (count - 1) / found[-1].decode_s,
        "prompt_s": found[-1].prompt_s,
        "token_bytes": decoded / (prompts * (count - 1)),
        "reads": reads,
        "kept_bytes": model.kept_bytes(),
        "peak_bytes": peak_bytes(),
        "right": found[2].tokens == answers[:, : ids.shape[1] + count].tolist(),
        "limited": limited,
        "nvmeio": str(Path(nvmeio.__file__).parent),
    }


def peak_bytes() -> int:
    """The most memory that this process had, maps of files included."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
