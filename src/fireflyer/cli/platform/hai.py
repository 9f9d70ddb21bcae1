"""`ff hai`, also installed as `hai-cli`: the verbs and flags of hai-cli, as commands of `ff`.

A verb becomes the command line of `ff` that does the same, or one line that says what is done instead.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import click

from fireflyer.base.errors import NotFound, UsageError

__all__ = ["Translated", "command", "translated"]


class Translated(NamedTuple):
    argv: tuple[str, ...]
    """Of `ff`, or of a program of this machine."""
    local: bool = False


_INSTEAD: Final[Mapping[str, str]] = {
    "init": "log in with `ff login URL`, which asks for the token",
    "run": "there are no YAML files of tasks; give the same to `ff submit`, such as `ff submit --nodes 2 train.py`",
    "ssh": "a node is entered by `ff exec TASK`, as the task's user",
    "images": "nothing is built for you; put a container around each rank with `ff submit --wrap`",
    "artifact": "keep results on a shared file system, or in `ff fs`",
    "env": "name a Python environment that is there on the nodes: `ff submit --python PATH`",
    "workspace": "`ff submit` copies your directory by itself; `--directory` names another",
    "monitor": "see `ff top`, or the web page",
    "prof": "see `ff report` of a run, and `ff collectives explain`",
    "validate": "an operator drains a node that is bad: `ff node drain NODE REASON`",
}
_SUBMIT_VALUES: Final[Mapping[str, str]] = {
    "--name": "--name", "-n": "--nodes", "--nodes": "--nodes", "-g": "--group", "--group": "--group",
    "-p": "--priority", "--priority": "--priority", "-e": "--env", "--env": "--env", "--environments": "--env",
}  # fmt: skip
_SUBMIT_FLAGS: Final[Mapping[str, str]] = {"-f": "--follow", "--follow": "--follow"}
_SUBMIT_INSTEAD: Final[Mapping[str, str]] = {
    "-i": "images are not kept by the platform; give `ff submit --wrap 'apptainer exec IMAGE'`",
    "--image": "images are not kept by the platform; give `ff submit --wrap 'apptainer exec IMAGE'`",
    "--options": "give the options of `ff submit` themselves; `ff submit --help` lists them",
    "--no_inherit": "nothing of your environment is inherited; name variables with -e K=V",
    "--input": "artifacts are not kept by the platform; use paths of a shared file system",
    "--output": "artifacts are not kept by the platform; use paths of a shared file system",
}
_SIMULATED: Final = ("-ss", "--suspend_seconds", "-ls", "--life_state")
_OF_TASKS: Final = ("show", "logs", "stop", "suspend")
_WITH_VALUE: Final = ("--rank", "--run", "--search", "--platform")
DEFAULT_PRIORITY: Final = "30"


def translated(argv: Sequence[str]) -> Translated:
    """Raises `UsageError`, in words that say what to do instead."""
    verb, rest = argv[0], list(argv[1:])
    found = _VERBS.get(verb)
    if found is not None:
        return found(rest)
    if verb in _INSTEAD:
        raise UsageError(f"hai {verb} is not here: {_INSTEAD[verb]}")
    raise UsageError(f"hai has no verb {verb!r}; verbs are {', '.join(_VERBS)}")


def _program(kind: str) -> Callable[[list[str]], Translated]:
    def translate(rest: list[str]) -> Translated:
        if "++" in rest:
            raise UsageError(
                "an interrupt is not simulated by hai; start a platform here (`ff up -d`), submit the script, "
                "then `ff suspend TASK` and `ff resume TASK`"
            )
        if "--" in rest:
            at = rest.index("--")
            return _submitted(kind, rest[:at], rest[at + 1 :])
        if not rest:
            raise UsageError(f"hai {kind} needs a file; on the platform: hai {kind} FILE [ARGS] -- --nodes 2")
        if any(one in rest for one in _SIMULATED):
            raise UsageError(f"{'/'.join(_SIMULATED)} stand behind ++, and are not here; use `ff suspend TASK`")
        prefix = {"python": [sys.executable], "bash": ["bash"], "exec": []}[kind]
        return Translated((*prefix, *rest), local=True)

    return translate


def _submitted(kind: str, program: list[str], options: list[str]) -> Translated:
    if not program:
        raise UsageError(f"hai {kind} needs a file before --: hai {kind} FILE [ARGS] -- --nodes 2")
    argv = ["submit", "--priority", DEFAULT_PRIORITY]
    while options:
        name, _, joined = options.pop(0).partition("=")
        if name in _SUBMIT_FLAGS:
            argv.append(_SUBMIT_FLAGS[name])
        elif name in _SUBMIT_VALUES:
            if not joined and not options:
                raise UsageError(f"{name} needs a value, such as {name} 2")
            argv += [_SUBMIT_VALUES[name], joined or options.pop(0)]
        elif name in _SUBMIT_INSTEAD:
            raise UsageError(f"{name} is not here: {_SUBMIT_INSTEAD[name]}")
        else:
            known = ", ".join((*_SUBMIT_VALUES, *_SUBMIT_FLAGS))
            raise UsageError(f"{name} behind -- is not understood; options of hai {kind} are {known}")
    if kind == "python":
        return Translated((*argv, program[0], "--", *program[1:]))
    words = ["bash", *program] if kind == "bash" else program
    return Translated((*argv, "--no-python", words[0], "--", *words[1:]))


def _renamed(
    verb: str, names: Mapping[str, str] = {}, instead: Mapping[str, str] = {}
) -> Callable[[list[str]], Translated]:
    """A verb that `ff` has, with other names of options."""

    def translate(rest: list[str]) -> Translated:
        argv = [verb]
        for word in rest:
            name, _, joined = word.partition("=")
            if name in instead:
                raise UsageError(f"{name} is not here: {instead[name]}")
            argv += [names[name], joined] if name in names and joined else [names.get(word, word)]
        return Translated(tuple(argv))

    return translate


_CHAIN: Final = "a task has one number for its whole life"
_VERBS: Final[Mapping[str, Callable[[list[str]], Translated]]] = {
    "python": _program("python"),
    "bash": _program("bash"),
    "exec": _program("exec"),
    "list": _renamed(
        "ps",
        {"-ps": "--limit", "--page_size": "--limit"},
        dict.fromkeys(("-p", "--page"), "give --page_size N, at most 1000"),
    ),
    "status": _renamed("show", {"-j": "--json"}, dict.fromkeys(("-t", "--exp_type"), _CHAIN)),
    "describe": _renamed("show", {}, dict.fromkeys(("-t", "--exp_type"), _CHAIN)),
    "logs": _renamed(
        "logs",
        {"-r": "--rank"},
        {"-t": _CHAIN, "-c": "a rank has one log", "--container": "a rank has one log"},
    ),
    "stop": _renamed(
        "stop",
        {},
        {
            "-t": _CHAIN,
            "--succeeded": "a task that is stopped is stopped",
            "--failed": "a task that is stopped is stopped",
        },
    ),
    "suspend": _renamed("suspend"),
    "nodes": _renamed("nodes"),
    "whoami": _renamed("whoami"),
    "version": _renamed("version"),
}


@click.command("hai", short_help="The verbs and flags of hai-cli.", add_help_option=False,
               context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
               epilog="""\b
