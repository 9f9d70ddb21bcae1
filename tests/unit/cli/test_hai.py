"""What hai-cli users type becomes commands of `ff`, or one line that says what to do instead."""

from __future__ import annotations

import sys

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cli import main
from fireflyer.cli.platform.hai import translated


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("python train.py --lr 3 -- -n 2", "submit --priority 30 --nodes 2 train.py -- --lr 3"),
        ("python train.py -- -p 20 -f", "submit --priority 30 --priority 20 --follow train.py --"),
        ("python x.py -- --nodes=4 -e K=V --name a", "submit --priority 30 --nodes 4 --env K=V --name a x.py --"),
        ("bash run.sh a b -- -g a100", "submit --priority 30 --group a100 --no-python bash -- run.sh a b"),
        ("exec ./tool -x -- -n 1", "submit --priority 30 --nodes 1 --no-python ./tool -- -x"),
        ("list", "ps"),
        ("list -ps 50", "ps --limit 50"),
        ("list --page_size=50", "ps --limit 50"),
        ("status 17 -j", "show 17 --json"),
        ("describe 17", "show 17"),
        ("logs -f -r 3 17", "logs -f --rank 3 17"),
        ("stop 17", "stop 17"),
        ("nodes --tree", "nodes --tree"),
        ("whoami", "whoami"),
    ],
)
def test_a_verb_becomes_a_command(typed: str, becomes: str) -> None:
    assert translated(typed.split()).argv == tuple(becomes.split())


@pytest.mark.parametrize(
    ("typed", "runs"),
    [("python x.py -a", f"{sys.executable} x.py -a"), ("bash x.sh", "bash x.sh"), ("exec ./x 1", "./x 1")],
)
def test_without_the_dashes_a_program_runs_on_this_machine(typed: str, runs: str) -> None:
    found = translated(typed.split())
    assert found.local
    assert found.argv == tuple(runs.split())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("frobnicate", "verbs are python, bash"),
        ("init TOKEN --url u", "`ff login URL`"),
        ("run task.yml", "ff submit --nodes 2"),
        ("images list", "--wrap"),
        ("artifact list", "shared file system"),
        ("python", "needs a file"),
        ("python -- -n 2", "needs a file before --"),
        ("python x.py -- -n", "-n needs a value"),
        ("python x.py -- -i image", "--wrap"),
        ("python x.py -- --frob 2", "--frob behind -- is not understood"),
        ("python x.py ++ --suspend_seconds 5", "ff suspend TASK"),
        ("python x.py --suspend_seconds 5", "ff suspend TASK"),
        ("list -p 2", "--page_size"),
        ("logs -c x 17", "a rank has one log"),
        ("stop --failed 17", "stopped"),
    ],
)
def test_what_cannot_be_had_says_what_to_do_instead(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r".") as error:
        translated(typed.split())
    assert said in error.value.message
    assert main(["hai", *typed.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_errors_of_the_command_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hai", "logs", "-f", "--rank", "x", "17"]) == 2
    assert "'x' is not a valid integer" in capsys.readouterr().err


def test_a_program_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hai", "exec", "./no-such-program"]) == 2
    assert capsys.readouterr().err == "error: ./no-such-program cannot be started: no such file or directory\n"
