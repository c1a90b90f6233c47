"""LMCache's objects on the drive: an L2 adapter for its server, as a plug-in.

    lmcache server --l1-size-gb 20 --eviction-policy LRU --l2-adapter '{"type": "plugin",
        "module_path": "nvmeio.integrations.lmcache", "class_name": "NvmeL2Adapter",
        "adapter_params": {"directory": "/mnt/nvme/kv", "capacity_bytes": "200GB"}}'

To be read in this order: `_keys` (how an object is named, and what it is of), `_adapter`.

Written for LMCache 0.5.6 (`lmcache.v1.distributed.l2_adapters.base`); see docs/serving.md.
"""

from __future__ import annotations

from typing import Any

from nvmeio.integrations._clients import client, joined, on_demand
from nvmeio.integrations.lmcache._adapter import Adapter as Adapter

__all__ = ["Adapter", "NvmeL2Adapter"]


def _adapter() -> Any:
    base = client(
        "lmcache.v1.distributed.l2_adapters.base",
        "L2AdapterInterface",
        wanted="nvmeio plugs into LMCache as an L2 adapter",
        remedy="pip install 'lmcache>=0.5.6'",
    )
    return joined("NvmeL2Adapter", Adapter, base)


__getattr__ = on_demand(__name__, "NvmeL2Adapter", _adapter)
