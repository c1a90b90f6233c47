"""Every causal and seq2seq model class of transformers, from a configuration made small."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from inference._models import VOCABULARY

# Of a model that is compared. What stays larger with every size below is too large for a test.
MOST_PARAMETERS = 60_000_000

_LAYERS = """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth
    num_encoder_layers num_decoder_layers num_blocks encoder_num_hidden_layers
    decoder_num_hidden_layers"""
_SIZES = {
    "hidden_size n_embd d_model dim embed_dim emb_dim embedding_size word_embed_proj_dim "
    "encoder_hidden_size decoder_hidden_size embedding_dim": 64,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads num_key_value_heads "
    "decoder_attention_heads num_kv_heads n_head_kv decoder_num_attention_heads "
    "encoder_num_attention_heads decoder_num_key_value_heads encoder_num_key_value_heads": 4,
    "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner dff d_inner inner_dim "
    "moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size mlp_hidden_size "
    "encoder_intermediate_size decoder_intermediate_size shared_intermediate_size hidden_dim": 128,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok moe_k moe_topk top_k_experts": 2,
    "n_group topk_group n_shared_experts": 1,
    "head_dim d_kv attention_head_dim kv_channels d_head v_head_dim qk_nope_head_dim "
    "qk_rope_head_dim q_lora_rank kv_lora_rank rotary_dim": 16,
    "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions "
    "seq_length max_seq_len max_sequence_length": 128,
    "vocab_size src_vocab_size tgt_vocab_size encoder_vocab_size decoder_vocab_size "
    "unpadded_vocab_size": VOCABULARY,
    "bos_token_id decoder_start_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SMALL: dict[str, int] = {name: size for names, size in _SIZES.items() for name in names.split()}
# Tried in turn: mixtures of kinds of layers need some of each, and some sizes have no default.
_ATTEMPTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (3, {}),
    (4, {}),
    (8, {}),
    (4, {"head_dim": 16}),
    (4, {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}),
)


class CannotBeBuilt(Exception):
    """There is no small model of a class, for reasons of its own."""


def names() -> list[str]:
    """All classes that transformers gives out for causal and seq2seq language modelling.

    By name: to import them takes longer than all tests are collected in.
    """
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: set[str] = set()
    for kind in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        for made in getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values():
            found.update((made,) if isinstance(made, str) else made)
    return sorted(found)


def make(cls: type[Any]) -> tuple[Any, dict[str, Any]]:
    """A small model with weights that all change what is computed, and arguments of its forward.

    Raises:
        CannotBeBuilt: No configuration that was tried gives one that computes.
    """
    why: list[str] = []
    for config in _configurations(cls.config_class, why):
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in cls(config).parameters())
            if count > MOST_PARAMETERS:
                why.append(f"{count} parameters")
                continue
            model = _made(cls, config)
            given = _inputs(model)
            if output(model, given).equal(output(model, given)):
                return model, given
            why.append("its logits differ from call to call, or are not numbers")
        except Exception as failed:  # hundreds of classes, each with checks of its own
            why.append(f"{type(failed).__name__}: {failed}"[:200])
    raise CannotBeBuilt("; ".join(why[-1:]))


def output(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """What a model says of its arguments."""
    with torch.no_grad():
        found = model(**given)
    logits = getattr(found, "logits", None)
    whole: torch.Tensor = found[0] if logits is None else logits
    return whole


def _made(cls: type[Any], config: Any) -> Any:
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.01)
    return model


def _inputs(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
    given: dict[str, Any] = {"input_ids": ids}
    takes = inspect.signature(model.forward).parameters
    if "decoder_input_ids" in takes and model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, :4]
    return given


def _configurations(cls: type[Any], why: list[str]) -> Iterator[Any]:
    for layers, extra in _ATTEMPTS:
        try:
            yield _small(cls, layers, extra)
        except Exception as failed:
            why.append(f"{type(failed).__name__}: {failed}"[:200])


def _small(cls: type[Any], layers: int, extra: dict[str, Any]) -> Any:
    base = cls()
    sizes = {**_SMALL, **dict.fromkeys(_LAYERS.split(), layers)}
    wanted: dict[str, Any] = {}
    for name, size in sizes.items():
        present = None
        with contextlib.suppress(Exception):  # some say so where they have no such size
            present = getattr(base, name, None)
        if isinstance(present, int) and not isinstance(present, bool):
            wanted[name] = size
    wanted.update((name, value) for name, value in extra.items() if hasattr(base, name))
    for name in getattr(cls, "sub_configs", {}):
        part = getattr(base, name, None)
        if part is not None:
            wanted[name] = _small(type(part), layers, {}).to_dict()
    try:
        return cls(**wanted)
    except Exception:
        given: dict[str, Any] = {}
        for name, value in wanted.items():  # those that it takes
            with contextlib.suppress(Exception):
                cls(**given, **{name: value})
                given[name] = value
        return cls(**given)
