"""`nvmeio pack` (a model in streaming order) and `nvmeio generate` (text from one on the drive)."""

from __future__ import annotations

import importlib
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn

from nvmeio import _checks
from nvmeio.cli._terminal import (
    GB,
    JsonOption,
    OptionGroup,
    Refused,
    binary_size,
    exit_statuses,
    progress_bar,
    say,
    stdout,
)
from nvmeio.errors import counted
from nvmeio.progress import rich_bar

if TYPE_CHECKING:
    import torch

_option = OptionGroup()
_DTYPES = ("float32", "bfloat16", "float16")
_TAIL = 48  # characters of the text that the progress line shows


def dtype_of(name: str | None) -> torch.dtype | None:
    """A dtype from its name, short ones such as "bf16" included."""
    if name is None:
        return None
    try:
        found = _checks.dtype("dtype", name)
    except ValueError:
        found = None
    if found is None or str(found).removeprefix("torch.") not in _DTYPES:
        raise typer.BadParameter(f"{name!r} is not in {', '.join(_DTYPES)}", param_hint="--dtype")
    return found


def pack(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A directory that transformers' save_pretrained wrote, or a name on the hub.",
            show_default=False,
        ),
    ],
    out: Annotated[
        list[Path],
        typer.Argument(
            metavar="OUT...",
            help="The directory to make; must not exist. Several, one on each drive, get a part "
            "of every layer each.",
            show_default=False,
        ),
    ],
    dtype: Annotated[
        str | None, _option.value("float32, bfloat16 or float16; by default the model's.", "DTYPE")
    ] = None,
    quant_bits: Annotated[
        int | None, _option.value("4 or 8: quantise layers, and other matrices over 1 MiB.", "BITS")
    ] = None,
    quant_group_size: Annotated[
        int, _option.value("Elements that share a scale and a minimum.", "N")
    ] = 64,
    modules_to_not_convert: Annotated[
        list[str] | None,
        _option.value("A module that is not quantised, such as lm_head; may be repeated.", "NAME"),
    ] = None,
    ranks: Annotated[
        int,
        _option.value(
            "For N processes that stream it together: OUT/rank-0 and so on, a part in each.",
            "N",
            min=1,
        ),
    ] = 1,
    keep_fused: Annotated[
        bool,
        typer.Option(
            "--keep-fused",
            help="Leave fused experts as the model has them, for transformers to load.",
        ),
    ] = False,
) -> None:
    """Writes a model in the order in which it is streamed, each layer as one aligned record.

    `nvmeio.stream_model` and `nvmeio generate` read OUT with one large read a layer; the fewer
    bytes, the faster a pass. OUT appears when it is complete. With several OUT the model lies over
    all of them: name them all when you use it.

    Example: [bold]nvmeio pack Llama-3-70B /mnt/nvme/llama-70b-4bit --quant-bits 4[/]

    Exit status: 0 written, 1 a file is damaged or the disk failed, 2 the options
    contradict each other or the model, 3 transformers is not installed.
    """
    errors = Console(stderr=True, emoji=False)
    with exit_statuses(errors):
        from nvmeio.inference import packing

        with rich_bar(errors, transient=True) as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages that transformers imports
            try:
                report = packing.pack(
                    str(model),
                    out,
                    dtype=dtype_of(dtype),
                    quant_bits=quant_bits,
                    quant_group_size=quant_group_size,
                    modules_to_not_convert=modules_to_not_convert or (),
                    ranks=ranks,
                    keep_fused=keep_fused,
                    progress=bar if errors.is_terminal else None,
                )
            except (FileNotFoundError, FileExistsError, ValueError, TypeError) as wrong:
                raise Refused(str(wrong)) from wrong
    text = (
        f"{', '.join(map(str, out))}: {binary_size(report.bytes_written)} in "
        f"{counted(report.records, 'record')}, of {binary_size(report.bytes_read)} that were read"
    )
    if report.quantised:
        text += (
            f"; {report.quantised} weights quantised, rms error {report.relative_error:.1%} of "
            f"their standard deviation; no element is off by more than {report.largest_error:.3g}"
        )
    say(stdout(), text)


