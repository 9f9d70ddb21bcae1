"""torchrun's options: those that mean the same, and a line for each that cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fireflyer.cli import main
from fireflyer.cli.jobs import run as run_module
from fireflyer.cluster.schema.job import JobSpec, RankLine, Timeouts

Capture = pytest.CaptureFixture[str]


class Runs:
    """What would be run, and which lines would be hidden."""

    def __init__(self) -> None:
        self.spec: JobSpec | None = None
        self.hidden: Callable[[RankLine], bool] = lambda _line: False

    def __call__(self, spec: JobSpec, **others: object) -> int:
        self.spec = spec
        self.hidden = others["hidden"]  # type: ignore[assignment]
        return 0

    def shows(self, rank: int, stream: str) -> bool:
        assert self.spec is not None
        local_rank = rank % self.spec.ranks_per_node
        return not self.hidden(RankLine(rank, 0, 0, stream, "", local_rank=local_rank))  # type: ignore[arg-type]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    (tmp_path / "train.py").write_text("pass")
    monkeypatch.chdir(tmp_path)
    seen = Runs()
    monkeypatch.setattr(run_module, "_run", seen)
    return seen


def asked(runs: Runs, *options: str) -> JobSpec:
    assert main(["run", *options, "train.py", "--nproc-per-node", "of-the-script"]) == 0
    assert runs.spec is not None
    assert runs.spec.args == ("--nproc-per-node", "of-the-script")
    return runs.spec


@pytest.mark.parametrize("options", [("--nproc-per-node", "4"), ("--nproc_per_node=4",), ("--ranks_per_node", "4")])
def test_names_are_those_of_torchrun_with_dashes_and_underscores(runs: Runs, options: tuple[str, ...]) -> None:
    assert asked(runs, *options).ranks_per_node == 4


def test_a_common_command_line_of_torchrun_is_taken_as_it_is(runs: Runs) -> None:
    line = "--standalone --nnodes=1 --nproc_per_node=2 --max_restarts=3 --rdzv_id=7 --rdzv_backend=c10d"
    line += " --rdzv_endpoint=localhost:0 --monitor_interval=5 --start-method spawn --role trainer --node_rank=0"
    line += " --master_addr=127.0.0.1 --master_port=0 --shutdown-timeout 30"
    spec = asked(runs, *line.split())
    assert (spec.nodes, spec.ranks_per_node, spec.max_restarts, spec.name, spec.role) == (1, 2, 3, "7", "trainer")
    assert spec.timeouts == Timeouts(stop_grace_ns=30 * 10**9)


def test_restarts_are_none_unless_asked_for(runs: Runs) -> None:
    assert asked(runs).max_restarts == 0


def test_ranks_per_node_may_be_what_the_machine_has(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    from fireflyer.cluster import launcher
    from fireflyer.runtime.devices import Devices

    monkeypatch.setattr(launcher, "find_devices", lambda _environ: Devices(gpus=2, cores=6))
    found = [asked(runs, "--nproc-per-node", kind) for kind in ("auto", "gpu", "cpu")]
    assert [(spec.ranks_per_node, spec.devices) for spec in found] == [(2, "gpu"), (2, "gpu"), (6, "cpu")]
    monkeypatch.setattr(launcher, "find_devices", lambda _environ: Devices(gpus=0, cores=6))
    assert asked(runs, "--nproc-per-node", "auto").ranks_per_node == 6


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--nnodes 4:1", "--nodes 4:1: the first number, the least, must not be above the second"),
        ("--rdzv-backend etcd", "--rdzv-backend etcd: ranks meet through the launcher of ff run; leave it out"),
        (
            "--nnodes 2 --rdzv-endpoint head:29400",
            "--rdzv-endpoint needs --secret-file (or FF_SECRET_FILE): make one, (umask 077; head -c 32 /dev/urandom > "
            "secret), and copy it to each machine",
        ),
        ("--nnodes 2 --node-rank 0", "--node-rank needs --rdzv-endpoint HOST:PORT, the address of machine 0"),
        (
            "--master-addr head",
            "--master-addr head: machines meet at --rdzv-endpoint head:29400; give that instead",
        ),
        ("--run-path", "--run-path: each rank is a Python process of its own; leave it out"),
        (
            "--rdzv-conf timeout=3",
            "--rdzv-conf timeout=3: ranks meet through the launcher of ff run; --last-call is last_call_timeout, "
            "leave the rest out",
        ),
        ("--redirects 4", "--redirects '4' is not understood; write 0, 1 (stdout), 2 (stderr), 3 (both), or 0:1,1:2"),
        ("--nproc-per-node 2 --tee 2:1", "--tee 2:1: there is no local rank 2; the last one is 1"),
        ("--local-ranks-filter 0-3", "--local-ranks-filter '0-3' is not understood; write local ranks like 0,1,2"),
    ],
)
def test_what_cannot_be_had_is_one_line_that_says_what_to_do(
    runs: Runs, options: str, line: str, capsys: Capture
) -> None:
    assert main(["run", *options.split(), "train.py"]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert runs.spec is None


@pytest.mark.slow
def test_all_options_of_torchrun_are_known(runs: Runs) -> None:
    """Those of torch as it is installed; none may be an unknown option."""
    run = pytest.importorskip("torch.distributed.run")
    known = {name for param in run_module.command.params for name in param.opts}
    theirs = {name for action in run.get_args_parser()._actions for name in action.option_strings}
    assert {name for name in theirs if name.replace("_", "-") not in {k.replace("_", "-") for k in known}} <= {
        "-h",
        "--help",
    }


def test_redirected_streams_are_not_shown_but_teed_ones_are(runs: Runs, tmp_path: Path) -> None:
    spec = asked(runs, "--nnodes", "2", "--nproc-per-node", "2", "-r", "3", "-t", "0:1", "--log-dir", "logs")
    shown = [(rank, stream) for rank in range(4) for stream in ("stdout", "stderr") if runs.shows(rank, stream)]
    assert shown == [(0, "stdout"), (2, "stdout")]
    assert (spec.stream_dir, spec.stream_files) == (str(tmp_path / "logs"), (3, 3))


def test_only_the_ranks_of_the_filter_are_shown(runs: Runs) -> None:
    spec = asked(runs, "--nnodes", "2", "--nproc-per-node", "3", "--local-ranks-filter", "0,2")
    assert [rank for rank in range(6) if runs.shows(rank, "stdout")] == [0, 2, 3, 5]
    assert spec.stream_dir == "", "nothing is redirected to a file"
