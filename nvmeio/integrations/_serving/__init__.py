"""Servers: the identity of the model that one serves, and the settings of our offloader in SGLang.

`kv_identity` is for the caches of vLLM and SGLang, `sglang_settings` for `integrations.sglang`.
"""
