"""What the client of files decides without a clock or a network: where bytes are, what waits to be written, what is
fetched ahead, which numbers requests have. Shells: `fireflyer.fs.client.files.asyncio_files` and its neighbours."""
