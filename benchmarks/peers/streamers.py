"""What many take for models larger than memory: AirLLM, and llama.cpp with a mapped file."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from _files import drop_from_cache
from _measure import Sample, timed

from nvmeio.cli.measure.worker import PeerUnavailable
from peers._memory_group import limited
from peers.inference import Decoding, greedy, prompt_ids, with_peak


class AirLLM(Decoding):
    """Layer by layer out of files of its own, one layer ahead."""

    def __init__(self) -> None:
        try:
            with _quiet():
                from airllm.airllm_base import AirLLMBaseModel
        except ImportError as error:
            raise PeerUnavailable(
                f"airllm cannot be imported ({error})", "pip install airllm scipy"
            ) from error

        class Bare(AirLLMBaseModel):  # type: ignore[misc]
            """The model has no tokenizer: its prompts are numbers."""

            def get_tokenizer(self, hf_token: str | None = None) -> None:
                return None

        self._load = Bare

    def prepare(self, directory: str, copy: str) -> None:
        with _quiet():
            self.model = self._load(
                directory, device="cpu", dtype=torch.float32, layer_shards_saving_path=copy
            )

    @with_peak
    def passes(self, count: int) -> Sample:
        with _quiet():
            return self._timed(count)

    def tokens(self, count: int) -> list[int]:
        with _quiet():
            return greedy(self.model, count)


class LlamaCpp:
    """llama.cpp in the wheel of xllamacpp: a GGUF file in float32, or in few bits.

    Mapped, it has as much memory for the file as the others have for weights, and a bit for
    computing: what is mapped is in the page cache, which would else hold all of it.
    """

    _BESIDE_BYTES = 64 << 20

    def __init__(self) -> None:
        try:
            import gguf

            from peers import llama_cpp
        except ImportError as error:
            raise PeerUnavailable(
                f"llama.cpp cannot be imported ({error})", "pip install xllamacpp gguf"
            ) from error
        self._gguf, self._cpp = gguf, llama_cpp
        self._model: Any = None
        self._group = contextlib.ExitStack()

    def prepare(self, directory: str, copy: str, kind: str = "F32", mapped: bool = True) -> None:
        """Write the same weights as GGUF, and open them; `kind`: F32, Q8_0 or Q4_0."""
        path = Path(copy) / "model.gguf"
        path.parent.mkdir(parents=True)
        self._convert(Path(directory), path, self._gguf.GGMLQuantizationType[kind])
        drop_from_cache(path)  # the cache of what was written is another group's
        if mapped:
            nbytes = path.stat().st_size // 8 + self._BESIDE_BYTES
            self._group.enter_context(limited(nbytes))
        self._model = self._cpp.opened(path, mapped)

    def begin(self, prompts: int = 1) -> None:
        assert prompts == 1
        self._generated(1)

    @with_peak
    def passes(self, count: int) -> Sample:
        with timed(operations=count) as sample:
            passes = self._generated(count)["timings"]["prompt_n"] + count - 1
        if passes != count:
            raise RuntimeError(
                f"it made {passes} passes for {count} tokens: the prompt is computed"
            )
        return sample

    def tokens(self, count: int) -> list[int]:
        return [int(piece) for piece in self._generated(count)["choices"][0]["text"].split()]

    def _generated(self, count: int) -> Any:
        """The likeliest tokens after the prompt, whose keys and values are kept."""
        prompt = prompt_ids(1)[0].tolist()
        return self._cpp.completed(self._model, prompt, count, keeps_prompt=True)

    def close(self) -> None:
        self._model = None
        self._group.close()

    def _convert(self, directory: Path, path: Path, kind: Any) -> None:
        from safetensors import safe_open

        gguf = self._gguf
        config = json.loads((directory / "config.json").read_text())
        heads = config["num_attention_heads"]
        out = gguf.GGUFWriter(str(path), "llama")
        out.add_block_count(config["num_hidden_layers"])
        out.add_context_length(config["max_position_embeddings"])
        out.add_embedding_length(config["hidden_size"])
        out.add_feed_forward_length(config["intermediate_size"])
        out.add_head_count(heads)
        out.add_head_count_kv(config["num_key_value_heads"])
        out.add_layer_norm_rms_eps(config["rms_norm_eps"])
        out.add_rope_dimension_count(config["hidden_size"] // heads)
        out.add_vocab_size(config["vocab_size"])
        out.add_tokenizer_model("llama")  # a token's text is its number
        out.add_token_list([f"\u2581{number}" for number in range(config["vocab_size"])])
        out.add_token_scores([0.0] * config["vocab_size"])
        out.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
        out.add_bos_token_id(1)
        out.add_eos_token_id(2)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
        with safe_open(directory / "model.safetensors", "np") as file:
            for name in file.keys():  # noqa: SIM118
                weight = file.get_tensor(name)
                if ".q_proj." in name or ".k_proj." in name:  # pairs lie side by side there
                    rows, columns = weight.shape
                    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
                    weight = halves.swapaxes(1, 2).reshape(rows, columns)
                stored = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
                quantised = gguf.quants.quantize(weight, stored)
                known = names.get_name(name, try_suffixes=(".weight",))
                out.add_tensor(known, quantised, raw_dtype=stored)
            out.write_header_to_file()
            out.write_kv_data_to_file()
            out.write_tensors_to_file()
            out.close()


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