Examples:
  ff hai python train.py --lr 3e-4 -- --nodes 2 --name first -f  # a task; without -- on this machine
  ff hai bash train.sh -- -n 2 -p 20
  ff hai list
  ff hai logs -f 17""")  # fmt: skip
@click.argument("words", metavar="VERB [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(context: click.Context, /, words: tuple[str, ...]) -> int:
    """What hai-cli users type, done by the commands of `ff`: python, bash, exec, list, status, describe, logs, stop,
    suspend, nodes, whoami. Verbs that are not here say what to use. Installed as `hai-cli`, too."""
    if not words or words[0] in ("-h", "--help"):
        click.echo(context.get_help())
        return 0
    found = translated(words)
    if found.local:
        _replace(found)
    found = found._replace(argv=tuple(_numbered(found.argv)))
    sys.stderr.write(f"ff {' '.join(map(shlex.quote, found.argv))}\n")
    code = context.find_root().command.main(args=list(found.argv), prog_name="ff", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _numbered(argv: Sequence[str]) -> list[str]:
    """hai-cli names tasks, `ff` numbers them. Raises `NotFound`."""
    if argv[0] not in _OF_TASKS:
        return list(argv)
    numbered = [argv[0]]
    for before, word in pairwise(argv):
        names = not word.startswith("-") and not word.isdecimal() and before not in _WITH_VALUE
        numbered.append(_number_of(word) if names else word)
    return numbered


def _number_of(name: str) -> str:
    """Of the user's newest task of this name."""
    from fireflyer.cli.platform.connect import connected

    with connected(None) as client:
        page = client.tasks(user=client.whoami().user, name=name, limit=1)
    if not page.tasks:
        raise NotFound(f"you have no task {name!r}; `ff ps --state any` lists your tasks")
    return str(page.tasks[0].id)


def _replace(found: Translated) -> None:
    """This process becomes the program. Raises `UsageError` where there is none."""
    sys.stdout.flush()
    try:
        os.execvp(found.argv[0], found.argv)  # noqa: S606
    except OSError as error:
        raise UsageError(f"{found.argv[0]} cannot be started: {(error.strerror or str(error)).lower()}") from None
