"""Who computes with weights on disk: nvmeio, and accelerate's disk offload."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from _measure import Sample, percentile, timed

import nvmeio
from nvmeio.cli.measure.worker import PeerUnavailable
from nvmeio.inference import pack, run_in_blocks

VOCABULARY = 4096


def _transformers() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers
    except ImportError as error:
        raise PeerUnavailable(
            f"transformers cannot be imported ({error})", "pip install transformers"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def write_llama(directory: Path, width: int, layers: int, heads: int, file: str = "") -> None:
    """A Llama with random float32 weights, shard by shard, so that it is never whole in memory."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        dtype=torch.float32,
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def filled(shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    shapes = {name: parameter.shape for name, parameter in empty.named_parameters()}
    if file:
        nvmeio.save_safetensors({n: filled(s) for n, s in shapes.items()}, directory / file)
    else:
        groups: dict[str, list[str]] = {}
        for name in shapes:
            groups.setdefault(".".join(name.split(".")[:3]), []).append(name)
        where = {}
        for number, names in enumerate(groups.values()):
            shard = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
            nvmeio.save_safetensors({n: filled(shapes[n]) for n in names}, directory / shard)
            where.update(dict.fromkeys(names, shard))
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    config.save_pretrained(directory)


def process_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> int:
    """From here on VmHWM counts anew; what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return process_bytes("VmRSS")


def prompt_ids(prompts: int) -> torch.Tensor:
    """Eight random tokens for each."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (prompts, 8), generator=generator)


def with_peak(work: Callable[..., Sample]) -> Callable[..., Sample]:
    """A sample that says how much memory the process had at most, mapped files included."""

    @wraps(work)
    def watched(*args: Any, **kwargs: Any) -> Sample:
        forget_peak()
        sample = work(*args, **kwargs)
        sample.extra["peak_gb"] = process_bytes("VmHWM") / 1e9
        return sample

    return watched


@torch.no_grad()
def greedy(model: Any, count: int) -> list[int]:
    """The likeliest tokens after the prompt."""
    found: list[int] = []
    output = model(prompt_ids(1), use_cache=True)
    while len(found) < count:
        found.append(int(output.logits[0, -1].argmax()))
        output = model(
            torch.tensor([found[-1:]]), past_key_values=output.past_key_values, use_cache=True
        )
    return found


class Adapted(torch.nn.Module):
    """A frozen matrix, and one of low rank that is trained beside it."""

    def __init__(self, base: torch.nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Tuning:
    """Steps of AdamW on adapters at all queries and values of a Llama whose weights are frozen."""

    def __init__(self, model: Any) -> None:
        self._model = model
        torch.manual_seed(3)
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj = Adapted(attention.q_proj)
            attention.v_proj = Adapted(attention.v_proj)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step(self, tokens: int) -> float:
        ids = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(4))
        loss = self._model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)


class Decoding:
    """Passes of one token each, with a cache that is not long enough to matter."""

    model: Any = None
    _prompts = 0

    def begin(self, prompts: int = 1) -> None:
        """Take so many prompts in, unless these are the ones that are being decoded."""
        if self._prompts == prompts:
            return
        self._prompts = prompts
        with torch.no_grad():
            ids = prompt_ids(prompts)
            self._cache = self.model(ids, use_cache=True).past_key_values
        self._token = ids[:, :1]

    def _pass(self) -> None:
        with torch.no_grad():
            self.model(self._token, past_key_values=self._cache, use_cache=True)

    def _timed(self, count: int, nbytes: Any = None) -> Sample:
        before = nbytes() if nbytes else 0
        with timed(operations=count * len(self._token)) as sample:
            for _ in range(count):
                self._pass()
        sample.nbytes = nbytes() - before if nbytes else 0
        return sample

    def close(self) -> None:
        self.model = None
        self._prompts = 0
        gc.collect()