def generate(
    model: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...",
            help="A directory of save_pretrained or nvmeio pack, or a name on the hub; all "
            "directories of a model that was packed into several.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str | None, _option.value("The text to continue.", "TEXT")] = None,
    ids: Annotated[
        str | None,
        _option.value("The prompt as token numbers, if the model has no tokenizer.", "N,N,…"),
    ] = None,
    max_new_tokens: Annotated[int, _option.value("Tokens to generate at most.", "N", min=1)] = 32,
    resident_bytes: Annotated[
        int | None,
        _option.size("Memory for all weights, such as 8G (GiB); by default half of what is left."),
    ] = None,
    host_bytes: Annotated[
        int | None,
        _option.size("With a GPU: page-locked memory for experts of a mixture and all else."),
    ] = None,
    window: Annotated[
        int | None,
        _option.value("Layers that the window holds; by default 3 or fewer.", "N", min=1),
    ] = None,
    dtype: Annotated[str | None, _option.value("float32, bfloat16 or float16.", "DTYPE")] = None,
    device: Annotated[str, _option.value("Where to compute: cpu, cuda, cuda:1.")] = "cpu",
    kv_offload: Annotated[
        bool, _option.flag("Keep past keys and values of idle layers on disk.", "--kv-offload")
    ] = False,
    checksum: Annotated[
        bool,
        _option.flag(
            "Compare what is read with the checksums of a packed model.", "--checksum/--no-checksum"
        ),
    ] = True,
    compute: Annotated[
        str, _option.value("With packed weights: auto, packed or widened.", "HOW")
    ] = "auto",
    sample: Annotated[
        bool, _option.flag("Sample tokens instead of taking the most likely one.", "--sample")
    ] = False,
    seed: Annotated[int, _option.value("Seed for --sample.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Generates text, with the weights read from disk layer by layer.

    Tokens go to stdout as they come; on a terminal a line below shows how far the present pass
    is, and tokens a second.

    Example: [bold]nvmeio generate Llama-3-70B --prompt "The drive is" --resident-bytes 24G[/]

    Exit status: 0 generated, 1 a file is damaged or the disk failed, 2 what was asked for makes no
    sense, 3 transformers is not installed.
    """
    errors = Console(stderr=True, emoji=False)
    if (prompt is None) == (ids is None):
        raise typer.BadParameter("give either --prompt or --ids")
    with exit_statuses(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that transformers imports
        from nvmeio.inference import stream_model
        from nvmeio.inference.hub import directory_of

        try:
            found = [Path(directory_of(str(each))) for each in model]
            streamed = stream_model(
                found,
                device=device,
                window=window,
                resident_bytes=resident_bytes,
                host_bytes=host_bytes,
                dtype=dtype_of(dtype),
                kv_offload=kv_offload,
                checksum=checksum,
                compute=compute,  # type: ignore[arg-type]
            )
        except (FileNotFoundError, ValueError, TypeError) as wrong:
            raise Refused(str(wrong)) from wrong
        with streamed.weight_stream:
            run = _Run(streamed, found[0], prompt, ids, device, errors, as_json)
            run.generate(max_new_tokens, sample, seed)


class _Run:
    """One generation, and the streamer that `generate` puts its tokens into."""

    def __init__(
        self,
        model: Any,
        directory: Path,
        prompt: str | None,
        ids: str | None,
        device: str,
        errors: Console,
        as_json: bool,
    ) -> None:
        import torch

        self._model, self._errors, self._as_json = model, errors, as_json
        self._tokenizer = _tokenizer(directory) if ids is None else None
        if self._tokenizer is not None:
            given = self._tokenizer(prompt, return_tensors="pt").input_ids
        else:
            given = torch.tensor([_numbers(ids or "", model.config)])
        if not given.numel():
            raise Refused("the prompt is empty")
        self._ids = given.to(device)
        self._tokens: list[int] = []
        self._text = ""
        self._begun = self._first = self._last = 0.0
        self._live = errors.is_terminal and not as_json

    def generate(self, count: int, sample: bool, seed: int) -> None:
        import torch

        stream = self._model.weight_stream
        torch.manual_seed(seed)
        with self._progress(stream, count) if self._live else nullcontext():
            self._begun = time.perf_counter()
            self._model.generate(
                self._ids,
                attention_mask=torch.ones_like(self._ids),
                max_new_tokens=count,
                do_sample=sample,
                streamer=self,
            )
        if not self._as_json:
            typer.echo(self._text if self._live else "")
        self._tell(stream)

    # Called by `generate`

    def put(self, value: Any) -> None:
        """The prompt first, then each token."""
        if self._first == 0.0 and not self._tokens and value.ndim > 1:
            return
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._tokens += value.reshape(-1).tolist()
        text = self._decoded()
        if not self._live and not self._as_json:
            typer.echo(text[len(self._text) :], nl=False)
        self._text = text

    def end(self) -> None:
        """All tokens were put: the text ends once the bar has gone."""

    def _decoded(self) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, self._tokens))
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        return text.removesuffix("\ufffd")  # half a character: the next token has the rest

    # Shown to the user

    @contextmanager
    def _progress(self, stream: Any, count: int) -> Iterator[None]:
        rate = TextColumn("{task.fields[rate]}", markup=False)
        with progress_bar(self._errors, rate, description="", total=None, rate="") as update:

            def show(name: str, done: int, total: int) -> None:
                seconds = time.perf_counter() - self._begun
                rate = f"{len(self._tokens)} of {counted(count, 'token')}"
                if len(self._tokens) > 1:
                    rate += f", {self._per_s():.2f} tokens/s"
                rate += f", {stream.stats.bytes_read / seconds / GB:.2f} GB/s"
                tail = self._text[-_TAIL:].replace("\n", " ")
                update(completed=done, total=total, description=f"…{tail}", rate=rate)

            stream.progress = show
            try:
                yield
            finally:
                stream.progress = None

    def _per_s(self) -> float:
        """Tokens a second behind the first, which the prompt is computed for."""
        return (len(self._tokens) - 1) / max(self._last - self._first, 1e-9)

    def _tell(self, stream: Any) -> None:
        stats = stream.stats
        seconds = max(self._last - self._begun, 1e-9)
        held = stats.resident_bytes + stats.window_bytes + stats.work_bytes + stats.expert_bytes
        found = {
            "text": self._text if self._tokenizer is not None else None,
            "tokens": self._tokens,
            "prompt_tokens": int(self._ids.shape[1]),
            "prefill_s": self._first - self._begun,
            "decode_tokens_per_s": self._per_s() if len(self._tokens) > 1 else None,
            "total_s": seconds,
            "bytes_read": stats.bytes_read,
            "waited_s": stats.waited_s,
            "weights_in_memory_bytes": held,
            "experts": stats.experts._asdict() if stream.experts else None,
        }
        if self._as_json:
            typer.echo(json.dumps(found))
            return
        then = f", then {self._per_s():.2f} a second" if len(self._tokens) > 1 else ""
        text = (
            f"{counted(len(self._tokens), 'token')} in {seconds:.1f} s (the first after "
            f"{self._first - self._begun:.1f} s{then}); {binary_size(stats.bytes_read)} read at "
            f"{stats.bytes_read / seconds / GB:.2f} GB/s, {binary_size(held)} of weights in memory"
        )
        say(self._errors, text, "dim")
        if stream.experts:
            say(self._errors, _experts_used(stats), "dim")


def _experts_used(stats: Any) -> str:
    """The cost of a mixture's experts, in a line."""
    used = stats.experts
    asked = max(1, used.hits + used.misses)
    return (
        f"experts: {used.hits / asked:.0%} of {asked} were in memory; "
        f"{binary_size(used.bytes_read)} read, {binary_size(stats.expert_bytes)} hold them"
    )


def _tokenizer(directory: Path) -> Any:
    try:
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(directory)
    except ImportError as missing:
        raise Refused(
            f"a text needs transformers ({missing}): pip install transformers, or give the prompt "
            "as tokens: --ids 1,2,3"
        ) from missing
    except Exception as failed:  # transformers raises many kinds
        raise Refused(
            f"{directory} holds no tokenizer that transformers can load ({failed}); copy it there, "
            "or give the prompt as tokens: --ids 1,2,3"
        ) from failed


def _numbers(text: str, config: Any) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise Refused(f"--ids takes numbers with commas between them, not {text!r}") from None
    size = config.get_text_config().vocab_size
    wrong = [number for number in found if not 0 <= number < size]
    if wrong:
        raise Refused(f"--ids {wrong[0]} is not within the vocabulary, 0 to {size - 1}")
    return found
