"""Our checkpoint format for users of `torch.distributed.checkpoint` (DCP).

    dcp.save(state, storage_writer=FireFlyerWriter("checkpoints/step-00000100"))
    dcp.load(state, storage_reader=FireFlyerReader("checkpoints/step-00000100"))

With checksums, commit by rename, and range reads where a load wants other shards than a save wrote.
"""

from fireflyer.checkpoint.dcp.calls import async_save, load, save
from fireflyer.checkpoint.dcp.reader import FireFlyerReader
from fireflyer.checkpoint.dcp.writer import FireFlyerWriter

__all__ = ["FireFlyerReader", "FireFlyerWriter", "async_save", "load", "save"]
