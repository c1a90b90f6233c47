"""A directory for PYTHONPATH; see `nvmeio.compat.deepspeed.installing`."""
