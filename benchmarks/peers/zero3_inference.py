"""DeepSpeed's ZeRO-3 inference with parameters on NVMe, on a CPU."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from typing import Any

import torch
from _measure import Sample
from _worker import PeerUnavailable

from peers.deepspeed import INSTALL, INSTALL_BUILD
from peers.inference import Decoding, _transformers
from peers.zero3 import _free_port


class ZeroInference(Decoding):
    """One engine in this process, all of its parameters on the drive."""

    def __init__(self) -> None:
        _transformers()
        os.environ.update(
            DS_ACCELERATOR="cpu",
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(_free_port()),
        )
        os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
        try:
            self._deepspeed: Any = importlib.import_module("deepspeed")
        except ImportError as error:
            raise PeerUnavailable(f"DeepSpeed cannot be imported ({error})", INSTALL) from error
        for tool in ("ninja", "c++"):
            if shutil.which(tool) is None:
                raise PeerUnavailable(f"DeepSpeed's ops need {tool} to build", INSTALL_BUILD)
        builders = importlib.import_module("deepspeed.ops.op_builder")
        if not builders.AsyncIOBuilder().is_compatible(verbose=False):
            raise PeerUnavailable("its op needs libaio's headers to build", INSTALL_BUILD)
        builders.AsyncIOBuilder().load(verbose=False)
        self._deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._deepspeed.init_distributed(dist_backend="gloo")

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
