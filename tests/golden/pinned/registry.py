"""The formats, by names that never change.

The left side names the recorded data (`tests/golden/wire/NAME.jsonl`); the right side is the type that has this format
today. Who renames or moves a class changes the right side only. A new decoder gets a new line here, and its data with
`python -m tests.golden.pinned.record --add`.

A format that is extended, as by an optional field, gets the next `revision` and with it new data: what was recorded of
the older revisions must still be decoded, back to `oldest`, and is no more compared byte for byte.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from fireflyer.accounts import calls as account_calls
from fireflyer.accounts import rows as account_rows
from fireflyer.accounts import user_calls
from fireflyer.analytics.reliability import log_lines, platform_progress
from fireflyer.base import events, health_event, node_counters
from fireflyer.checkpoint import agreement, importing, restoring
from fireflyer.checkpoint.core import manager as checkpoint_saves
from fireflyer.checkpoint.core import manifest as checkpoint_manifest
from fireflyer.checkpoint.core import safetensors, stages
from fireflyer.checkpoint.dcp import writer as checkpoint_dcp
from fireflyer.cli.fs.admin.placement import Domains
from fireflyer.cli.hosts import config as cluster_hosts_file
from fireflyer.cli.jobs import agent as agent_command
from fireflyer.cluster.agent import records as agent_records
from fireflyer.cluster.agent import start as agent_start
from fireflyer.cluster.client import Connection
from fireflyer.cluster.core import agent as agent_core
from fireflyer.cluster.core import runs as agent_runs
from fireflyer.cluster.core import tracebacks as cluster_tracebacks
from fireflyer.cluster.core.health import findings as health_findings
from fireflyer.cluster.core.health import records as health_records
from fireflyer.cluster.core.objects import manifest, uv_lock
from fireflyer.cluster.core.platform import commands, history_pages, views
from fireflyer.cluster.core.platform.store import history
from fireflyer.cluster.core.platform.store import rows as platform_rows
from fireflyer.cluster.core.slurm import node_record as slurm_node
from fireflyer.cluster.core.slurm import request as slurm_request
from fireflyer.cluster.local import config as platform_up
from fireflyer.cluster.local import layout as platform_layout
from fireflyer.cluster.manager import known as platform_known
from fireflyer.cluster.manager import machines as platform_machines
from fireflyer.cluster.manager.config import PlatformConfig
from fireflyer.cluster.manager.web import sessions
from fireflyer.cluster.objects import log_indexes, stat_cache
from fireflyer.cluster.schema import agent as cluster_agent
from fireflyer.cluster.schema import api, execs, logs, runner, sync, tasks, tickets, webhooks
from fireflyer.cluster.schema import hosts as cluster_hosts
from fireflyer.cluster.schema import job as cluster_job
from fireflyer.cluster.schema import join as cluster_join
from fireflyer.cluster.schema import wire as cluster_wire
from fireflyer.codesign.parallel import NodeModel, PlanFile
from fireflyer.collectives.bootstrap import job as collectives_job
from fireflyer.collectives.bootstrap import local_peers, membership, rendezvous, transports
from fireflyer.collectives.devices import bridges
from fireflyer.collectives.flight import dump as flight
from fireflyer.collectives.p2p import peer_listener
from fireflyer.collectives.planning import declaration
from fireflyer.collectives.planning.plan import Plan
from fireflyer.collectives.torch import store as torch_store
from fireflyer.collectives.torch_pair_join import _CudaIpcHandle
from fireflyer.data import manifest as data_manifest
from fireflyer.data import mixture, tokenizer
from fireflyer.data.packing import state_file
from fireflyer.fs.client.local import _Cluster
from fireflyer.fs.core import capability
from fireflyer.fs.core import rows as manager_rows
from fireflyer.fs.core.chain import served_notes
from fireflyer.fs.core.meta import open_rows, tables
from fireflyer.fs.schema import data, inodes, meta, routing
from fireflyer.fs.schema import manager as manager_schema
from fireflyer.fs.service.local.layout import LocalCluster
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.meta import registry
from fireflyer.fs.service.meta.config import MetaConfig
from fireflyer.fs.service.storage import target_directory
from fireflyer.fs.service.storage.config import StorageConfig
from fireflyer.identity import TokenInfo, handshake, machines, tokens
from fireflyer.kvstore.core import fenced
from fireflyer.kvstore.core.keys import KeyRange
from fireflyer.kvstore.dump import Row
from fireflyer.planning import ClusterPlan, NetworkFile, PriceList
from fireflyer.recipes import corpus, train_gpt
from fireflyer.recipes.soak import acknowledged as soak_acknowledged
from fireflyer.recipes.testbed import reference as whole_reference
from fireflyer.recipes.trainer.core.anomalies import AnomalyState
from fireflyer.recipes.trainer.core.figures import MetricsLine
from fireflyer.recipes.trainer.core.recipe import Recipe
from fireflyer.recipes.trainer.sources import DataState
from fireflyer.runtime import reporter, store, suspension
from fireflyer.runtime.processes import identity as process_identity
from fireflyer.runtime.processes.run_lock import _Holder
from fireflyer.runtime.rpc import messages as rpc
from fireflyer.validators.core.checks import evidence as health_evidence
from fireflyer.validators.core.checks import policy as health_policy
from fireflyer.validators.core.validation import records as validator_records
from fireflyer.validators.core.validation import reports as validation_reports

__all__ = ["FORMATS", "Codec", "Format"]

Codec = Literal["json", "msgpack", "toml", "object"]


class Format(NamedTuple):
    """`object`: what other code decodes, as native code or TOML inside of JSON; recorded as JSON."""

    name: str
    codec: Codec
    kind: Any
    revision: int = 1
    oldest: int = 1


FORMATS: Final = (
    # Reports of ranks, the log of a job, launcher and supervisors.
    Format("job.event-log", "json", events.Logged, revision=6),
    Format("job.report", "msgpack", events.Report, revision=3),
    Format("rpc.cluster.report.request", "msgpack", reporter.Reports, revision=3),
    Format("rpc.cluster.report.answer", "msgpack", reporter.Acknowledged),
    Format("job.agent-config", "json", cluster_wire.SupervisorConfig, revision=3),
    Format("job.node-counters", "json", node_counters.NodeCounters),
    Format("node.health-event", "json", health_event.HealthEvent),
    Format("node.health-policy", "toml", health_policy.HealthPolicy, revision=3),
    Format("node.health-counters", "json", health_evidence.Counters, revision=2),
    Format("node.slurm-drains", "json", slurm_node.DrainRecord, revision=4, oldest=2),
    Format("node.validator-record", "json", validator_records.NodeRecord, revision=3),
    Format("node.validation-report", "json", validation_reports.NodeReport, revision=3),
    Format("node.link-report", "json", validation_reports.LinkReport),
    Format("node.journal-entry", "json", log_lines._JournalEntry, revision=2),
    Format("reliability.platform-progress", "json", platform_progress.Progress),
    Format("job.error-file", "json", cluster_tracebacks._ErrorFile),
    Format("job.fault", "object", cluster_job.Fault),
    Format("rpc.cluster.agent_hello.request", "msgpack", cluster_wire.SupervisorHello),
    Format("rpc.cluster.agent_next.request", "msgpack", cluster_wire.Next),
    Format("rpc.cluster.agent_next.answer", "msgpack", cluster_wire.NumberedCommand, revision=3),
    Format("rpc.cluster.empty", "msgpack", cluster_wire.Done),
    Format("rpc.cluster.agent_beat.request", "msgpack", cluster_wire.Heartbeat),
    Format("rpc.cluster.rank_started.request", "msgpack", cluster_wire.Started),
    Format("rpc.cluster.rank_exited.request", "msgpack", cluster_wire.RankEnd, revision=3),
    Format("rpc.cluster.ranks_gone.request", "msgpack", cluster_wire.Gone, revision=3),
    Format("rpc.cluster.node_checked.request", "msgpack", cluster_wire.Checked, revision=2),
    Format("rpc.cluster.trouble.request", "msgpack", cluster_wire.LogError),
    Format("rpc.cluster.output.request", "msgpack", cluster_wire.Output),
    Format("rpc.cluster.suspend_points.request", "msgpack", cluster_wire.Points),
    Format("rpc.cluster.whole_life_state.request", "msgpack", suspension.WholeLifeRequest),
    Format("rpc.cluster.whole_life_state.answer", "msgpack", suspension.WholeLifeState),
    Format("rpc.cluster.set_watchdog.request", "msgpack", suspension.Watchdog),
    Format("rpc.cluster.set_watchdog.answer", "msgpack", suspension.WatchdogIsSet),
    Format("rpc.cluster.port_found.request", "msgpack", cluster_wire.PortFound),
    Format("rpc.cluster.rank_log.request", "msgpack", cluster_wire.LogBytes),
    Format("rpc.cluster.run_file", "msgpack", cluster_wire.RunFile),
    Format("rpc.cluster.run_files.answer", "msgpack", cluster_wire.RunFiles),
    Format("job.host-question", "json", cluster_hosts.HostQuestion, revision=3),
    Format("job.host-facts", "json", cluster_hosts.HostFacts, revision=4),
    Format("job.node-orders", "json", cluster_hosts.NodeOrders, revision=3),
    Format("rpc.cluster.host_question.answer", "msgpack", cluster_hosts.HostQuestion, revision=3),
    Format("rpc.cluster.host_join.request", "msgpack", cluster_join.JoinRequest, revision=4),
    Format("rpc.cluster.host_join.answer", "msgpack", cluster_join.Joined),
    Format("rpc.cluster.host_next.answer", "msgpack", cluster_join.NumberedHostCommand, revision=2),
    Format("rpc.cluster.host_guard_ended.request", "msgpack", cluster_join.GuardEnded),
    # Agents of machines, what they keep, and which machines have joined.
    Format("rpc.agent.join_machine.request", "msgpack", cluster_agent.JoinMachine, revision=2),
    Format("rpc.agent.join_machine.answer", "msgpack", cluster_agent.Admitted, revision=2),
    Format("rpc.agent.ask.request", "msgpack", cluster_hosts.HostQuestion, revision=2),
    Format("rpc.agent.ask.answer", "msgpack", cluster_hosts.HostFacts, revision=3),
    Format("rpc.agent.start_guard.request", "msgpack", cluster_agent.GuardOrder, revision=3),
    Format("rpc.agent.guard_name.request", "msgpack", cluster_agent.GuardName),
    Format("rpc.agent.guard_status.answer", "msgpack", cluster_agent.GuardStatus),
    Format("rpc.agent.list_guards.answer", "msgpack", cluster_agent.GuardStatuses),
    Format("agent.membership", "json", agent_records.Membership, revision=2),
    Format("agent.guard-order", "json", agent_core.Order, revision=2),
    Format("agent.guard-end", "json", agent_core.End),
    Format("agent.guard-process", "json", process_identity.ProcessIdentity),
    Format("identity.machines-file", "json", machines._File),
    Format("agent.guard-starting", "json", agent_start.Starting),
    Format("agent.leader", "json", agent_records.Leader),
    Format("agent.run-record", "json", agent_runs.RunRecord, revision=3),
    Format("agent.accounts-file", "toml", agent_command._AccountsFile),
    # Runs of the platform: what agents and managers, and an agent and a launcher, tell each other.
    Format("rpc.platform.sync.request", "msgpack", sync.Sync, revision=7),
    Format("rpc.platform.sync.answer", "msgpack", sync.Orders, revision=7),
    Format("rpc.platform.fetch_blob.request", "msgpack", sync.FetchBlob),
    Format("rpc.platform.fetch_blob.answer", "msgpack", sync.BlobPiece),
    Format("rpc.platform.wait_execs.request", "msgpack", execs.WaitExecs),
    Format("rpc.platform.wait_execs.answer", "msgpack", execs.ExecOrders),
    Format("rpc.platform.receive_frames.request", "msgpack", execs.FramesWanted),
    Format("rpc.platform.frames", "msgpack", execs.FramesHere),
    Format("rpc.platform.send_frames.answer", "msgpack", execs.Taken),
    Format("exec.frame", "msgpack", execs.Frame),
    Format("rpc.platform.append_log.request", "msgpack", logs.AppendLog),
    Format("rpc.platform.end_log.request", "msgpack", logs.EndLog),
    Format("rpc.platform.log.answer", "msgpack", logs.LogAnswer),
    Format("platform.ticket", "msgpack", tickets.Claims),
    Format("platform.ticket-fields", "object", tickets.Claims),
    Format("platform.runner-orders", "msgpack", runner.RunnerOrders, revision=5),
    Format("platform.run-progress", "json", runner.RunProgress, revision=2),
    Format("platform.run-end", "json", sync.EndedRun, revision=2),
    # Rows of the platform's managers, and what they keep beside these.
    Format("platform.row.cluster", "msgpack", platform_rows.ClusterRow, revision=3),
    Format("platform.row.config", "msgpack", platform_rows.ConfigRow, revision=2),
    Format("platform.row.task", "msgpack", platform_rows.TaskRow, revision=2),
    Format("platform.row.submission", "msgpack", platform_rows.SubmissionRow),
    Format("platform.row.run", "msgpack", platform_rows.RunRow, revision=3),
    Format("platform.row.node", "msgpack", platform_rows.NodeRow, revision=2),
    Format("platform.row.place", "msgpack", platform_rows.PlaceRow),
    Format("platform.row.usage", "msgpack", platform_rows.UsageRow),
    Format("platform.row.webhook", "msgpack", platform_rows.WebhookRow),
    Format("platform.row.notification", "msgpack", platform_rows.NotificationRow),
    Format("platform.row.outbox", "msgpack", history._Envelope, revision=4),
    Format("platform.row.audit", "msgpack", history.CommandDone),
    Format("platform.row.job", "msgpack", platform_rows.JobRow, revision=2),
    Format("platform.row.health", "msgpack", health_records.NodeHealth, revision=4),
    Format("platform.row.repair-ticket", "msgpack", health_records.RepairTicket),
    Format("platform.row.part", "msgpack", health_records.PartHistory),
    Format("platform.health-finding", "json", health_findings.Finding),
    Format("platform.job-orders", "json", slurm_request.JobOrders),
    Format("platform.row.machine", "msgpack", platform_machines.MachineRow, revision=2),
    Format("platform.machine-fields", "object", platform_machines.MachineRow, revision=2),
    Format("platform.row.manager", "msgpack", platform_known.ManagerRow),
    Format("platform.row.join-token", "msgpack", platform_machines.JoinToken, revision=2),
    Format("platform.join-token-fields", "object", platform_machines.JoinToken, revision=2),
    Format("platform.row.machines-version", "msgpack", platform_machines._Version),
    Format("platform.session", "msgpack", sessions._Claims),
    Format("platform.manager-config", "toml", PlatformConfig, revision=9),
    Format("platform.local", "json", platform_layout.LocalPlatform),
    Format("platform.uv-lock", "toml", uv_lock._Lock),
    Format("platform.up-file", "toml", platform_up.UpConfig, revision=5),
    Format("platform.connection", "json", Connection, revision=2),
    # The platform's HTTP API.
    Format("http.task-spec", "object", tasks.TaskSpec),
    Format("http.program", "object", tasks.Program),
    Format("http.set-limit", "object", commands.SetLimit),
    Format("http.remove-limit", "object", commands.RemoveLimit),
    Format("http.set-share", "object", commands.SetShare),
    Format("http.drain-node", "object", commands.DrainNode),
    Format("http.report-fault", "object", commands.ReportFault),
    Format("http.record-repair", "object", commands.RecordRepair),
    Format("http.return-node", "object", commands.ReturnNode),
    Format("http.submitted", "json", api.Submitted),
    Format("http.task", "json", views.TaskAnswer, revision=2),
    Format("http.task-reasons", "json", views.TaskReasons),
    Format("http.tasks", "json", views.TaskPage),
    Format("http.start", "json", views.Why, revision=2),
    Format("http.exec-request", "object", execs.ExecRequest),
    Format("http.exec-program", "object", execs.ExecProgram),
    Format("http.exec-accepted", "json", execs.ExecAccepted),
    Format("http.commanded", "json", api.Commanded),
    Format("http.missing-blobs", "json", api.MissingBlobs),
    Format("http.nodes", "json", tuple[views.NodeView, ...], revision=5),
    Format("http.node", "json", views.NodeView, revision=5),
    Format("http.quota", "json", views.QuotaView),
    Format("http.limits", "json", tuple[views.LimitUse, ...]),
    Format("http.join-token", "json", api.JoinTokenAnswer),
    Format("http.users", "json", tuple[views.UserView, ...]),
    Format("http.new-webhook", "json", webhooks.NewWebhook),
    Format("http.shown-webhook", "json", webhooks.ShownWebhook),
    Format("http.webhooks", "json", list[webhooks.WebhookView]),
    Format("webhook.notification", "json", webhooks.Notification),
    Format("http.identity", "json", api.Identity, revision=2),
    Format("http.cluster", "json", views.ClusterView, revision=2),
    Format("http.known-user", "json", api.KnownUser),
    Format("http.known-users", "json", tuple[api.KnownUser, ...]),
    Format("http.tokens", "json", tuple[TokenInfo, ...]),
    Format("http.shown-token", "json", api.ShownToken),
    Format("http.utilisation", "json", api.UtilisationReport),
    Format("http.usage", "json", views.UsageReport),
    Format("http.past-tasks", "json", views.PastTaskPage),
    Format("http.past-task", "json", views.PastTaskAnswer),
    Format("http.audit", "json", views.AuditPage),
    Format("http.history-runs", "json", history_pages.RunPage, revision=2),
    Format("http.history-nodes", "json", history_pages.NodePage),
    Format("http.error", "json", api.ErrorView),
    Format("http.change", "json", api.Change),
    Format("http.task-logs", "json", logs.TaskLogs),
    Format("http.log-piece", "json", logs.LogPiece),
    Format("http.log-search", "json", logs.FoundLines),
    Format("http.log-event", "json", logs.LogEvent),
    Format("http.change-fields", "object", api.Change),
    # Snapshots of users' directories, and logs of runs.
    Format("objects.manifest", "msgpack", manifest.Manifest),
    Format("objects.stat-cache", "msgpack", stat_cache._CacheFile),
    Format("objects.log-index", "msgpack", log_indexes.Index),
    # The rendezvous store.
    Format("rpc.store.set.request", "msgpack", store._Set),
    Format("rpc.store.key.request", "msgpack", store._Key),
    Format("rpc.store.add.request", "msgpack", store._Add),
    Format("rpc.store.wait.request", "msgpack", store._Wait),
    Format("rpc.store.prefix.request", "msgpack", store._Prefix),
    Format("rpc.store.empty.answer", "msgpack", store._Done),
    Format("rpc.store.value.answer", "msgpack", store._Value),
    Format("rpc.store.wait.answer", "msgpack", store._Values),
    Format("rpc.store.found.answer", "msgpack", store._Found),
    Format("rpc.store.number.answer", "msgpack", store._Number),
    Format("rpc.store.names.answer", "msgpack", store._Names),
    # Frames of RPC, and the handshake before them.
    Format("rpc.from-client", "msgpack", rpc.FromClient),
    Format("rpc.from-server", "msgpack", rpc.FromServer),
    Format("handshake.hello", "msgpack", handshake._Hello),
    Format("handshake.version", "msgpack", handshake._Versioned),
    Format("handshake.challenge", "msgpack", handshake._Challenge | handshake._Refused),
    Format("handshake.proof", "msgpack", handshake._Proof),
    Format("handshake.verdict", "msgpack", handshake._Verdict | handshake._Refused),
    Format("identity.tokens-file", "json", tokens._File, revision=2),
    Format("accounts.state-row", "msgpack", account_rows.StateRow),
    Format("accounts.user-row", "msgpack", account_rows.UserRow),
    Format("accounts.uid-row", "msgpack", account_rows.UidRow),
    Format("accounts.token-row", "msgpack", account_rows.TokenRow),
    Format("accounts.import-row", "msgpack", account_rows.ImportRow),
    # Collectives: how ranks meet, what they keep, what they leave behind.
    Format("collectives.plan", "object", Plan),
    Format("collectives.kept-plan", "json", collectives_job.KeptPlan),
    Format("codesign.node-file", "toml", NodeModel, revision=4),
    Format("codesign.plan-file", "toml", PlanFile, revision=4),
    # Training from a recipe.
    Format("trainer.recipe", "object", Recipe, revision=4),
    Format("trainer.metrics-line", "json", MetricsLine, revision=5),
    Format("trainer.anomaly-state", "object", AnomalyState),
    Format("trainer.data-state", "object", DataState),
    Format("planning.cluster-plan", "toml", ClusterPlan, revision=2, oldest=2),
    Format("planning.network-file", "toml", NetworkFile, revision=2),
    Format("planning.price-list", "toml", PriceList, revision=2, oldest=2),
    Format("collectives.topology-file", "toml", declaration.Declaration),
    Format("collectives.topology", "json", declaration.Declaration),
    Format("collectives.member", "json", rendezvous.RankInfo, revision=2),
    Format("collectives.roster", "json", rendezvous.RendezvousResult),
    Format("collectives.door", "json", peer_listener.ListenAddress, revision=2),
    Format("collectives.doors", "json", list[peer_listener.ListenAddress], revision=2),
    Format("collectives.arrival", "json", membership.JoinRequest),
    Format("collectives.seats", "json", membership.Generation),
    Format("collectives.memory-beacons", "json", list[local_peers.MemoryProbe]),
    Format("collectives.bridges-report", "json", bridges.Report),
    Format("collectives.device-card", "json", _CudaIpcHandle),
    Format("collectives.places", "json", torch_store._Published),
    Format("collectives.transport-introduction", "json", transports._WorkerAddress),
    Format("collectives.flight-snapshot", "object", flight.Snapshot),
    Format("collectives.flight-head", "json", flight._Head),
    Format("collectives.flight-dump", "json", flight.Dump),
    # Checkpoints and data sets.
    Format("checkpoint.envelope", "json", checkpoint_manifest._Envelope),
    Format("checkpoint.manifest", "json", checkpoint_manifest.Manifest, revision=3),
    Format("checkpoint.job", "json", checkpoint_manifest._JobBody),
    Format("checkpoint.shard-record", "json", checkpoint_manifest.ShardRecord, revision=2),
    Format("checkpoint.save-answer", "json", checkpoint_saves._Answer),
    Format("checkpoint.record-parts", "json", checkpoint_saves._InParts),
    Format("checkpoint.dcp-shard", "json", checkpoint_dcp._Written),
    Format("checkpoint.safetensors-header", "json", dict[str, safetensors._Entry]),
    Format("checkpoint.model-index", "json", importing._Index),
    Format("checkpoint.restore-choice", "json", restoring._Choice),
    Format("checkpoint.save-go", "json", agreement._Go),
    Format("checkpoint.stage-message", "json", agreement._Message),
    Format("checkpoint.stage-list", "json", stages.StageList),
    Format("checkpoint.stage-share", "json", stages.StageShare),
    Format("data.recordset", "json", data_manifest.Manifest),
    Format("data.recordset-body", "json", data_manifest.ManifestBody, revision=2),
    Format("data.packing-file", "json", state_file._File),
    Format("data.packing-state", "json", state_file.State),
    Format("data.mixture-state", "json", mixture.MixtureState),
    Format("data.tokenizer", "json", tokenizer._File),
    Format("recipes.corpus-current", "json", corpus._Current),
    Format("recipes.corpus-meta", "object", corpus._Meta),
    Format("recipes.train-progress", "object", train_gpt.Progress),
    Format("recipes.soak-acknowledged", "json", soak_acknowledged.Noted),
    Format("recipes.whole-reference", "json", whole_reference._Cached),
    # The key-value store.
    Format("kvstore.journal-batch", "msgpack", list[tuple[list[KeyRange], list[tuple[bytes, bytes | None]]]]),
    # The file system: managers.
    Format("rpc.fs.ask.request", "msgpack", manager_schema.Request, revision=2),
    Format("rpc.fs.ask.answer", "msgpack", manager_schema.Answer, revision=2),
    Format("fs.manager.lease-row", "msgpack", fenced.LeaseRow),
    Format("fs.manager.state-row", "msgpack", manager_rows.StateRow),
    Format("fs.manager.node-row", "msgpack", manager_rows.NodeRow),
    Format("fs.manager.target-row", "msgpack", manager_rows.TargetRow, revision=2),
    Format("fs.manager.chain-row", "msgpack", routing.Chain, revision=2),
    Format("fs.manager.table-row", "msgpack", routing.ChainTable),
    Format("fs.manager.session-row", "msgpack", manager_rows.SessionRow),
    Format("fs.manager.move-row", "msgpack", manager_rows.MoveRow),
    # Chunks.
    Format("fs.data", "msgpack", data.Message),
    Format("fs.capability", "msgpack", capability.Capability),
    Format("fs.target.identity", "json", target_directory._Identity),
    Format("fs.target.run", "json", target_directory._Run),
    Format("fs.target.chain", "json", served_notes.ServedNote),
    # Metadata.
    Format("rpc.accounts.find-token.request", "msgpack", account_calls.FindToken),
    Format("rpc.accounts.find-token.answer", "msgpack", account_calls.FoundToken),
    Format("rpc.accounts.users.request", "msgpack", user_calls.UserRequest),
    Format("rpc.accounts.users.answer", "msgpack", user_calls.UserAnswer),
    Format("rpc.fs.meta.request", "msgpack", meta.Calls),
    Format("rpc.fs.meta.answer", "msgpack", meta.Answers),
    Format("fs.meta.call", "msgpack", meta.Call),
    Format("fs.meta.stored-answer", "msgpack", meta.Answer),
    Format("fs.meta.inode-row", "msgpack", inodes.Inode),
    Format("fs.meta.entry-row", "msgpack", tables.DentryRow),
    Format("fs.meta.area-row", "msgpack", tables.QuotaTreeRow),
    Format("fs.meta.trash-row", "msgpack", tables.TrashRow),
    Format("fs.meta.trash-clock-row", "msgpack", tables.TrashClockRow),
    Format("fs.meta.grant-row", "msgpack", inodes.Layout),
    Format("fs.meta.writer-row", "msgpack", open_rows.WriterRow),
    Format("fs.meta.locks-row", "msgpack", open_rows.LocksRow),
    Format("fs.meta.wait-row", "msgpack", open_rows.WaitRow),
    Format("fs.meta.client-row", "msgpack", open_rows.ClientRow),
    Format("fs.meta.cut-row", "msgpack", open_rows.TruncationRow),
    Format("fs.meta.unlinked-row", "msgpack", open_rows.UnlinkedRow),
    Format("fs.meta.collector-row", "msgpack", open_rows.LeaseRow),
    Format("fs.meta.service-row", "msgpack", registry.ServiceRow),
    Format("fs.meta.dump-row", "msgpack", Row),
    # Files of administrators, and of clusters on one machine.
    Format("fs.config.manager", "toml", ManagerConfig, revision=3),
    Format("fs.config.meta", "toml", MetaConfig, revision=2),
    Format("fs.config.storage", "toml", StorageConfig, revision=3),
    Format("fs.config.domains", "toml", Domains),
    Format("fs.local.cluster", "json", LocalCluster, revision=2),
    Format("fs.local.cluster-of-client", "json", _Cluster),
    Format("fs.local.lock", "json", _Holder),
    # The file of a cluster of several machines, and what one machine makes of it.
    Format("hosts.cluster-file", "toml", cluster_hosts_file.ClusterFile),
    Format("hosts.targets", "json", dict[int, int]),
    Format("hosts.platform-manager", "object", PlatformConfig, revision=5),
    Format("hosts.files-manager", "object", ManagerConfig),
    Format("hosts.files-meta", "object", MetaConfig),
    Format("hosts.files-storage", "object", StorageConfig, revision=2),
)
