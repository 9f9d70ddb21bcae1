"""Jobs that cannot start are refused in one line that says what to do, and nothing is made."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest
import uvloop

from fireflyer.base.errors import Exists, FireflyerError, PermissionDenied, UsageError
from fireflyer.base.port_range import PortRange
from fireflyer.cluster.launcher import _listen, run_job
from fireflyer.cluster.launcher.checks import RANKS_PER_CORE, check_job, command_of
from fireflyer.cluster.schema.job import Fault, JobSpec, Remote, Rendezvous, parse_fault
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.devices import Devices, find_devices
from fireflyer.runtime.rpc import Accepts, RpcServer

TWO_CORES = Devices(gpus=0, cores=2)
FOUR_GPUS = Devices(gpus=4, cores=64)
PORTS = PortRange(29500, 29599)


def spec_of(tmp_path: Path, **changes: object) -> JobSpec:
    script = tmp_path / "train.py"
    script.touch()
    return msgspec.structs.replace(JobSpec(script=str(script), run_dir=str(tmp_path / "run")), **changes)


def refusal(spec: JobSpec, devices: Devices = TWO_CORES) -> str:
    """The message with which the job is refused by the launcher itself, which must have made nothing."""
    with pytest.raises(FireflyerError) as caught:
        uvloop.run(run_job(spec, devices=devices))
    assert isinstance(caught.value, UsageError | Exists)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sound_job_passes(tmp_path: Path) -> None:
    check_job(spec_of(tmp_path, nodes=2, ranks_per_node=2), TWO_CORES)
    check_job(spec_of(tmp_path, nodes=2, ranks_per_node=4), FOUR_GPUS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script": "missing.py"}, "script 'missing.py' is not found; check the path"),
        ({"script": "/"}, "is a directory; name the Python file"),
        ({"script": "no_such_package.x", "kind": "module"}, "module 'no_such_package.x' is not found"),
        ({"script": "no-such-program", "kind": "program"}, "program 'no-such-program' is not found"),
        ({"nodes": 4, "min_nodes": 2}, "--nodes 2:4 needs --hosts or --rdzv-endpoint: nodes on this machine do not"),
        ({"nodes": 2, "min_nodes": 3}, "--nodes 3:2: the first number must not be above the second"),
        ({"nodes": 0}, "--nodes 0 must be from 1 to 1024"),
        ({"ranks_per_node": -1}, "--ranks-per-node -1 must be from 1"),
        ({"nodes": 1024, "ranks_per_node": 100}, "102400 ranks are more than the 16384"),
        ({"max_restarts": -1}, "--max-restarts -1 must be"),
        ({"omp_num_threads": 0}, "--omp-num-threads 0 must be at least 1"),
        ({"master_port": 70000}, "--master-port 70000 is out of range"),
        ({"master_port": 29400, "ports": PORTS}, "--master-port, 29400, is not in --port-range 29500-29599; choose"),
        ({"remote": Remote(port=29600), "ports": PORTS}, "--control-port, 29600, is not in --port-range"),
        (
            {"rendezvous": Rendezvous(host="a", port=29400, secret_file="s"), "ports": PORTS},
            "the port of --rdzv-endpoint, 29400, is not in --port-range 29500-29599",
        ),
        ({"env": {"FF_PORT_RANGE": "1"}}, "FF_PORT_RANGE: port range '1' is not understood"),
        ({"ranks_per_node": 2 * RANKS_PER_CORE + 1}, "33 ranks are more than this machine can hold"),
        (
            {"hosts": ("a", "b", "c"), "nodes": 2, "ranks_per_node": 8, "host_ranks": (8, 4, 4)},
            "hosts with different numbers of ranks (8,4(x2)) have no --spares: a spare takes the place of any host",
        ),
        ({"hosts": ("a", "b"), "nodes": 2, "host_ranks": (1,)}, "host_ranks must have one number for each host"),
        ({"hosts": ("a", "b"), "nodes": 2, "host_ranks": (1, 0)}, "--hosts b:0: a host must have at least 1 rank"),
        ({"devices": "gpu"}, "this machine has no GPU; use --devices cpu"),
        ({"inject": (Fault("kill-node", 1, 5),)}, "--inject kill-node=1@5: there is no node 1; the last one is 0"),
        ({"inject": (Fault("kill-rank", 9, 5),)}, "there is no rank 9"),
        ({"args": ("\udcff",)}, "'\\udcff' is not UTF-8"),
        ({"run_dir": "/tmp/\udcff"}, "'/tmp/\\udcff' is not UTF-8"),
        ({"env": {"A": "\udcff"}}, "'A=\\udcff' is not UTF-8"),
        ({"env": {"FF_JOB_TOKEN": "1"}}, "FF_JOB_TOKEN is set by the launcher"),
        ({"env": {"A=B": "1"}}, "environment variable 'A=B' cannot be set"),
        ({"env": {"RANK": "1"}}, "environment variable RANK is set by the launcher"),
        ({"env": {"FF_PIN": "maybe"}}, "environment variable FF_PIN='maybe' is neither 0 nor 1"),
        ({"env": {"FF_PEER_MEMORY": "2"}}, "environment variable FF_PEER_MEMORY='2' is neither 0 nor 1"),
        ({"env": {"FF_TUNE": ""}}, "environment variable FF_TUNE='' is neither 0 nor 1"),
        ({"env": {"FF_TRANSPORT": "x"}}, "FF_TRANSPORT='x' is not known; use one of tcp, ucx, auto"),
        ({"name": "ü" * 101}, "--name"),
        ({"name": "a\nb"}, "--name"),
        ({"args": ("a\0b",)}, "NUL"),
    ],
)
def test_a_wrong_job_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    spec = spec_of(tmp_path, **changes)
    assert words in refusal(spec)
    assert not os.path.exists(spec.run_dir)


def test_a_wrong_setting_that_ranks_would_inherit_is_refused_unless_the_job_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FF_TRANSPORT", "x")
    assert "FF_TRANSPORT='x' is not known" in refusal(spec_of(tmp_path))
    check_job(spec_of(tmp_path, transport="tcp"), TWO_CORES)
    check_job(spec_of(tmp_path, env={"FF_TRANSPORT": "tcp", "FF_PIN": "0"}), TWO_CORES)
    monkeypatch.setenv("FF_TRANSPORT", "auto")
    monkeypatch.setenv("RANK", "7")  # a shell's, or an outer launcher's: every rank gets its own
    check_job(spec_of(tmp_path), TWO_CORES)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    message = refusal(spec_of(tmp_path, ranks_per_node=5), FOUR_GPUS)
    assert "--ranks-per-node 5 is more than the 4 GPUs" in message
    assert "--devices cpu" in message
    check_job(spec_of(tmp_path, ranks_per_node=5, devices="cpu"), FOUR_GPUS)


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        message = refusal(spec_of(tmp_path, master_port=port))
    assert message.startswith(f"--master-port {port} is taken by another process; choose another")
    check_job(spec_of(tmp_path, master_port=port), TWO_CORES)


def test_this_machine_need_not_hold_what_runs_on_others(tmp_path: Path) -> None:
    """A login node starts jobs on machines that have more; they are asked themselves."""
    many = {"nodes": 64, "hosts": tuple(f"n{number}" for number in range(64)), "ranks_per_node": 8}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_job(spec_of(tmp_path, **many, devices="gpu", master_port=port), TWO_CORES)
    joined = spec_of(tmp_path, **many, rendezvous=Rendezvous(host="n0", port=29400, secret_file="secret"))
    check_job(joined, TWO_CORES)
    with pytest.raises(UsageError, match="33 ranks are more than this machine can hold"):
        check_job(msgspec.structs.replace(joined, ranks_per_node=33), TWO_CORES)


def test_a_run_directory_that_holds_a_run_is_refused_and_kept(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    os.mkdir(spec.run_dir)
    log = Path(spec.run_dir, "events.jsonl")
    log.write_text("precious\n")
    assert "holds another run; choose another one with --run-dir" in refusal(spec)
    assert log.read_text() == "precious\n"


def test_a_run_directory_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    os.symlink("elsewhere", spec.run_dir)
    assert f"is a symbolic link; give the directory that it leads to ({tmp_path}/elsewhere)" in refusal(spec)
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_run_directory_in_which_others_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    os.mkdir(spec.run_dir)
    os.chmod(spec.run_dir, mode)
    with pytest.raises(PermissionDenied, match=rf"can be written by other users \(mode {mode:04o}\); run: chmod go-w"):
        uvloop.run(run_job(spec, devices=TWO_CORES))
    assert os.listdir(spec.run_dir) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories to others")
def test_a_run_directory_of_another_user_or_group_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    os.mkdir(spec.run_dir)
    os.chown(spec.run_dir, 12345, 12345)
    with pytest.raises(PermissionDenied, match=r"belongs to uid 12345; it must belong to you \(uid 0\)"):
        check_job(spec, TWO_CORES)
    os.chown(spec.run_dir, 0, 12345)
    os.chmod(spec.run_dir, 0o770)
    with pytest.raises(PermissionDenied, match="can be written by other users"):
        check_job(spec, TWO_CORES)
    os.chown(spec.run_dir, 0, 0)
    check_job(spec, TWO_CORES)


def test_a_log_directory_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    os.mkdir(spec.run_dir, 0o700)
    (tmp_path / "elsewhere").mkdir()
    os.symlink("../elsewhere", Path(spec.run_dir, "logs"))
    assert "logs is a symbolic link" in refusal(spec)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    Path(spec.run_dir).touch()
    assert "run is not a directory; choose another one with --run-dir" in refusal(spec)
    with pytest.raises(FireflyerError, match=r"make run directory .* \(--run-dir chooses another\): "):
        uvloop.run(run_job(msgspec.structs.replace(spec, run_dir=spec.run_dir + "/below"), devices=TWO_CORES))


def test_what_ranks_execute() -> None:
    python, flag, *rest = command_of(JobSpec(script="a.py", args=("-x",), run_dir="/r"))
    assert os.path.isabs(python)
    assert (flag, rest) == ("-u", ["a.py", "-x"])
    assert command_of(JobSpec(script="a.b", kind="module", run_dir="/r"))[1:] == ("-u", "-m", "a.b")
    assert command_of(JobSpec(script="ls", args=("-l",), kind="program", run_dir="/r")) == ("ls", "-l")


@pytest.mark.parametrize("text", ["kill-node=1@60", "kill-rank=3@1"])
def test_faults_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_fault(text)) == text


@pytest.mark.parametrize("text", ["", "kill-node", "kill-node=1", "kill-node=x@1", "kill-node=1@-1", "melt-node=1@1"])
def test_other_faults_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write it like kill-node=1@60"):
        parse_fault(text)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, 3), ("", 0), ("-1", 0), ("0,1", 2), ("0,-1,2", 1), ("GPU-abc,GPU-def", 2), ("0,1,2,3,4", 3), ("none", 0)],
)
def test_gpus_are_counted_by_their_device_files(tmp_path: Path, visible: str | None, gpus: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = find_devices(environ, dev_dir=str(tmp_path))
    assert found.gpus == gpus
    assert found.cores == len(os.sched_getaffinity(0))


def test_a_machine_without_device_directory_has_no_gpus(tmp_path: Path) -> None:
    assert find_devices({}, dev_dir=str(tmp_path / "none")).gpus == 0


def test_the_launcher_leaves_the_port_of_the_ranks_to_them(tmp_path: Path) -> None:
    """In a range it would take the lowest one."""
    spec = spec_of(tmp_path, ports=PortRange(31100, 31119), master_port=31100)
    server = RpcServer(Accepts(new_secret()))

    async def listen() -> int:
        try:
            return (await _listen(server, spec)).port
        finally:
            await server.close()

    assert 31100 < uvloop.run(listen()) < 31120
