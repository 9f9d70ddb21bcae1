"""Names as POSIX has them: entries of directories, renaming, extended attributes, the trash. Pure."""
