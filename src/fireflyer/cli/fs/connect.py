"""How commands of `ff fs` find a cluster: the directory of a local one, or addresses and a credential."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Coroutine, Iterator
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from fireflyer.base.errors import InvariantViolation, NotFound, Timeout, Unreachable, UsageError

if TYPE_CHECKING:
    from fireflyer.fs.control import ManagerClient
    from fireflyer.fs.schema.manager import Answer, Request
    from fireflyer.fs.schema.routing import Routing
    from fireflyer.runtime.rpc import Credential

__all__ = [
    "CLUSTER_HELP",
    "DEFAULT_DIRECTORY",
    "TARGET_VARIABLE",
    "ClusterTarget",
    "answered",
    "ask_all",
    "ask_one",
    "cluster_options",
]
__all__ += ["directory_of", "expect", "local", "named", "reach", "routing", "target_of", "where_options"]

DEFAULT_DIRECTORY: Final = "fs"
TARGET_VARIABLE: Final = "FIREFLYER_FS"
CLUSTER_HELP: Final = (
    f"Directory of a cluster that `ff fs up` made.  [default: what ${TARGET_VARIABLE} names, or ./fs, or "
    "./platform/storage of `ff up`]"
)
ENDED_S: Final = 1.0
"""For an answer of a cluster whose `ff fs up` is not there: its managers may still be, run by hand."""
T = TypeVar("T")


class ClusterTarget:
    """Managers to ask, and how to prove who asks."""

    def __init__(self, managers: tuple[str, ...], credential: Credential, directory: str = "") -> None:
        """`directory`: of a local cluster."""
        self.managers = managers
        self.credential = credential
        self.directory = directory


def where_options(function: Callable[..., object]) -> Callable[..., object]:
    """`--dir`, or `--manager` with `--token-file` or `--secret-file`; the command gets them as `where`."""

    @functools.wraps(function)
    def call(
        *args: object,
        directory: str | None,
        managers: tuple[str, ...],
        token_file: str | None,
        secret_file: str | None,
        **options: object,
    ) -> object:
        return function(*args, where=_find(directory, managers, token_file, secret_file), **options)

    return cluster_options(call)


def cluster_options(function: Callable[..., object]) -> Callable[..., object]:
    """The options themselves: `directory`, `managers`, `token_file`, `secret_file`."""
    of_all = "Address of a manager of the cluster; repeat it for each manager."
    for option in (
        click.option("--secret-file", metavar="FILE", help="With --manager: the node secret, a file with mode 600."),
        click.option(
            "--token-file",
            metavar="FILE",
            help="With --manager or ff://HOST:PORT: the token of a user, a file with mode 600.",
        ),
        click.option(
            "--manager", "managers", metavar="HOST:PORT", multiple=True, help=of_all, callback=_check_addresses
        ),
        click.option("--dir", "directory", metavar="DIR", help=CLUSTER_HELP),
    ):
        function = option(function)
    return function


def _find(
    directory: str | None, managers: tuple[str, ...], token_file: str | None, secret_file: str | None
) -> ClusterTarget:
    return named(target_of(directory, managers), token_file, secret_file)


def _check_addresses(_context: click.Context, _option: click.Parameter, managers: tuple[str, ...]) -> tuple[str, ...]:
    for one in managers:
        host, _, port = one.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise click.BadParameter(f"{one!r} is not HOST:PORT; write it like node-1:7000")
    return managers


def target_of(directory: str | None, managers: tuple[str, ...]) -> str:
    """What the options, or the environment, or the default name: `ff://…`. Raises `UsageError`."""
    from fireflyer.fs.tools.addresses import parse_address
    from fireflyer.fs.tools.default_cluster import default_target

    if managers and directory is not None:
        raise UsageError("--dir and --manager cannot be combined; give one of them")
    if managers:
        return f"ff://{','.join(managers)}"
    if directory is None and (target := os.environ.get(TARGET_VARIABLE)):
        if not target.startswith("ff:///") and not (target.startswith("ff://") and parse_address(target).target):
            raise UsageError(
                f"the environment variable {TARGET_VARIABLE} is {target!r}; set it to ff://HOST:PORT or ff:///directory"
            )
        return target
    found = default_target() if directory is None else None
    return found or f"ff://{os.path.abspath(directory if directory is not None else DEFAULT_DIRECTORY)}"


def directory_of(directory: str | None) -> str:
    """Of commands that need the directory of a local cluster: what `--dir`, or the environment, or the default names.
    Raises `UsageError` where the environment names managers."""
    from fireflyer.fs.tools.addresses import SCHEME, parse_address

    target = target_of(directory, ())
    if target.startswith(SCHEME + "/"):
        return target[len(SCHEME) :]
    if found := parse_address(target).directory:
        return found
    raise UsageError(
        f"the environment variable {TARGET_VARIABLE} names managers ({target}), and this command works on the "
        "directory of a cluster; give --dir DIR"
    )


def named(target: str, token_file: str | None, secret_file: str | None) -> ClusterTarget:
    """`target`: as `target_of` says it. Raises `UsageError`, and what `local` and `reach` raise."""
    from fireflyer.fs.tools.addresses import SCHEME, parse_address

    if target.startswith(SCHEME + "/"):
        if token_file or secret_file:
            raise UsageError(
                "--token-file and --secret-file need the address of a manager; add --manager HOST:PORT, or leave "
                "them out"
            )
        return local(target[len(SCHEME) :])
    address = parse_address(target)
    if address.directory:
        return local(address.directory)
    return reach(address.managers, token_file, secret_file)


def reach(managers: tuple[str, ...], token_file: str | None, secret_file: str | None) -> ClusterTarget:
    """A cluster of which the managers are known. Raises `UsageError`."""
    from fireflyer.fs.tools.default_cluster import default_token_file
    from fireflyer.identity import NodeCredential, UserCredential, load_secret
    from fireflyer.identity.private_files import read_private_file

    if token_file is not None and secret_file is not None:
        raise UsageError("--token-file and --secret-file cannot be combined; give one of them")
    if secret_file is not None:
        with _file_of("--secret-file", secret_file, "copy the node secret of the cluster there"):
            return ClusterTarget(managers, NodeCredential(load_secret(secret_file), f"ff of user {os.getuid()}"))
    token_file = token_file or default_token_file()
    if token_file is None:
        raise UsageError(
            f"the managers at {', '.join(managers)} ask who you are; add --token-file FILE (token of a user) or "
            "--secret-file FILE (node secret)"
        )
    with _file_of("--token-file", token_file, "an administrator makes a token with: ff fs admin user token"):
        token = read_private_file(token_file, 4096).decode(errors="replace").strip()
    return ClusterTarget(managers, UserCredential(token))


@contextlib.contextmanager
def _file_of(option: str, path: str, advice: str) -> Iterator[None]:
    """Raises `UsageError` that names the option for a file that is not there."""
    try:
        yield
    except NotFound:
        raise UsageError(f"{option} {path!r}: there is no such file; {advice}") from None


def local(directory: str) -> ClusterTarget:
    """A cluster of `ff fs up`, as its administrator. Raises `NotFound` where there is none."""
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.identity import UserCredential

    layout = Layout(directory)
    try:
        cluster = layout.load()
    except NotFound as error:
        other = f"or name another with --dir, --manager or the environment variable {TARGET_VARIABLE}"
        raise NotFound(f"{error.message}; {other}") from None
    if any(address.endswith(":0") for address in cluster.managers) or not layout.has_admin_token:
        raise UsageError(
            f"the cluster in {layout.directory} has never run; start it: ff fs up --dir {quote(directory)}"
        )
    return ClusterTarget(cluster.managers, UserCredential(layout.admin_token()), layout.directory)


def ask_all(where: ClusterTarget, requests: list[Request], *, timeout_s: float = 10) -> list[Answer]:
    """One after the other. Raises `FireflyerError`; for a local cluster that seems to have been ended, soon."""
    from fireflyer.base.units import SECOND
    from fireflyer.fs.control import ManagerClient

    async def asking(limit_s: float) -> list[Answer]:
        async with ManagerClient(where.managers, where.credential) as client:
            return [await _ask(client, one, int(limit_s * SECOND)) for one in requests]

    return answered(where, asking, timeout_s)


def answered(where: ClusterTarget, asking: Callable[[float], Coroutine[Any, Any, T]], timeout_s: float = 10) -> T:
    """What `asking` returns, which is told how many seconds it may wait for each answer. Raises what it raises; for a
    local cluster that seems to have been ended it has one second, and `NotFound` says how to start it."""
    from fireflyer.fs.service.local.layout import Layout
    from fireflyer.runtime import run
    from fireflyer.runtime.processes.run_lock import seems_held

    ended = bool(where.directory) and not seems_held(Layout(where.directory).lock_file)
    try:
        return run(asking(min(timeout_s, ENDED_S) if ended else timeout_s))
    except (Timeout, Unreachable) as error:
        if not ended:
            raise
        start = f"ff fs up --dir {quote(os.path.relpath(where.directory))} -d"
        raise NotFound(f"the cluster in {where.directory} is not running; start it: {start}") from error


async def _ask(client: ManagerClient, request: Request, timeout_ns: int) -> Answer:
    from fireflyer.fs.schema.manager import GetStatus

    if isinstance(request, GetStatus):
        return await client.status(timeout_ns=timeout_ns)
    return await client.ask(request, timeout_ns=timeout_ns)


def ask_one(where: ClusterTarget, request: Request) -> Answer:
    return ask_all(where, [request])[0]


def expect(answer: Any, answer_type: type[T]) -> T:
    """Raises `InvariantViolation` for an answer of another kind."""
    if not isinstance(answer, answer_type):
        raise InvariantViolation(
            f"the manager answered with {type(answer).__name__} instead of {answer_type.__name__}; install the same "
            "release of Fire-Flyer here and on the managers"
        )
    return answer


def routing(answer: Answer) -> Routing:
    """Of a `RoutingAnswer` to one who knew nothing."""
    from fireflyer.fs.core.routing import apply_delta
    from fireflyer.fs.schema.manager import RoutingAnswer
    from fireflyer.fs.schema.routing import Routing

    delta = expect(answer, RoutingAnswer).routing
    return Routing(0) if delta is None else apply_delta(Routing(0), delta)
