"""The inside of `nvmeio bench`.

Reading order: `workload` (what is to be done), `engines` (who can do it), `task` (one process's
part, here or in processes of their own), `session` (who runs when), `report`.
"""
