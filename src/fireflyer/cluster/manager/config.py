"""Configuration of a manager process, as its TOML file says it."""

from __future__ import annotations

import ipaddress
import os
from typing import Annotated, Final, Literal
from urllib.parse import parse_qs, quote, urlencode, urlsplit, urlunsplit

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS
from fireflyer.cluster.core.health.policy import CheckNames, HealthPolicy
from fireflyer.cluster.core.platform.node_checking import Checks
from fireflyer.cluster.core.platform.store.retention import HistoryKeep
from fireflyer.cluster.schema.job import SHIPPED_NODE_CHECK
from fireflyer.cluster.schema.sync import MAX_MANAGER_URLS, SHIPPED_HEALTH, SHIPPED_VALIDATE, VALIDATION, HealthOrder
from fireflyer.runtime.address import is_loopback, parse_listen

__all__ = ["NO_HISTORY", "GroupHealth", "HealthConfig", "PlatformConfig", "SlurmConfig", "history_url"]

NO_HISTORY: Final = "none"

_SHIPPED = (SHIPPED_HEALTH, SHIPPED_VALIDATE, SHIPPED_NODE_CHECK)
_Ms = Annotated[int, msgspec.Meta(ge=20, le=86_400_000)]


class SlurmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Slurm is asked, where it is the engine."""

    python: tuple[str, ...] = ()
    """The Python with Fire-Flyer on the nodes, as a command; empty: the path of the manager's own."""
    options: tuple[str, ...] = ()
    """Of `sbatch`, for all jobs, such as `--partition=gpu` or `--signal=B:USR1@120`."""
    output: str = "/dev/null"
    """Where agents of jobs print: what `sbatch --output` takes. Tasks have logs of their own."""
    own_user: bool = False
    """Jobs run as the manager's account, for all users; else the manager is root, and a job is that of the account of
    its user."""
    accounts: dict[str, str] = {}
    """Account of each user; empty: that of the user's own name."""
    poll_ms: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 1000
    most_jobs: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """In Slurm at a time."""
    command_timeout_ms: Annotated[int, msgspec.Meta(ge=1000, le=600_000)] = 30_000
    path: str = ""
    """Directory of Slurm's commands; empty: as PATH finds them."""
    jobcomp: str = ""
    """File of `JobCompLoc` where Slurm has `JobCompType=jobcomp/filetxt`: it is read for jobs that Slurm shows no
    more. Times in it are those of this machine's time zone."""


