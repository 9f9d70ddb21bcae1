"""The user's directory travels with the task: each run starts in a copy of it as it was submitted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.support.patience import allowed_s
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import RunningPlatform, wait_for

from fireflyer.base.errors import NotFound, PermissionDenied, UsageError
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.objects.frames import frame_header
from fireflyer.cluster.core.platform.commands import DrainNode, ResumeNode
from fireflyer.cluster.schema.sync import FetchBlob
from fireflyer.cluster.schema.tasks import Cause, Outcome, Program, TaskSpec
from fireflyer.cluster.sending import Sent, send_directory, snapshot_of

pytestmark = pytest.mark.processes

SCRIPT: Final = """\
import os, sys
from pathlib import Path

results, name = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
text = Path("data/words.txt").read_text() + os.environ.get("WORD", "") + str(os.path.islink("link"))
Path("data/words.txt").write_text("changed by the run")
Path("scratch").write_text("x")
(results / f"{name}.{rank}.part").write_text(f"{text}|{os.getcwd()}|{os.path.exists('ignored')}")
os.rename(results / f"{name}.{rank}.part", results / f"{name}.{rank}.result")
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "experiment"
    (made / "data").mkdir(parents=True)
    (made / "train.py").write_text(SCRIPT)
    (made / "data" / "words.txt").write_text("as submitted ")
    (made / "ignored").write_text("large")
    (made / ".ffignore").write_text("ignored\n")
    (made / "link").symlink_to("data/words.txt")
    return made


def task(sent: Sent, name: str, results: Path, *, nodes: int = 1) -> TaskSpec:
    program = Program(script="train.py", args=(str(results), name), snapshot=sent.snapshot, env={"WORD": "env "})
    return TaskSpec(name=name, program=program, least_nodes=nodes, most_nodes=nodes)


def send(client: Client, directory: Path, cache: Path) -> Sent:
    return send_directory(client, snapshot_of(str(directory), cache_directory=str(cache)))


def ff(cwd: Path, *arguments: str, code: int = 0) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cwd.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fireflyer", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=allowed_s(60), check=False,
    )  # fmt: skip
    assert done.returncode == code, done
    return done.stdout + done.stderr


# --- a manager alone ---


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with ManagerProcess(tmp_path_factory.mktemp("snapshots") / "manager") as running:
        wait_for(lambda: running.ask("GET", "/api/v1/health").status == 200, "it leads")
        yield running


def test_only_what_changed_is_sent_and_each_user_sends_all(
    manager: ManagerProcess, directory: Path, tmp_path: Path
) -> None:
    # Tests may run in another order on this manager: the files of this one are of nobody else.
    for file in ("train.py", "data/words.txt", ".ffignore"):
        with open(directory / file, "a") as open_file:
            open_file.write("# of this test\n")
    with manager.client("ada") as ada, manager.client("bob") as bob:
        first = send(ada, directory, tmp_path / "cache")
        assert (first.files, first.sent_files) == (3, 3), "train.py, words.txt, .ffignore"
        (directory / "data" / "words.txt").write_text("edited")
        second = send(ada, directory, tmp_path / "cache")
        assert (second.files, second.sent_files, second.sent_bytes) == (3, 1, len("edited"))
        assert send(bob, directory, tmp_path / "cache").sent_files == 3, "nobody has a file for knowing its hash"


def test_a_task_names_only_a_snapshot_that_its_user_has_sent(
    manager: ManagerProcess, directory: Path, tmp_path: Path
) -> None:
    with manager.client("ada") as ada, manager.client("bob") as bob:
        (directory / "own").write_text("of ada")
        found = snapshot_of(str(directory))
        spec = TaskSpec(name="early", program=Program(script="train.py", snapshot=found.snapshot))
        missing = ada.begin_snapshot(found.snapshot, found.encoded)
        assert missing
        with pytest.raises(NotFound, match="missing"):
            ada.seal_snapshot(found.snapshot)
        with pytest.raises(UsageError, match="not complete; send it before"):
            ada.submit(spec, key="early")
        sent = send_directory(ada, found)
        with pytest.raises(UsageError, match="not complete; send it before"):
            bob.submit(spec, key="of-bob")
        assert ada.submit(task(sent, "early", tmp_path), key="early-2")


def test_other_bytes_than_those_that_were_hashed_are_refused(manager: ManagerProcess, directory: Path) -> None:
    (directory / "own").write_text("of bob")
    found = snapshot_of(str(directory))
    with manager.client("bob") as bob:
        with pytest.raises(UsageError, match="not that of snapshot"):
            bob.begin_snapshot("0" * 64, found.encoded)
        for stream in (b"", b"half a header"):
            with pytest.raises(NotFound, match="bob has not begun to send snapshot 000000000000…, or too long ago"):
                bob.send_blobs("0" * 64, len(stream), lambda stream=stream: [stream])  # type: ignore[misc]
        (blob, *_) = bob.begin_snapshot(found.snapshot, found.encoded)
        for stream in (frame_header(blob, 3) + b"bad", frame_header(blob, 1 << 62) + b"short", b"half a header"):
            with pytest.raises(UsageError):
                bob.send_blobs(found.snapshot, len(stream), lambda stream=stream: [stream])  # type: ignore[misc]
        stranger = frame_header("f" * 64, 1) + b"x"
        with pytest.raises(NotFound, match="is not in snapshot"):
            bob.send_blobs(found.snapshot, len(stranger), lambda: [stranger])


