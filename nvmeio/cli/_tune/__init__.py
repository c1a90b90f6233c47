"""The inside of `nvmeio tune`.

Reading order: `space` (which settings there are), `search` (who survives, without any I/O),
`rig` (measuring one), `result`, `page` and `charts` (the HTML).
"""
