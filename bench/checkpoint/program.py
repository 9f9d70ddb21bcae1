"""The plain program that ours is held to, and the bounds: a copy, and the disk.

It copies tensors one after the other into memory that is aligned and touched, and writes that with O_DIRECT, 16 MiB at
a time, one write after the other, then fsync; it reads in the same way. No format, no checksum, no commit.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

import torch

__all__ = ["PIECE_BYTES", "State", "aligned", "copy_all", "program_load", "program_save", "read_raw", "write_raw"]

PIECE_BYTES: Final = 16 << 20
_ALIGN: Final = 4096
State = dict[str, torch.Tensor]


def aligned(size_bytes: int) -> torch.Tensor:
    """Bytes at a page, all touched."""
    whole = max(size_bytes + -size_bytes % _ALIGN, _ALIGN)
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(14)  # MADV_HUGEPAGE
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def copy_all(state: State, image: torch.Tensor) -> None:
    at = 0
    for tensor in state.values():
        image[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        at += tensor.nbytes


def write_raw(path: str, image: torch.Tensor) -> None:
    data = image.numpy().data
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        for at in range(0, len(data), PIECE_BYTES):
            os.pwrite(fd, data[at : at + PIECE_BYTES], at)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_raw(path: str, image: torch.Tensor) -> None:
    data = image.numpy().data
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for at in range(0, len(data), PIECE_BYTES):
            os.preadv(fd, [data[at : at + PIECE_BYTES]], at)
    finally:
        os.close(fd)


def program_save(path: str, state: State, image: torch.Tensor) -> None:
    copy_all(state, image)
    write_raw(path, image)


def program_load(path: str, target: State, piece: torch.Tensor) -> None:
    """Into `target`, in its order, through one buffer of `PIECE_BYTES`."""
    data = piece.numpy().data
    places = [tensor.reshape(-1).view(torch.uint8) for tensor in target.values()]
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        index, start, at = 0, 0, 0
        while index < len(places):
            read = os.preadv(fd, [data], at)
            used = 0
            while index < len(places) and used < read:
                taken = min(read - used, places[index].numel() - start)
                places[index][start : start + taken].copy_(piece[used : used + taken])
                used, start = used + taken, start + taken
                if start == places[index].numel():
                    index, start = index + 1, 0
            at += read
    finally:
        os.close(fd)
