"""Programs whose whole work is in a mount: packages are installed, trees mirrored, programs built and built again."""

from __future__ import annotations

import ensurepip
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import Mount, mounted, needs_fuse

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def whole(shared_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    place = str(tmp_path_factory.mktemp("place"))
    ff = [sys.executable, "-P", "-m", "fireflyer", "fs", "mount", place, "--dir", str(shared_cluster.directory)]
    with mounted(ff, place) as found:
        yield found


@pytest.fixture
def mount(whole: Mount, tmp_path: Path) -> Mount:
    """A directory of its own in it."""
    os.mkdir(os.path.join(whole.path, tmp_path.name))
    return Mount(whole.process, os.path.join(whole.place, tmp_path.name))


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"there is no {program}")


def test_pip_installs_and_removes_packages_in_an_environment_there(mount: Mount) -> None:
    places = [Path(ensurepip.__file__).with_name("_bundled"), Path("/usr/share/python-wheels")]
    wheel = next((found for place in places for found in place.glob("pip-*.whl")), None)
    if wheel is None:
        pytest.skip("this Python brings no wheel")
    shutil.copy(wheel, mount.path)
    mount.run(sys.executable, "-m", "venv", "--without-pip", "env")
    pip = [sys.executable, "-m", "pip", "--python", "env/bin/python", "--disable-pip-version-check", "--no-cache-dir"]
    mount.run(*pip, "install", "-q", "--no-index", "--no-compile", wheel.name)
    # What was installed works by itself, and knows each of its files by length and hash.
    assert mount.run("env/bin/python", "-B", "-m", "pip", "--version").split()[3].startswith(f"{mount.place}/env/lib/")
    records = Path(mount.path, "env").glob("lib/python*/site-packages/pip-*.dist-info/RECORD")
    assert len(next(records).read_text().splitlines()) > 100
    mount.run(*pip, "uninstall", "-q", "-y", "pip")
    assert not list(Path(mount.path, "env").glob("lib/python*/site-packages/pip*"))


def tree(place: Path) -> dict[str, tuple[int, int, int, bytes | str]]:
    """All that is in it: mode, time of change, links, content."""
    found: dict[str, tuple[int, int, int, bytes | str]] = {}
    for path in sorted(place.rglob("*")):
        at = path.lstat()
        content: bytes | str = os.readlink(path) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
        # Of what is no file rsync looks at the seconds only, and leaves what is within the same one.
        plain = path.is_file() and not path.is_symlink()
        links, changed = 0 if path.is_dir() else at.st_nlink, at.st_mtime_ns // (1 if plain else 10**9)
        found[str(path.relative_to(place))] = at.st_mode, changed, links, content
    return found


@needs("rsync")
def test_rsync_mirrors_into_it_and_out_of_it_and_sends_only_what_changed(mount: Mount, tmp_path: Path) -> None:
    source, back, there = tmp_path / "source", tmp_path / "back", Path(mount.path, "mirror")
    (source / "deep" / "er").mkdir(parents=True)
    rng = random.Random(5)
    for number in range(40):
        (source / "deep" / f"file-{number}").write_bytes(rng.randbytes(number * 777))
    (source / "large").write_bytes(rng.randbytes(3_000_000))
    os.link(source / "large", source / "deep" / "er" / "same")
    (source / "link").symlink_to("deep/file-1")
    (source / "deep" / "file-2").chmod(0o4750)
    os.utime(source / "deep" / "file-3", ns=(5, 1_234_567_891_234_567_891))
    os.setxattr(source / "deep" / "file-4", "user.colour", b"blue")
    copy = ["rsync", "-aHX", "--delete", "--itemize-changes"]
    mount.run(*copy, f"{source}/", "mirror/")
    assert tree(there) == tree(source)
    assert os.getxattr(there / "deep" / "file-4", "user.colour") == b"blue"
    assert mount.run(*copy, f"{source}/", "mirror/") == ""
    data = bytearray((source / "large").read_bytes())
    data[1_500_000:1_500_003] = b"new"
    (source / "large").write_bytes(data)
    (source / "deep" / "file-5").unlink()
    (source / "deep" / "file-6").rename(source / "file-6")
    changed = mount.run(*copy, "--inplace", "--no-whole-file", f"{source}/", "mirror/").splitlines()
    assert sorted(line.split()[1] for line in changed if not line.endswith("/")) == [
        "deep/file-5", "deep/file-6", "file-6", "large",
    ]  # fmt: skip
    assert tree(there) == tree(source)
    assert mount.run(*copy, "--checksum", f"{source}/", "mirror/") == ""
    subprocess.run(mount.command([*copy, "mirror/", f"{back}/"]), check=True, stdout=subprocess.DEVNULL)
    assert tree(back) == tree(source)


@needs("make")
@needs("cc")
@needs("ar")
def test_programs_are_built_and_only_what_changed_is_built_again(mount: Mount) -> None:
    place = Path(mount.path)
    for number in range(6):
        (place / f"part{number}.c").write_text(f'#include "all.h"\nint part{number}(int x) {{ return x + ADD; }}\n')
    declared = "".join(f"int part{number}(int);\n" for number in range(6))
    (place / "all.h").write_text(f"#define ADD 1\n{declared}")
    called = "".join(f"x = part{number}(x); " for number in range(6))
    (place / "main.c").write_text(
        f'#include <stdio.h>\n#include "all.h"\nint main(void) {{ int x = 0; {called}printf("%d\\n", x); return 0; }}\n'
    )
    (place / "Makefile").write_text(
        "OBJECTS := $(patsubst %.c,%.o,$(wildcard part*.c))\n"
        "program: main.o libparts.a\n\t$(CC) -o $@ $^\n"
        "libparts.a: $(OBJECTS)\n\t$(AR) rcs $@ $^\n"
        "-include $(wildcard *.d)\n"
        "%.o: %.c\n\t$(CC) -MMD -c -g -o $@ $<\n"
    )
    built = mount.run("make", "-j2").splitlines()
    assert sum(" -c " in line for line in built) == 7
    assert mount.run("./program") == "6\n"
    assert "up to date" in mount.run("make")
    (place / "part3.c").write_text('#include "all.h"\nint part3(int x) { return x + 10; }\n')
    built = mount.run("make").splitlines()
    assert [line.split()[-1] for line in built if " -c " in line] == ["part3.c"]
    assert mount.run("./program") == "15\n"
    (place / "all.h").write_text(f"#define ADD 2\n{declared}")
    assert sum(" -c " in line for line in mount.run("make", "-j2").splitlines()) == 7
    assert mount.run("./program") == "20\n"


def test_a_database_is_whole_after_its_program_was_killed_in_a_transaction(mount: Mount) -> None:
    """The journal that it left is found, and undone."""

    def run(*lines: str) -> str:
        return mount.run(sys.executable, "-c", "\n".join((_BASE, *lines)))

    run("base.execute('create table t(a)')", "base.execute('insert into t values(1)')")
    with pytest.raises(AssertionError):
        run(
            "base.execute('pragma cache_size=1')",
            "base.execute('begin')",
            "base.executemany('insert into t values(?)', [(bytes(3000),)] * 500)",
            "os.kill(os.getpid(), 9)",
        )
    assert os.path.getsize(os.path.join(mount.path, "base-journal")) > 0
    assert os.path.getsize(os.path.join(mount.path, "base")) > 100_000
    found = run("print(*base.execute('select count(*), max(a) from t'), *base.execute('pragma integrity_check'))")
    assert found == "(1, 1) ('ok',)\n"


_BASE = """
import os, sqlite3
base = sqlite3.connect("base", isolation_level=None)
"""
