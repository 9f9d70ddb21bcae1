"""A program that was written for 3FS rings runs in a mount of ours, and mount and rings see the same files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import mounted, needs_fuse

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]

_PROGRAM = """
import datetime, os, sys
import fireflyer.fs.usrbio
fireflyer.fs.usrbio.register()
from multiprocessing.shared_memory import SharedMemory
from hf3fs_fuse.io import deregister_fd, extract_mount_point, make_ioring, make_iovec, read_file, register_fd

PAGE, PAGES = 65536, 32
path = os.path.join(os.getcwd(), "usrbio", "pages")
os.mkdir("usrbio")
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, PAGE * PAGES)
register_fd(fd)
place = extract_mount_point(path)
assert place == os.getcwd(), place
os.rename(path, path + ".renamed")  # a descriptor stays what it is
memory = SharedMemory(create=True, size=PAGE * PAGES)
vector = make_iovec(memory, place)
memory.unlink()
data = os.urandom(PAGE * PAGES)
vector[:] = data
writes = make_ioring(place, PAGES, for_read=False, timeout=1, numa=-1)
for number in range(PAGES):
    writes.prepare(vector[number * PAGE:(number + 1) * PAGE], False, fd, number * PAGE)
done = writes.submit().wait(min_results=PAGES, timeout=datetime.timedelta(seconds=60))
assert [one.result for one in done] == [PAGE] * PAGES, done
vector[:] = bytes(len(vector))
reads = make_ioring(place, PAGES, for_read=True, timeout=1)
for number in range(PAGES):
    reads.prepare(vector[number * PAGE:(number + 1) * PAGE], True, fd, number * PAGE, userdata=number)
done = reads.submit().wait(min_results=PAGES)
assert sorted(one.userdata for one in done) == list(range(PAGES))
assert bytes(vector[:]) == data
deregister_fd(fd)
os.close(fd)
with open(path + ".renamed", "rb") as file:
    assert file.read() == data
with open("usrbio/plain", "wb") as file:
    file.write(data[:100000])
assert bytes(read_file("usrbio/plain")) == data[:100000]
del vector, reads, writes, done
memory.close()
print("the same")
"""


def test_rings_and_mount_see_the_same_files(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    command = [
        sys.executable,
        "-P",
        "-m",
        "fireflyer",
        "fs",
        "mount",
        str(place),
        "--dir",
        str(shared_cluster.directory),
    ]
    with mounted(command, str(place)) as mount:
        assert mount.run(sys.executable, "-P", "-c", _PROGRAM) == "the same\n"
