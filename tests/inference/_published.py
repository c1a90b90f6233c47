"""Tiny models in the formats in which large ones are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from inference._models import VOCABULARY, llama, transformers, weights_file
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


def rewrite(directory: Path, change: Callable[[Weights], Weights]) -> None:
    path = weights_file(directory)
    save_file(change(load_file(path)), path, {"format": "pt"})


def configure(directory: Path, **values: Any) -> None:
    """Set values of the configuration; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({n: v for n, v in config.items() if v is not None}))


def fp8_of(
    weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and float32 scales of a matrix."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    steps = torch.empty_like(weight, dtype=dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[own].float().abs().max() / torch.finfo(dtype).max
            steps[own] = (weight[own].float() / scales[i, j]).to(dtype)
    return steps, scales


def in_fp8(
    directory: Path, block: tuple[int, int] = (16, 32), scales: torch.dtype = torch.float32
) -> None:
    """Store the projections of a saved model as DeepSeek and Qwen publish them."""

    def change(weights: Weights) -> Weights:
        stored = dict(weights)
        for name, weight in weights.items():
            if weight.dim() == 2 and "proj" in name:
                stored[name], of_blocks = fp8_of(weight, block)
                stored[f"{name}_scale_inv"] = of_blocks.to(scales)
        return stored

    rewrite(directory, change)
    about = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    configure(directory, quantization_config={**about, "weight_block_size": list(block)})


# How compressed-tensors describes the weights of a group.
FP8_WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}


def ints_of(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps packed into int32, and a scale for each group of a row, in the weight's dtype."""
    most = (1 << (bits - 1)) - 1
    groups = weight.float().view(len(weight), -1, group)
    scales = (groups.abs().amax(-1) / most).to(weight.dtype)
    steps = (groups / scales.float().unsqueeze(-1)).round().clamp(-most - 1, most)
    fields = steps.view(len(weight), -1, 32 // bits).long() + (1 << (bits - 1))
    words = (fields << (torch.arange(32 // bits) * bits)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32), scales


def in_compressed(directory: Path, way: str) -> None:
    """Store the projections of a saved model as compressed-tensors does.

    `way`: "channel", "tensor" or "block" of FP8, or "int4", "int8" and "int4-channel".
    """
    is_int = way.startswith("int")
    about: dict[str, Any] = dict(FP8_WEIGHTS, strategy=way)
    if is_int:
        bits = int(way[3])
        about = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
        about |= {"strategy": "channel"} if "channel" in way else {"group_size": 32}
    if way == "block":
        about["block_structure"] = [16, 32]

    def change(weights: Weights) -> Weights:
        stored = dict(weights)
        for name, weight in weights.items():
            if weight.dim() != 2 or "proj" not in name:
                continue
            if is_int:
                group = weight.shape[1] if "channel" in way else 32
                stem = name.removesuffix(".weight")
                words, scales = ints_of(stored.pop(name), bits, group)
                stored |= {f"{stem}.weight_packed": words, f"{stem}.weight_scale": scales}
                stored[f"{stem}.weight_shape"] = torch.tensor(weight.shape)
                continue
            blocks = {"channel": (1, weight.shape[1]), "tensor": tuple(weight.shape)}
            stored[name], scales = fp8_of(weight, blocks.get(way, (16, 32)))
            stored[f"{name}_scale"] = scales.view(1) if way == "tensor" else scales
        return stored

    rewrite(directory, change)
    form = "pack-quantized" if is_int else "float-quantized"
    group_0 = {"targets": ["Linear"], "weights": about, "input_activations": None, "format": form}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
    }
    config |= {"config_groups": {"group_0": group_0}, "quantization_status": "compressed"}
    configure(directory, quantization_config=config)


def in_mxfp4(directory: Path) -> None:
    """Store the experts of a saved gpt-oss as it is published."""

    def change(weights: Weights) -> Weights:
        stored = {}
        for name, weight in weights.items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                stored[name] = weight
                continue
            experts, rows, columns = weight.shape
            shape = experts, columns, rows // 32
            stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(119, 124, shape, dtype=torch.uint8)
        return stored

    rewrite(directory, change)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    about = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    configure(directory, quantization_config=about)


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_hidden_layers=3,
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=VOCABULARY,
            eos_token_id=None,
        )
    )


def deepseek_v3() -> Any:
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_hidden_layers=3,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=32,
            qk_nope_head_dim=32,
            v_head_dim=32,
            vocab_size=VOCABULARY,
            eos_token_id=None,
        )
    )


def gpt_oss() -> Any:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=3,
            num_local_experts=8,
            num_experts_per_tok=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=VOCABULARY,
            sliding_window=16,
            eos_token_id=None,
        )
    )


def published(name: str, directory: Path) -> Path:
    """A model of a kind, in bfloat16 and in the format in which that is published."""
    torch.manual_seed(0)
    kinds = {"llama": llama, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3, "gpt_oss": gpt_oss}
    kinds[name]().bfloat16().save_pretrained(directory)
    (in_mxfp4 if name == "gpt_oss" else in_fp8)(directory)
    return directory


KINDS = ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss"]