class Streaming(Decoding):
    """nvmeio; and the model loaded whole, for the time that computing takes."""

    def __init__(self) -> None:
        _transformers()
        self._handle = nvmeio.AioHandle()
        self._key: tuple[str, int, bool] | None = None
        self._tuning: Tuning | None = None

    def write_model(self, directory: str, nbytes: int) -> None:
        width = max(256, int((nbytes / 2048) ** 0.5) // 128 * 128)  # about 32 layers
        layer = 4 * (4 * width * width + 3 * width * 4 * width)
        write_llama(Path(directory), width, max(4, nbytes // layer), 16, "model.safetensors")

    def pack_model(self, directory: str, packed: str, **options: Any) -> None:
        pack(directory, packed, handle=self._handle, **options)

    def _stream(self, directory: str, share: int, checksum: bool = True) -> None:
        """`share`: an n-th of the weights in memory; 0 the window, -1 all, -2 half of them."""
        key = (directory, share, checksum)
        if self._key == key:
            return
        self._release()
        total = os.stat(Path(directory) / "model.safetensors").st_size
        if share > 0:
            budget = total // share
        elif share == -1:
            budget = 1 << 62
        else:
            probe = nvmeio.stream_model(directory, resident_bytes=1 << 62, handle=self._handle)
            units = probe.weight_stream.units
            layers = [unit.layout.nbytes for unit in units if unit.is_layer]
            others = sum(unit.layout.nbytes for unit in units if not unit.is_layer)
            probe.weight_stream.close()
            kept = len(layers) // 2 if share == -2 else 0
            budget = others + (kept + 3) * max(layers) + (8 << 20)
        self.model = nvmeio.stream_model(
            directory, resident_bytes=budget, handle=self._handle, checksum=checksum
        )
        self._key = key
        self.begin()
        self._pass()  # residents are there and the order is known

    @with_peak
    def passes(self, directory: str, share: int, count: int, checksum: bool = True) -> Sample:
        self._stream(directory, share, checksum)
        return self._timed(count, lambda: self.model.weight_stream.stats.bytes_read)

    def tokens(self, directory: str, share: int, count: int) -> list[int]:
        self._stream(directory, share)
        return greedy(self.model, count)

    def batches(self, directory: str, share: int, count: int, together: bool) -> Sample:
        self._stream(directory, share)
        ids = torch.randint(3, VOCABULARY, (count, 16), generator=torch.Generator().manual_seed(2))

        def work(row: torch.Tensor) -> Any:
            return lambda: self.model.generate(
                row,
                attention_mask=torch.ones_like(row),
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
            )

        works = [work(ids[n : n + 1]) for n in range(count)]
        with timed(operations=4 * count) as sample:
            if together:
                run_in_blocks(self.model, works)
            else:
                for one in works:
                    one()
        return sample

    def load_whole(self, directory: str) -> None:
        self._release()
        self.model = _transformers().AutoModelForCausalLM.from_pretrained(directory)
        for parameter in self.model.parameters():  # out of the mapped file
            parameter.data = parameter.data.clone()
        self.begin()
        self._pass()

    def whole_passes(self, count: int) -> Sample:
        return self._timed(count)

    def tune(self, directory: str, share: int, tokens: int, count: int) -> Sample:
        """Training steps with adapters in memory over a base on disk; `share` as for passes."""
        if self._tuning is None:
            self._release()
            budget = os.stat(Path(directory) / "model.safetensors").st_size // share
            self.model = nvmeio.stream_model(
                directory, resident_bytes=budget, handle=self._handle, trainable=True
            )
            self._key = (directory, share, True)
            self._tuning = Tuning(self.model)
        self._tuning.step(tokens)  # the order of a step is known from here on
        stats = self.model.weight_stream.stats
        before = stats.bytes_read
        with timed(operations=count) as sample:
            for _ in range(count):
                loss = self._tuning.step(tokens)
        sample.nbytes = self.model.weight_stream.stats.bytes_read - before
        sample.extra["loss"] = loss
        return sample

    def tune_whole(self, directory: str, tokens: int, count: int) -> Sample:
        """The same with the base in memory."""
        if self._tuning is None:
            self.load_whole(directory)
            self._tuning = Tuning(self.model.requires_grad_(False))
        self._tuning.step(tokens)
        with timed(operations=count) as sample:
            for _ in range(count):
                loss = self._tuning.step(tokens)
        sample.extra["loss"] = loss
        return sample

    def lag(self, directory: str, share: int, count: int) -> Sample:
        self._stream(directory, share)

        async def beside() -> tuple[list[float], float]:
            lags: list[float] = []
            done = asyncio.Event()

            async def watch() -> None:
                while not done.is_set():
                    began = time.perf_counter()
                    await asyncio.sleep(0.001)
                    lags.append((time.perf_counter() - began - 0.001) * 1e3)

            watching = asyncio.create_task(watch())
            began = time.perf_counter()
            for _ in range(count):
                await self.model.weight_stream.run(self._pass)
            seconds = time.perf_counter() - began
            done.set()
            await watching
            return lags, seconds

        lags, seconds = asyncio.run(beside())
        return Sample(seconds=seconds, operations=count, extra=_percentiles(lags))

    def idle_lag(self, seconds: float) -> Sample:
        async def idle() -> list[float]:
            lags, end = [], time.perf_counter() + seconds
            while time.perf_counter() < end:
                began = time.perf_counter()
                await asyncio.sleep(0.001)
                lags.append((time.perf_counter() - began - 0.001) * 1e3)
            return lags

        return Sample(seconds=seconds, operations=1, extra=_percentiles(asyncio.run(idle())))

    def _release(self) -> None:
        if self._key is not None:
            self.model.weight_stream.close()
        self.model, self._key, self._tuning = None, None, None
        self._prompts = 0
        gc.collect()

    def close(self) -> None:
        self._release()
        self._handle.close()


class Accelerate(Decoding):
    """`from_pretrained` with every layer on disk, as `device_map` has it."""

    def __init__(self) -> None:
        _transformers()
        try:
            import accelerate
        except ImportError as error:
            raise PeerUnavailable(
                f"accelerate cannot be imported ({error})", "pip install accelerate"
            ) from error
        assert accelerate.__version__

    def prepare(self, directory: str) -> None:
        transformers = _transformers()
        layers = transformers.AutoConfig.from_pretrained(directory).num_hidden_layers
        places = {f"model.layers.{n}": "disk" for n in range(layers)}
        places |= dict.fromkeys(
            ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
        )
        self._nbytes = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, device_map=places, offload_folder=f"{directory}-offload"
        )
        self.begin()

    def passes(self, count: int) -> Sample:
        sample = self._timed(count)
        sample.nbytes = count * self._nbytes
        return sample


def _percentiles(lags: list[float]) -> dict[str, float]:
    return {
        "p50_ms": percentile(lags, 50),
        "p99_ms": percentile(lags, 99),
        "worst_ms": max(lags),
    }