class GroupHealth(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What `[health]` says otherwise for nodes of one group, as thresholds and devices differ: the policy of
    `fireflyer:health` is an option of `program`. None: as for all."""

    program: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] | None = None
    """Empty: nodes of the group are not checked."""
    validation: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] | None = None
    follow: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] | None = None
    required: CheckNames | None = None
    period_ms: Annotated[int, msgspec.Meta(ge=100, le=86_400_000)] | None = None
    timeout_ms: _Ms | None = None
    validation_timeout_ms: _Ms | None = None


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes are checked, and how what the checks report is acted on. Raises `UsageError`."""

    program: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Prints health events (`base.health_event`), a line of JSON each; `--check NAME` is appended where one check is
    repeated. `fireflyer:health`: `ff health` of each node. Empty: nodes are not checked."""
    validation: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Of a node that is tested before it returns; exit code 0: it passed, 2: it is at fault. `fireflyer:node-check`:
    that which comes with Fire-Flyer, seconds; `fireflyer:validate`: its validators, minutes. Empty: none."""
    follow: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Runs beside `program` without end, and prints health events as they happen. `fireflyer:health`: what the kernel
    logs. Empty: `program` where that is `fireflyer:health` without `--check`, else none."""
    groups: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Of nodes that are checked; empty: all."""
    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    """Of this table, for people: count it up with each change."""
    period_ms: Annotated[int, msgspec.Meta(ge=100, le=86_400_000)] = 300_000
    """Each node is checked so often, and before and after each run."""
    timeout_ms: _Ms = 60_000
    validation_timeout_ms: _Ms = 600_000
    breaker_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    """Of all nodes, that may be out by the platform's own decision; one in any case."""
    probes: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    probe_spacing_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 4000
    flaps: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5
    """Of one part within an hour, that are a fault together."""
    leaf_links: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    """Nodes of one leaf that lose their links within 10 min: the leaf is suspect then."""
    link_checks: CheckNames = HealthPolicy().link_checks
    required: CheckNames = ()
    """Checks that must pass before a node returns, beside the one that failed; the validation is one in any case."""
    test_every_ms: _Ms = 30_000
    back_off_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 600_000
    """How long a node is tested at least whose part has failed again; doubles with each fault, up to a day."""
    probation_ms: Annotated[int, msgspec.Meta(ge=0, le=30 * 86_400_000)] = 3_600_000

    by_group: Annotated[dict[str, GroupHealth], msgspec.Meta(max_length=64)] = {}
    """What is otherwise for nodes of these groups. They are checked whatever `groups` says."""

    def __post_init__(self) -> None:
        for key in ("program", "validation", "follow"):
            program = getattr(self, key)
            if program and not os.path.isabs(program[0]) and program[0] not in _SHIPPED:
                raise UsageError(
                    f"health.{key}: {program[0]!r} is no absolute path; give the one that the program has on the nodes"
                )
        for key in ("validation", "follow"):
            if getattr(self, key) and not self.program:
                raise UsageError(f"health.{key} needs health.program; give both or none")
        for group in self.by_group:
            try:
                self._of(group)
            except UsageError as error:
                raise UsageError(f"health.by_group.{group}: {error}") from error

    def _of(self, group: str) -> HealthConfig:
        """What is in force for nodes of a group."""
        given = {key: value for key, value in msgspec.structs.asdict(self.by_group[group]).items() if value is not None}
        if given.get("program") == ():  # off: what belongs to the program of the others is not meant
            given = {"validation": (), "follow": ()} | given
        return msgspec.structs.replace(self, by_group={}, **given)

    def policy(self) -> HealthPolicy:
        longest = max(map(_whole_ms, (self, *map(self._of, self.by_group))))
        return HealthPolicy(
            version=self.version,
            breaker_share=self.breaker_share,
            probes=self.probes,
            probe_spacing_ns=self.probe_spacing_ms * MS,
            probe_limit_ns=2 * longest * MS,
            flaps=self.flaps,
            leaf_links=self.leaf_links,
            link_checks=self.link_checks,
            required=_required(self),
            group_required={group: _required(self._of(group)) for group in self.by_group},
            test_every_ns=self.test_every_ms * MS,
            back_off_ns=self.back_off_ms * MS,
            probation_ns=self.probation_ms * MS,
        )

    def checks(self) -> Checks:
        by_group = {group: self._of(group).order() for group in self.by_group}
        return Checks(policy=self.policy(), order=self.order(), groups=self.groups, by_group=by_group)

    def _follower(self) -> tuple[str, ...]:
        shipped = self.program[:1] == (SHIPPED_HEALTH,) and "--check" not in self.program
        return self.follow or (self.program if shipped else ())

    def order(self) -> HealthOrder | None:
        """None: nodes are not checked."""
        if not self.program:
            return None
        return HealthOrder(
            program=self.program,
            validation=self.validation,
            follow=self._follower(),
            period_ns=self.period_ms * MS,
            limit_ns=self.timeout_ms * MS,
            validation_limit_ns=self.validation_timeout_ms * MS,
        )


def _required(health: HealthConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*health.required, *((VALIDATION,) if health.validation else ()))))


def _whole_ms(health: HealthConfig) -> int:
    return health.timeout_ms + health.validation_timeout_ms


class PlatformConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises `UsageError` where settings contradict each other."""

    name: str
    """Of this manager."""
    cluster: str
    """32 or more hexadecimal digits, drawn at random, the same for all managers of the cluster."""
    store: str
    """`embedded:DIRECTORY`, or the URL of a PostgreSQL database for several managers."""
    directory: str
    """Private to the manager: certificate, and join tokens of machines."""
    listen: str = "127.0.0.1:9440"
    """HTTP."""
    listen_agents: str = "127.0.0.1:9441"
    advertise: str = ""
    """URL at which users reach this manager; empty: as it listens, by the machine's name where that is everywhere."""
    advertise_agents: str = ""
    """`host:port` at which agents reach it; empty likewise."""
    managers: tuple[str, ...] = ()
    """`host:port` of all managers, for agents; empty: this one."""
    manager_urls: tuple[str, ...] = ()
    """`URL` or `URL#FINGERPRINT` of all managers, for programs of tasks; empty: as each manager says it."""
    secret_file: str
    """Shared by the managers of the cluster (mode 0600): signs sessions and tokens of runs."""
    tokens_file: str = ""
    """Users and their tokens in a file, as those of a file system; empty: in the store, for all managers."""
    listen_accounts: str = ""
    """`host:port` at which services of file systems ask whose token it is: the users of the platform are their users;
    empty: nowhere."""
    accounts_secret_file: str = ""
    """Node secret of these file systems: who has it may ask (mode 0600)."""
    operators: tuple[str, ...] = ()
    """Users who are administrators of the platform, beside those with the role."""
    tls_certificate: str = ""
    tls_key: str = ""
    lease_ms: _Ms = 4000
    lost_ms: _Ms = 20_000
    stop_after_ms: _Ms = 300_000
    stop_slack_ms: _Ms = 60_000
    settle_ms: _Ms = 10_000
    objects: str = ""
    """Where blobs of snapshots and logs are kept: an absolute directory, or a URL of fsspec; empty: `objects` in
    `directory`. The same for all managers."""
    logs_directory: str = ""
    """Of the newest bytes of logs, which are not durable yet: nodes have them too; empty: `logs` in `directory`."""
    logs_of_run_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1024
    """The logs of a run are cut there."""
    logs_keep_days: Annotated[int, msgspec.Meta(ge=1, le=36_500)] = 30
    """After the end of their task."""
    webhook_networks: tuple[str, ...] = ()
    """Private networks to which webhooks may be sent, over plain HTTP too, as `10.1.0.0/16`; without it only to public
    addresses, over HTTPS."""
    history: str = ""
    """Database of the history: `sqlite:////absolute/path`, or the URL of a PostgreSQL database, also with
    `?schema=NAME`; `none`: no history is kept. Empty: beside an embedded store `history.sqlite` in `directory`, else
    the database of the store."""
    history_keep: HistoryKeep = HistoryKeep()
    """How long. The same for all managers."""
    metrics_listen: str = ""
    user_requests_per_s: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 50
    """Of one user; eight times as many at once."""
    failed_logins_per_minute: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 60
    """From one address: requests that do not prove who asks."""
    engine: Literal["agents", "slurm"] = "agents"
    """Who places tasks: our scheduler on machines whose agents have joined, or Slurm."""
    slurm: SlurmConfig = SlurmConfig()
    node_check: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = (SHIPPED_NODE_CHECK,)
    """Program and arguments that look at the node of a rank that failed, where it is not clear whose fault that was;
    empty: none. The same for all managers."""
    node_check_timeout_ms: _Ms = 60_000
    health: HealthConfig = HealthConfig()
    """The same for all managers."""

    def __post_init__(self) -> None:
        for name in ("listen", "listen_agents"):
            parse_listen(getattr(self, name))
        if self.listen_accounts:
            parse_listen(self.listen_accounts)
        if bool(self.listen_accounts) != bool(self.accounts_secret_file):
            raise UsageError("listen_accounts and accounts_secret_file belong together; give both or none")
        for network in self.webhook_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise UsageError(f"webhook_networks: {error}; write a network as 10.1.0.0/16") from None
        if len(self.manager_urls) > MAX_MANAGER_URLS:
            raise UsageError(f"manager_urls has {len(self.manager_urls)} URLs; at most {MAX_MANAGER_URLS} are allowed")
        if any("," in url or "://" not in url for url in self.manager_urls):
            raise UsageError("each of manager_urls is URL or URL#FINGERPRINT, as https://10.0.0.1:9440")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise UsageError("tls_certificate and tls_key belong together; give both or none")

        if self.health.program and self.engine == "slurm":
            raise UsageError(
                "health.program is for nodes of our own; under Slurm its HealthCheckProgram checks them, and drains"
            )
        if self.node_check and not os.path.isabs(self.node_check[0]) and self.node_check[0] != SHIPPED_NODE_CHECK:
            raise UsageError(
                f"node_check: {self.node_check[0]!r} is no absolute path; give the one that the program has on the "
                f"nodes, or {SHIPPED_NODE_CHECK!r} for the one that comes with Fire-Flyer"
            )

    @property
    def secure(self) -> bool:
        """Off loopback HTTP is never plain."""
        return bool(self.tls_certificate) or not is_loopback(parse_listen(self.listen)[0])


def history_url(config: PlatformConfig) -> str:
    """Of the database; empty: no history is kept."""
    if config.history == NO_HISTORY:
        return ""
    if config.history:
        return config.history
    if not config.store.startswith("postgres"):
        return f"sqlite:///{quote(os.path.abspath(os.path.join(config.directory, 'history.sqlite')))}"
    from fireflyer.cluster.history.database import DEFAULT_SCHEMA
    from fireflyer.kvstore.postgres import DEFAULT_TABLE

    parts = urlsplit(config.store)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    table = options.pop("table", DEFAULT_TABLE)
    schema = DEFAULT_SCHEMA if table == DEFAULT_TABLE else f"{table}_history"
    return urlunsplit(parts._replace(query=urlencode({**options, "schema": schema})))
