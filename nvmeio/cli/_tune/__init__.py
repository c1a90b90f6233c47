"""The inside of `nvmeio tune`.

Reading order: `space` (which settings there are), `search` (which of them are looked at, and who
wins, without any I/O), `rig` (measuring one, and a whole run), `result`, `page` (the HTML).
"""
