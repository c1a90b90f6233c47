"""Data sets and tables in files: records of one length, fetched by their numbers.

Reading order for newcomers: `records` (`Records`: what is where in the file), `prefetch` (`Gather`,
a batch on its way, and `Prefetch`, batches ahead of a loop). docs/data.md says what to do with
them.
"""

from nvmeio.data.prefetch import Gather as Gather
from nvmeio.data.prefetch import Prefetch as Prefetch
from nvmeio.data.records import Records as Records

__all__ = ["Gather", "Prefetch", "Records"]
