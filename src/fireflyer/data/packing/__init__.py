"""Makes data sets of files, JSONL and Parquet: what `ff data pack` does."""

from fireflyer.data.packing.items import InvalidInput, Item, Position
from fireflyer.data.packing.packer import Observer, Packed, PackOptions, pack
from fireflyer.data.packing.values import Encoding, encoding_of

__all__ = ["Encoding", "InvalidInput", "Item", "Observer", "PackOptions", "Packed", "Position", "encoding_of", "pack"]