def test_a_node_gets_blobs_of_the_snapshots_of_its_runs_alone(
    manager: ManagerProcess, directory: Path, tmp_path: Path
) -> None:
    large = os.urandom(3 << 20)
    (directory / "large").write_bytes(large)
    with ScriptedAgent(manager, "gpu-1") as agent, manager.client("ada") as ada, manager.client("admin") as admin:
        agent.appear(admin)
        admin.command(DrainNode(node="gpu-1", reason="not yet"))
        found = snapshot_of(str(directory))
        sent = send_directory(ada, found)
        (number,) = ada.submit(task(sent, "fetched", tmp_path), key="fetched")
        blob = next(entry.blob for entry in found.manifest.entries if entry.path == "large")  # type: ignore[union-attr]
        with pytest.raises(PermissionDenied, match="has no run with snapshot"):
            agent.fetch(FetchBlob(snapshot=sent.snapshot, blob=blob, offset=0))
        admin.command(ResumeNode(node="gpu-1"))
        while not any(order.snapshot == sent.snapshot for order in agent.orders.runs):
            agent.sync()
            agent.follow()
        data = b""
        while piece := agent.fetch(FetchBlob(snapshot=sent.snapshot, blob=blob, offset=len(data))).data:
            data += piece
        assert data == large
        middle = agent.fetch(FetchBlob(snapshot=sent.snapshot, blob=blob, offset=2_000_001))
        assert middle.data == large[2_000_001:][: len(middle.data)]
        assert middle.data
        with pytest.raises(NotFound):
            agent.fetch(FetchBlob(snapshot=sent.snapshot, blob="f" * 64, offset=0))
        while ada.task(number).task.outcome is None:
            agent.sync()
            agent.follow()


# --- the whole platform ---


@pytest.mark.slow
def test_a_run_sees_the_directory_as_it_was_submitted(directory: Path, tmp_path: Path) -> None:
    """Edited after the submission, while no node was free; the second submission sends what changed alone."""
    with RunningPlatform(directory / "platform", nodes=1) as platform:
        client = platform.client()
        client.command(DrainNode(node="agent-1", reason="so that the task waits"))
        submit = ("submit", "--name", "first", "-e", "WORD=env ", "train.py", "--", str(tmp_path), "first")
        assert "3 files, " in (said := ff(directory, *submit)), said
        assert "sent 3" in said
        (directory / "data" / "words.txt").write_text("edited later ")
        client.command(ResumeNode(node="agent-1"))
        assert platform.finished(client, 1).task.outcome is Outcome.SUCCEEDED
        text, cwd, has_ignored = (tmp_path / "first.0.result").read_text().split("|")
        assert (text, has_ignored) == ("as submitted env True", "False")
        assert (directory / "data" / "words.txt").read_text() == "edited later ", "a run writes into its copy"
        wait_for(lambda: not os.path.exists(cwd), "the copy is removed after the run")
        again = ff(directory, *(word.replace("first", "again") for word in submit))
        assert "sent 1, 13 B" in again
        assert platform.finished(client, 2).task.outcome is Outcome.SUCCEEDED
        assert (tmp_path / "again.0.result").read_text().startswith("edited later env True|")
        assert "is not in" in ff(directory, "submit", "../other.py", code=2)
        assert "there is no none.py" in ff(directory, "submit", "none.py", code=2)


@pytest.mark.slow
def test_each_node_of_a_run_has_a_copy_and_a_manager_that_is_started_again_gives_it(
    directory: Path, tmp_path: Path
) -> None:
    platform = RunningPlatform(tmp_path / "platform", nodes=2)
    with platform:
        client = platform.client()
        for node in ("agent-1", "agent-2"):
            client.command(DrainNode(node=node, reason="so that the task waits"))
        sent = send(client, directory, tmp_path / "cache")
        (number,) = client.submit(task(sent, "both", tmp_path, nodes=2), key="both")
        platform.end()
        platform.start()
        client = platform.client()
        assert send(client, directory, tmp_path / "cache").sent_files == 0, "what rows name is known again"
        for node in ("agent-1", "agent-2"):
            client.command(ResumeNode(node=node))
        done = platform.finished(client, number)
        assert [run.cause for run in done.runs] == [Cause.SUCCEEDED], done
        results = [(tmp_path / f"both.{rank}.result").read_text().split("|") for rank in range(2)]
        assert [text for text, _, _ in results] == ["as submitted env True"] * 2
        assert len({cwd for _, cwd, _ in results}) == 2, "each node has its own"
        (directory / "train.py").write_text("import sys; print(sys.executable, flush=True)")
        program = Program(script="train.py", snapshot=send(client, directory, tmp_path / "cache").snapshot)
        missing = msgspec.structs.replace(program, python="/none/bin/python")
        (number,) = client.submit(TaskSpec(name="missing", program=missing), key="missing")
        done = platform.finished(client, number)
        assert [run.cause for run in done.runs] == [Cause.PROGRAM], done
        assert "/none/bin/python" in done.task.reason, done
