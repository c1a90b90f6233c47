"""llama.cpp in the wheel of xllamacpp: a model from a GGUF file, and greedy completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xllamacpp


def opened(path: Path, mapped: bool = True) -> Any:
    """The server of one model, with as many threads as torch has; `mapped`: over the file."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    how = xllamacpp.llama_load_mode
    params.load_mode = how.LLAMA_LOAD_MODE_MMAP if mapped else how.LLAMA_LOAD_MODE_NONE
    params.no_extra_bufts = mapped  # in the layout that it prefers all would be copied
    params.warmup = params.fit_params = False
    params.verbosity = params.cache_ram_mib = 0
    return xllamacpp.Server(params)


def completed(server: Any, prompt: Sequence[int], count: int, keeps_prompt: bool) -> Any:
    """Its answer with the likeliest tokens after a prompt, whose keys and values it may keep."""
    found = server.handle_completions(
        {
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": keeps_prompt,
        }
    )
    if "choices" not in found:
        raise RuntimeError(f"llama.cpp computes nothing: {found}")
    return found
