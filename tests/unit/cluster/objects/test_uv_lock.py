"""A `uv.lock` becomes requirements with hashes: markers, extras, versions as the lock has them; the rest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.objects import uv_lock
from fireflyer.cluster.core.objects.uv_lock import requirements_of
from fireflyer.cluster.objects import LockFile

INDEX = 'source = { registry = "https://index.example/simple" }'
PROJECT = 'version = 1\nrevision = 3\nrequires-python = ">=3.11"\n'


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def package(name: str, body: str = "", *, version: str = "1.0", source: str = INDEX, files: str | None = None) -> str:
    files = (
        f'wheels = [{{ url = "https://f.example/{name}.whl", hash = "{digest(7)}", size = 3 }}]'
        if files is None
        else files
    )
    return f'\n[[package]]\nname = "{name}"\nversion = "{version}"\n{source}\n{files}\n{body}\n'


def project(dependencies: str, *packages: str, source: str = 'source = { virtual = "." }') -> bytes:
    mine = package("mine", f"dependencies = [{dependencies}]", source=source, files="")
    return (PROJECT + mine + "".join(packages)).encode()


def wanted(lock: bytes, **environment: str) -> dict[str, str]:
    """Name -> version, of what pip would install there."""
    text = requirements_of(lock).decode().replace("\\\n", " ")
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line.partition(" --hash=")[0])
        assert " --hash=sha256:" in line
        if requirement.marker is None or requirement.marker.evaluate(dict(environment)):
            assert requirement.name not in found, "twice"
            found[requirement.name] = str(requirement.specifier).removeprefix("==")
    return found


def test_what_the_project_depends_on_is_listed_with_all_hashes_and_nothing_else() -> None:
    files = f'sdist = {{ url = "u", hash = "{digest(2)}" }}\nwheels = [{{ url = "v", hash = "{digest(1)}" }}]'
    lock = project(
        '{ name = "six" }',
        package("six", 'dependencies = [{ name = "deep" }]', files=files),
        package("deep", 'dependencies = [{ name = "six" }]', version="2.0+cu121"),
        package("of-a-group"),
    )
    assert requirements_of(lock).decode() == (
        "# of a uv.lock\n"
        f"deep==2.0+cu121 \\\n    --hash={digest(7)}\n"
        f"six==1.0 \\\n    --hash={digest(1)} \\\n    --hash={digest(2)}\n"
    )


def test_a_package_is_wanted_where_the_markers_of_one_way_to_it_hold() -> None:
    lock = project(
        '{ name = "a", marker = "sys_platform == \'linux\'" }, { name = "b" }',
        package("a", 'dependencies = [{ name = "c", marker = "platform_machine == \'x86_64\'" }]'),
        package("b", 'dependencies = [{ name = "c", marker = "sys_platform == \'darwin\'" }]'),
        package("c"),
    )
    assert set(wanted(lock, sys_platform="linux", platform_machine="x86_64")) == {"a", "b", "c"}
    assert set(wanted(lock, sys_platform="linux", platform_machine="aarch64")) == {"a", "b"}
    assert set(wanted(lock, sys_platform="darwin", platform_machine="aarch64")) == {"b", "c"}


def test_versions_that_differ_by_platform_and_extras_of_packages_are_those_of_the_lock() -> None:
    lock = project(
        '{ name = "n", version = "1.0", marker = "python_full_version < \'3.12\'" },'
        '{ name = "n", version = "2.0", marker = "python_full_version >= \'3.12\'" },'
        '{ name = "t", extra = ["fast"] }',
        package("n", version="1.0"),
        package("n", version="2.0"),
        package("t", '[package.optional-dependencies]\nfast = [{ name = "o" }]\nslow = [{ name = "p" }]'),
        package("o"),
        package("p"),
    )
    assert wanted(lock, python_full_version="3.11.2") == {"n": "1.0", "t": "1.0", "o": "1.0"}
    assert wanted(lock, python_full_version="3.13.0") == {"n": "2.0", "t": "1.0", "o": "1.0"}


def test_a_script_and_a_package_from_a_url_are_taken() -> None:
    files = f'wheels = [{{ url = "https://f.example/w.whl", hash = "{digest(3)}" }}]'
    url = package("w", source='source = { url = "https://f.example/w.whl" }', files=files)
    lock = f'version = 1\n[manifest]\nrequirements = [{{ name = "w" }}]\n{url}'.encode()
    assert f"w @ https://f.example/w.whl \\\n    --hash={digest(3)}\n" in requirements_of(lock).decode()


SIX = '{ name = "six" }'


@pytest.mark.parametrize(
    ("lock", "said"),
    [
        (b"version = 2", "format version 2"),
        (b"version", "cannot be read"),
        (b"version = 1\nx = " + b"[" * 50_000, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"version = 1", "of 0 projects"),
        (project(SIX), "names 'six' and has no such package"),
        (project(SIX, package("six", source='source = { git = "https://h/x?rev=1#2" }')), "version control"),
        (project(SIX, package("six", source='source = { editable = "packages/six" }')), "a directory or file"),
        (project(SIX, package("six", files="")), "without a hash"),
        (project(SIX, package("six", files='wheels = [{ path = "six.whl" }]')), "without a hash"),
        (project(SIX, package("six", files='wheels = [{ hash = "md5:00" }]')), "without a hash"),
        (project(SIX, package("six", version="1.0\\n--index-url=http://evil")), "has no version"),
        (project('{ name = "a b" }', package("a b")), "is no name"),
        (project('{ name = "six", marker = "os_name == 1\\n--pre" }', package("six")), "marker for 'six' that is none"),
        (project('{ name = "six", marker = "(os_name == \'x\'" }', package("six")), "marker for 'six' that is none"),
        (project('{ name = "six", marker = "extra == \'x\'" }', package("six")), "extras that conflict"),
    ],
)  # fmt: skip
def test_what_cannot_be_installed_by_hashes_is_refused_in_one_line(lock: bytes, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        requirements_of(lock)
    assert said in raised.value.message
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 500


def test_what_is_followed_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    many = ", ".join(f'{{ name = "six", marker = "os_name == \'{number}\'" }}' for number in range(100))
    with pytest.raises(UsageError, match="more than 64 markers"):
        requirements_of(project(many, package("six")))
    monkeypatch.setattr(uv_lock, "MAX_STEPS", 2)
    chain = [package(f"p{n}", f'dependencies = [{{ name = "p{n + 1}" }}]') for n in range(5)]
    with pytest.raises(UsageError, match="more dependencies than are followed"):
        requirements_of(project('{ name = "p0" }', *chain, package("p5")))


@given(st.data())
def test_requirements_are_those_that_a_walk_with_evaluated_markers_finds(data: st.DataObject) -> None:
    """Random graphs, cycles too; an independent walk of each environment."""
    count = data.draw(st.integers(1, 6))
    conditions = st.sampled_from(
        ["", *(f"{name} == '{value}'" for name in ("os_name", "sys_platform") for value in "xy")]
    )
    edges = {
        source: data.draw(st.lists(st.tuples(st.integers(0, count - 1), conditions), max_size=3))
        for source in range(-1, count)
    }

    def listed(source: int) -> str:
        return ", ".join(f'{{ name = "p{to}", marker = "{marker}" }}' for to, marker in edges[source])

    lock = project(listed(-1), *(package(f"p{n}", f"dependencies = [{listed(n)}]") for n in range(count)))
    for os_name in "xy":
        for sys_platform in "xy":
            holds = {"", f"os_name == '{os_name}'", f"sys_platform == '{sys_platform}'"}
            reached: set[int] = set()
            todo = [-1]
            while todo:
                for to, marker in edges[todo.pop()]:
                    if marker in holds and to not in reached:
                        reached.add(to)
                        todo.append(to)
            assert set(wanted(lock, os_name=os_name, sys_platform=sys_platform)) == {f"p{n}" for n in reached}


def test_a_lock_file_of_uv_is_told_by_its_name_and_checked_before_it_travels(tmp_path: Path) -> None:
    for name in ("uv.lock", "train.py.lock"):
        (tmp_path / name).write_bytes(project(SIX, package("six")))
        lock = LockFile.read(str(tmp_path / name))
        assert lock.kind == "uv.lock"
        lock.check_hashes()
        found = lock.installable()
        assert (found.kind, found.whole, found.title) == ("requirements.txt", True, "uv.lock")
        assert found.installable() == found
    with pytest.raises(UsageError, match="without a hash"):
        LockFile("uv.lock", project(SIX, package("six", files=""))).check_hashes()
