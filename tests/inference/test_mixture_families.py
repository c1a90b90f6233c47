"""Mixtures of many families: 200 tokens at the smallest budget are those of the model in memory."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from inference import _tiny
from inference._models import transformers

import nvmeio
from nvmeio.inference import pack
from nvmeio.inference._plan import units

pytestmark = pytest.mark.timeout(300)

# Their experts are kept one by one.
FAMILIES = [
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "FlexOlmoForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "JambaForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
]
# Their experts are called in another way, and read with their layers.
BY_LAYER = {"Llama4ForCausalLM"}

SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **{"moe_num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "max_position_embeddings": 256},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_at_the_smallest_budget_are_those_of_the_loaded_model(
    name: str, tmp_path: Path, one_handle: nvmeio.AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"transformers has no {name}")
    monkeypatch.setattr(units, "SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(_tiny, "_ATTEMPTS", ((4, SIZES), (8, SIZES)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, given = _tiny.make(cls)
        made.save_pretrained(tmp_path)
        whole = cls.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="is too small") as refused:
            nvmeio.stream_model(tmp_path, handle=one_handle, resident_bytes=1)
        least = int(str(refused.value).split()[-2])
        model = nvmeio.stream_model(tmp_path, handle=one_handle, resident_bytes=least)
        ids = given["input_ids"][:1]
        with model, torch.no_grad():
            assert _tiny.output(model, given).equal(_tiny.output(whole, given))
            options = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
            assert model.generate(ids, **options).equal(whole.generate(ids, **options))
            assert bool(model.weight_stream.experts) == (name not in BY_LAYER)
            if model.weight_stream.experts:
                assert model.weight_stream.stats.experts.evictions
        pack(tmp_path, tmp_path / "packed")
        model = nvmeio.stream_model(
            tmp_path / "packed", handle=one_handle, resident_bytes=2 * least
        )
        with model, torch.no_grad():
            few = {**options, "max_new_tokens": 40, "min_new_tokens": 40}
            assert model.generate(ids, **few).equal(whole.generate(ids, **few))
            for experts in model.weight_stream.experts:
                pairs = zip(experts.direct, experts.staged, strict=True)
                assert {len(own.reads) + len(staged.reads) for own, staged in pairs} == {1}
