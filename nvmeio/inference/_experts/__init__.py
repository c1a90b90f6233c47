"""Experts of mixtures: a cache in memory of those that tokens were routed to, over all layers.

Start with `sets`: which weights are experts, and where an expert's bytes lie. Then `places` has the
memory of those that are kept (`on_device` that of a GPU), `recency` says which one goes, `arrivals`
are reads, and `cache` is what a call asks for. With `ranks` several processes compute with each
other's.
"""
