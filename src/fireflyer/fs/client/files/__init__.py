"""Files for asyncio and for threads: names, attributes, open files, over the meta service and the chunk store."""
