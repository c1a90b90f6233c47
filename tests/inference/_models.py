"""Real models, built from configurations with random weights, small enough for a test."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages it imports
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

VOCABULARY = 128
# What a forward may call its cache: "cache" since transformers 5.24, which takes the old name too.
CACHE_NAMES = ["past_key_values"]
if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters:
    CACHE_NAMES.append("cache")
_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def weights_file(directory: Path) -> Path:
    """The one file of weights in a directory that `save_pretrained` or `pack` wrote."""
    (found,) = directory.glob("*.safetensors")
    return found


def llama(layers: int = 4, width: int = 64, **options: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=options.pop("num_key_value_heads", 2),
            vocab_size=options.pop("vocab_size", VOCABULARY),
            **_IDS,
            **options,
        )
    )


def qwen3(layers: int = 4, width: int = 64, **options: Any) -> Any:
    """Its heads have norms of their own."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=options.pop("num_key_value_heads", 2),
            head_dim=width // 4,
            attention_bias=True,
            vocab_size=VOCABULARY,
            **_IDS,
            **options,
        )
    )


def gpt2(layers: int = 4, width: int = 64) -> Any:
    """Its head is tied to its embedding; its matrices are transposed."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=width, n_layer=layers, n_head=4, vocab_size=VOCABULARY, **_IDS
        )
    )


def openai_gpt(layers: int = 4, width: int = 64) -> Any:
    """Its layers share one activation."""
    return transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(
            n_embd=width,
            n_layer=layers,
            n_head=4,
            afn="relu",
            vocab_size=VOCABULARY,
            n_positions=64,
            **_IDS,
        )
    )


def opt(layers: int = 4, width: int = 64) -> Any:
    """Its positions are looked up with an offset."""
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=width,
            ffn_dim=width * 3 // 2,
            num_hidden_layers=layers,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            word_embed_proj_dim=width,
            **_IDS,
        )
    )


def bloom(layers: int = 4, width: int = 64) -> Any:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(
            hidden_size=width, n_layer=layers, n_head=4, vocab_size=VOCABULARY, **_IDS
        )
    )


def mixtral(layers: int = 4, width: int = 64, experts: int = 4, **options: Any) -> Any:
    """Its experts are one tensor in memory, and a matrix each in files."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=width,
            intermediate_size=options.pop("intermediate_size", width * 3 // 2),
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=experts,
            vocab_size=VOCABULARY,
            **_IDS,
            **options,
        )
    )


def t5(layers: int = 3, width: int = 64) -> Any:
    """An encoder and a decoder, one embedding for both and for the head."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=width,
            d_ff=width * 3 // 2,
            num_layers=layers,
            num_heads=4,
            d_kv=width // 4,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "openai_gpt": openai_gpt,
    "opt": opt,
    "bloom": bloom,
    "mixtral": mixtral,
    "t5": t5,
}


def sized(name: str, nbytes: int, width: int) -> Any:
    """A model of this kind and width, with as many layers as make so many bytes of weights."""
    make = MODELS[name]
    with torch.device("meta"):
        one, two = (
            sum(p.nbytes for p in make(layers=layers, width=width).parameters())
            for layers in (1, 2)
        )
    return make(layers=max(2, 1 + -(-(nbytes - one) // (two - one))), width=width)


def saved(make: Any, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A model's directory, as transformers writes it.

    The weights are larger than it starts with, so that every layer changes what is computed.
    """
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.01)
    model.save_pretrained(directory, **options)
    return directory


def loaded(directory: Path, dtype: torch.dtype | str = "auto") -> Any:
    """The model, loaded whole by transformers."""
    config = transformers.AutoConfig.from_pretrained(directory)
    return getattr(transformers, config.architectures[0]).from_pretrained(directory, dtype=dtype)


def loaded_aligned(directory: Path, dtype: torch.dtype | str = "auto") -> Any:
    """`loaded`, with each weight where torch's allocator puts it, as it lies in a packed file.

    transformers maps the file, in which weights lie at any multiple of 8. Some processors multiply
    otherwise there: by one row, the last bits differ.
    """
    model = loaded(directory, dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def prompt(batch: int = 2, length: int = 7, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def inputs(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Arguments of a forward pass."""
    named = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        named["decoder_input_ids"] = ids[:, :3]
    return named


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(**inputs(model, ids)).logits
    return found


@torch.no_grad()
def tokens(model: Any, ids: torch.Tensor, count: int = 6, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **options,
    )
    return found
