"""DeepSpeed's ZeRO-3 inference with parameters on NVMe, on a CPU."""

from __future__ import annotations

import importlib
import os

import torch
from _measure import Sample

from peers.inference import Decoding, _transformers
from peers.zero3 import start_deepspeed


class ZeroInference(Decoding):
    """One engine in this process, all of its parameters on the drive."""

    def __init__(self) -> None:
        _transformers()
        self._deepspeed = start_deepspeed()

    def prepare(self, directory: str, nvme: str) -> None:
        os.makedirs(nvme, exist_ok=True)
        transformers = _transformers()
        integration = importlib.import_module("transformers.integrations")
        model_config = transformers.AutoConfig.from_pretrained(directory)
        largest = model_config.hidden_size * model_config.intermediate_size
        largest = max(largest, model_config.hidden_size * model_config.vocab_size)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "aio": {
                "block_size": 1 << 20,
                "queue_depth": 32,
                "intra_op_parallelism": 1,
                "single_submit": False,
                "overlap_events": True,
            },
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": 2 * largest,
                "stage3_param_persistence_threshold": model_config.hidden_size,
                "stage3_max_live_parameters": 4 * largest,
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": nvme,
                    "pin_memory": True,
                    "buffer_count": 8,
                    "buffer_size": 2 * largest,
                },
            },
        }
        self._config = integration.HfDeepSpeedConfig(config)  # kept: from_pretrained asks for it
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        self._engine = self._deepspeed.initialize(model=model, config_params=config)[0]
        self._engine.module.eval()
        self.model = self._engine.module
        self.begin()

    def passes(self, count: int) -> Sample:
        return self._timed(count)

    def close(self) -> None:
        with torch.no_grad():
            super().close()
