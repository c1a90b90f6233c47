"""The inside of `nvmeio tune`.

Reading order: `space` (which settings there are), `search` (which of them are looked at, without
any I/O), `final` (who wins), `rig` (measuring one), `run`, `result`, `page` and `charts` (the
HTML), `extra` (the libraries for both).
"""
