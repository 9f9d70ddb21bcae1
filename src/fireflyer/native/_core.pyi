# The compiled extension, as mypy sees it. One section per file of cpp/bind; a test holds the names to the module's.
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Buffer: TypeAlias = Buffer | npt.NDArray[Any]  # NumPy arrays declare the protocol from Python 3.12 on only

# --- collectives/kernels.cpp: sums, rounding, checksums. ---
# The meaning is that of the twins in fireflyer.collectives.kernels.

def reduce(out: _Buffer, inputs: Sequence[_Buffer], dtype: str, op: str = "sum", divisor: int = 1) -> int: ...
def reduce_many(
    outs: Sequence[_Buffer], inputs: Sequence[_Buffer], dtype: str, op: str = "sum", divisor: int = 1
) -> int: ...
def reduce_to_accum(acc: _Buffer, inputs: Sequence[_Buffer], dtype: str, op: str = "sum") -> int: ...
def round_from_accum(out: _Buffer, acc: _Buffer, dtype: str, divisor: int = 1) -> int: ...
def quantize_fp8_blocks(codes: _Buffer, scales: _Buffer, values: _Buffer, block: int = 128) -> None: ...
def dequantize_fp8_blocks(values: _Buffer, codes: _Buffer, scales: _Buffer, block: int = 128) -> None: ...
def encode_token_rows(payload: _Buffer, values: _Buffer, width: int, codec: str) -> None: ...
def decode_token_rows(values: _Buffer, payload: _Buffer, width: int, codec: str, dtype: str) -> None: ...
def crc32c(data: _Buffer, crc: int = 0) -> int: ...
def crc32c_copy(out: _Buffer, data: _Buffer, crc: int = 0) -> int: ...
def crc32c_joined(first: int, second: int, second_bytes: int) -> int: ...
def crc32c_portable(data: _Buffer, crc: int = 0) -> int: ...
def cpu_features() -> list[str]: ...
def active_isa() -> str: ...
def isa_names() -> list[str]: ...
def set_isa(name: str) -> None: ...

# --- collectives/rows.cpp: rows of tokens, gathered, encoded, decoded, added up. ---
# The meaning is that of the twins in fireflyer.collectives.dispatch.row_twins.

def gather_rows(out: _Buffer, rows: Sequence[_Buffer], index: _Buffer, row_bytes: int) -> None: ...
def encode_rows(out: _Buffer, rows: Sequence[_Buffer], index: _Buffer, width: int, codec: str, dtype: str) -> None: ...
def decode_rows(out: _Buffer, rows: Sequence[_Buffer], index: _Buffer, width: int, codec: str, dtype: str) -> None: ...
def sum_rows(
    out: _Buffer,
    rows: Sequence[_Buffer],
    index: _Buffer,
    first: _Buffer,
    width: int,
    codec: str,
    out_codec: str,
    accum: str,
) -> None: ...

# --- ranges.cpp: many ranges of memory in one call; arrays of uint64 (sums: uint32), addresses among them. ---

def copy_ranges(targets: _Buffer, sources: _Buffer, sizes: _Buffer, threads: int = 1) -> None: ...
def crc32c_ranges(
    sums: _Buffer, data: _Buffer, begins: _Buffer, sizes: _Buffer, targets: _Buffer | None = None
) -> None: ...

# --- tensors.cpp: where tensors lie, by the table of DLPack of their framework. ---

# Of each tensor whose type is one of `types`, and whose elements lie row by row in host memory with that shape: a
# number for its dtype (lanes << 16 | code << 8 | bits, as DLPack has them) and its address, 0 where it has no elements.
# Of all others 0 and 0. `dtypes` is of uint32, `addresses` of uint64. ValueError: lengths differ; a table of another
# version.
def tensors_in_memory(
    api: object,
    tensors: list[Any],
    types: tuple[type, ...],
    shapes: list[tuple[int, ...]],
    dtypes: _Buffer,
    addresses: _Buffer,
) -> None: ...

# --- placement.cpp: where memory lies. The words say what the system refuses; empty: nothing. ---

# Memory that begins with a page, and that nobody has touched yet.
def prefer_node(memory: _Buffer, node: int) -> str: ...

# Of so many of its pages, spread evenly; a negative number is an errno: -ENOENT where nobody has touched the page.
def page_nodes(memory: _Buffer, pages: int) -> tuple[list[int], str]: ...

# --- collectives/executor.cpp: the executor of one rank. ---
# Arguments as in cpp/include/fireflyer/collectives/executor.hpp.

# --- collectives/codes.cpp: names by number. ---

OP_KINDS: tuple[str, ...]
REDUCE_OPS: tuple[str, ...]
DTYPES: tuple[tuple[str, int], ...]  # and bytes of an element
FAILURE_KINDS: tuple[str, ...]

class NativeWork:
    def wait(self, timeout_ns: int) -> bool: ...
    def done(self) -> bool: ...
    # Of what was received, once it is done; else -1.
    def source(self) -> int: ...
    def failure(self) -> tuple[int, int, int, str]: ...

# Where a contiguous buffer lies; 0 for an object that has none.
def address_of(buffer: object) -> int: ...

class Arena:
    def __init__(self, fd: int) -> None: ...
    @staticmethod
    def create(size_bytes: int) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def used(self) -> int: ...
    def prefer_node(self, node: int) -> str: ...
    def holds(self, address: int, size_bytes: int) -> bool: ...
    def allocate(self, size_bytes: int) -> npt.NDArray[np.uint8]: ...

class Fabric:
    def __init__(self, module_path: str) -> None: ...
    def address(self) -> bytes: ...
    def meet(self, node: int, address: bytes, outgoing: bytes, incoming: bytes) -> str: ...

class Executor:
    def __init__(
        self,
        *,
        rank: int,
        node_of_rank: list[int],
        labels: list[str],
        trees: list[list[int]],
        timeout_ns: int,
        window_fd: int,
        doorbell_fd: int,
        leader_fd: int,
        local_fds: list[tuple[int, int]],
        connections: list[tuple[int, int, int, int]],
        routes: list[tuple[str, int, int, int]],
        programs: list[tuple[str, int, int, int, int, list[tuple[int, int, int, int, int, list[int]]]]],
        arena: Arena | None,
        local_peers: list[tuple[int, int, int, int]],
        cpus: list[int] = ...,
        network_cpus: list[int] = ...,
        fabric: Fabric | None = None,
    ) -> None: ...
    def submit(self, kind: int, source: int, target: int, count: int, dtype: int, root: int, op: int) -> NativeWork: ...
    def call(
        self, kind: int, source: int, target: int, count: int, dtype: int, root: int, op: int, patience_ns: int
    ) -> NativeWork | None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...
    def placement_warnings(self) -> list[str]: ...
    def flight(self) -> dict[str, Any]: ...
    def stats(self) -> tuple[int, int, int, list[int]]: ...

def create_window(local_ranks: int, slots: int, chunk_bytes: int) -> int: ...
def interleave_window(fd: int, nodes: list[int]) -> str: ...

class OpenMemory:
    def __init__(self) -> None: ...
    def close(self) -> None: ...

def memory_probe() -> tuple[int, int, int]: ...
def can_access(pid: int, address: int, number: int) -> bool: ...
def orient(parents: list[int], root: int, node: int) -> tuple[int, list[int]]: ...
def tree_program(
    kind: str, parents: list[int], root: int, node: int, lane: int
) -> tuple[str, int, int, int, int, list[tuple[int, int, int, int, int, list[int]]]]: ...

# --- collectives/recorder.cpp: the flight recorder. ---
# `snapshot` is what fireflyer.collectives.flight.Snapshot is made of.

class RecorderEntry:
    def route(self, path: str, algorithm: int = 0, chunks: int = 0, chunk_bytes: int = 0) -> None: ...
    def started(self, now_ns: int) -> None: ...
    def progress(self, chunks_done: int, now_ns: int) -> None: ...
    def saturated(self, values: int) -> None: ...
    def finish(self, failure: str, now_ns: int) -> None: ...

class Recorder:
    def __init__(self, capacity: int = 1024) -> None: ...
    def begin(
        self,
        *,
        seq: int,
        kind: str,
        count: int,
        dtype: str,
        op: str = "",
        root: int = -1,
        path: str = "",
        bytes: int,
        submitted_ns: int,
    ) -> RecorderEntry: ...
    def begin_message(
        self,
        *,
        direction: str,
        peer: int,
        tag: int,
        seq: int,
        count: int,
        dtype: str,
        bytes: int,
        submitted_ns: int,
    ) -> RecorderEntry: ...
    def algorithm(self, name: str) -> int: ...
    def snapshot(self) -> dict[str, Any]: ...

# --- collectives/exchange.cpp: messages from rank to rank. ---
# Meaning as in cpp/include/fireflyer/collectives/p2p/exchange.hpp.

ANY_RANK: int

class Exchange:
    def link(self, rank: int, fd: int) -> None: ...
    def linked(self, rank: int) -> bool: ...
    def send(self, to: int, address: int, size_bytes: int, dtype: int, tag: int) -> NativeWork: ...
    def receive(self, source: int, address: int, size_bytes: int, dtype: int, tag: int) -> NativeWork: ...
    def fail(self, culprit: int, text: str) -> None: ...

def exchange_of(executor: Executor) -> Exchange: ...
def submit_parts(
    executor: Executor,
    kind: int,
    count: int,
    dtype: int,
    root: int,
    out: list[tuple[int, int, int]],
    in_: list[tuple[int, int, int]],
    sum: tuple[int, int, int, list[int]] | None = None,
) -> NativeWork: ...

# --- netsim/netsim.cpp: the flow simulator. Meaning as in cpp/include/fireflyer/netsim. ---

class FairRates:
    def __init__(self, capacities: npt.NDArray[np.float64]) -> None: ...
    def add_path(self, links: npt.NDArray[np.uint32], shares: npt.NDArray[np.float64], weight: float = 1.0) -> int: ...
    def set_flows(self, path: int, flows: int) -> None: ...
    def set_capacity(self, link: int, capacity: float) -> None: ...
    # How many levels of links were computed.
    def solve(self) -> int: ...
    # Of each flow of each path.
    def rates(self) -> npt.NDArray[np.float64]: ...

class FlowRun:
    def __init__(self, capacities: npt.NDArray[np.float64]) -> None: ...
    def add_path(self, links: npt.NDArray[np.uint32], shares: npt.NDArray[np.float64], weight: float = 1.0) -> int: ...
    def add_transfers(
        self,
        nbytes: npt.NDArray[np.float64],
        delay_s: npt.NDArray[np.float64],
        latency_s: npt.NDArray[np.float64],
        flow_starts: npt.NDArray[np.int64],
        flow_paths: npt.NDArray[np.int64],
        flow_shares: npt.NDArray[np.float64],
        after_starts: npt.NDArray[np.int64],
        after: npt.NDArray[np.int64],
    ) -> None: ...
    def run_until(self, time_s: float) -> None: ...
    def set_route(self, flow: int, path: int) -> None: ...
    def set_capacity(self, link: int, capacity: float) -> None: ...
    def pending_flows(self) -> npt.NDArray[np.int64]: ...
    @property
    def start_s(self) -> npt.NDArray[np.float64]: ...
    @property
    def finish_s(self) -> npt.NDArray[np.float64]: ...
    @property
    def path_bytes(self) -> npt.NDArray[np.float64]: ...
    @property
    def events(self) -> int: ...

class PacketRun:
    def __init__(
        self,
        capacities: npt.NDArray[np.float64],
        link_from: npt.NDArray[np.int64],
        link_to: npt.NDArray[np.int64],
        *,
        nodes: int,
        packet_bytes: int,
        buffer_bytes: int,
        window: int,
        hop_s: float,
        lane_weights: list[float],
    ) -> None: ...
    def add_path(self, links: npt.NDArray[np.uint32], lane: int = 0) -> int: ...
    def add_transfers(
        self,
        nbytes: npt.NDArray[np.float64],
        delay_s: npt.NDArray[np.float64],
        latency_s: npt.NDArray[np.float64],
        flow_starts: npt.NDArray[np.int64],
        flow_paths: npt.NDArray[np.int64],
        flow_shares: npt.NDArray[np.float64],
        after_starts: npt.NDArray[np.int64],
        after: npt.NDArray[np.int64],
    ) -> None: ...
    def run(self) -> None: ...
    @property
    def start_s(self) -> npt.NDArray[np.float64]: ...
    @property
    def finish_s(self) -> npt.NDArray[np.float64]: ...
    @property
    def blocked_s(self) -> npt.NDArray[np.float64]: ...
    @property
    def events(self) -> int: ...

# --- storage/node.cpp: the native half of a storage process. Meaning as in cpp/include/fireflyer/storage. ---
# Everything crosses as plain tuples of ints; thread-safe; what may wait releases the GIL.

_Chunk: TypeAlias = tuple[int, int]  # file, index
_Content: TypeAlias = tuple[int, int]  # made_in, version
_Held: TypeAlias = tuple[int, int, int, int]  # made_in, version, length, crc of all of it
# client, channel, sequence, file, index, made_in, version; version 0: it was given up
_Completion: TypeAlias = tuple[int, int, int, int, int, int, int]

# args: (kind, message). kind: "usage", "conflict", "no_space", "damaged", "failed" (the disk refused: open it anew),
# "hung" (the disk does not answer).
class ChunkError(RuntimeError): ...

# No call blocks but open_target and close.
#
# event_fd (an eventfd; do not read it) is readable while `take` has something:
#   ("message", link, body, handle)                 handle 0: no payload; else `release` it in the end
#   ("lost", link, reason)                          once for every link, but for those that `close` ends; its last event
#   ("staged", target, job, made_in, version, length, crc)     durable; of the whole chunk; 0, 0 for a removal
#   ("stage_failed", target, job, kind, message)    nothing was staged; kind: those of ChunkError, and "bad_data"
#   ("dropped", target, job)                        durable
#   ("adopted", target, job)                        durable; in order
#   ("damage", target, file, index)                 on record now; told once for a content
#   ("disk_failed", target, message)                once; every later update of the target fails
#   ("verified", target, job, (file, index) | None, bytes)     the last one that was verified; None: the end
class ChunkNode:
    # io_threads: for all links. job_threads: for each target, so that a disk that hangs holds up no other one.
    # buffer_bytes: for payloads and unread answers in all. Links that are not trusted get half at the most, each owner
    # less than the others leave, and a payload above that half ends its link: 128 MiB at least for chunks of 64 MiB.
    # cold_reads: who fetches what is not in the page cache: "kernel" (io_uring; where it does not do that, or forbids
    # it, as the other), "threads" (of the target).
    # unread_ns: a link that takes less than 64 KiB of its answers in this time, while more wait, ends.
    def __init__(
        self,
        *,
        io_threads: int,
        job_threads: int,
        buffer_bytes: int,
        cold_reads: str = "kernel",
        unread_ns: int = ...,
    ) -> None: ...
    # What came of it.
    @property
    def cold_reads(self) -> str: ...
    @property
    def event_fd(self) -> int: ...
    def take(self, limit: int) -> list[tuple[Any, ...]]: ...
    # Reads the journal, and locks the directory, which must exist; what is not its own it leaves alone.
    # capacity_bytes 0: what the disk has. reserve: share of the disk that is left free, and at most how much that is.
    # BlockingIOError: locked by another one. OSError: the disk. ChunkError "damaged": what was durable is gone.
    # ValueError: open already.
    def open_target(
        self,
        target: int,
        directory: str,
        *,
        capacity_bytes: int = 0,
        reserve: float = 0.05,
        reserve_at_most_bytes: int = ...,
        durable: bool = True,
    ) -> ChunkTarget: ...
    # A connected, authenticated stream socket's descriptor (detached), nothing read ahead. It is the node's from now
    # on, also when this raises. Without `reads` a frame of reads ends the link. Link numbers are never used twice.
    # `trusted`: as `trust`, before the first byte is read. `owner`: links of one name share what an owner may hold;
    # those of none have a share each.
    def connect(self, fd: int, *, reads: bool, trusted: bool = False, owner: str = "") -> int: ...
    # Files file_from <= file < file_to may be read there until then (CLOCK_BOOTTIME); the latest grant of a file or
    # range counts. ValueError: above 65536 files or 64 ranges. Here and below, a link that has ended is ignored.
    def grant(self, link: int, file_from: int, file_to: int, until_ns: int) -> None: ...
    # May read all files and use all buffers. If there is none for 200 ms its message is dropped (peers send again),
    # so that two nodes do not wait for each other.
    def trust(self, link: int) -> None: ...
    def disconnect(self, link: int) -> None: ...
    # At most once; `handle` may be released at once. Above 4096 frames or 64 MiB of bodies that wait the link ends.
    # ValueError: body above 256 KiB, no such handle.
    def send(self, link: int, body: bytes, handle: int = 0) -> None: ...
    # The payload is that content of the chunk, pending or committed, read and verified in a job thread. Nothing is
    # sent if it is gone, or damaged (event), or there is no buffer for 200 ms.
    def send_content(
        self, link: int, body: bytes, target: int, file: int, index: int, made_in: int, version: int
    ) -> None: ...
    # Bytes of its data. ValueError: no such handle.
    def length(self, handle: int) -> int: ...
    # Stages and sends that were asked for before still have the data.
    def release(self, handle: int) -> None: ...
    # What reads obey, replaced as a whole: target, chain, chain_version, serving, fence_until_ns (CLOCK_BOOTTIME),
    # tail, answers_committed.
    def publish(self, entries: Sequence[tuple[int, int, int, bool, int, int, bool]]) -> None: ...
    # links, reads, fetched (of these, from the disk), read_bytes, refused, messages, dropped, held_back (times that a
    # link waited for memory of its owner's share), stalled (links that ended for standing still), buffer_bytes,
    # handles, events (waiting)
    def stats(self) -> dict[str, int]: ...
    # Ends the links, then what the targets have begun.
    def close(self) -> None: ...

# One target's engine. commit, drop, adopt, forget have taken effect in memory when they return. Raises ChunkError;
# ValueError after `close`.
class ChunkTarget:
    @property
    def number(self) -> int: ...
    # operation: "write", "truncate", "remove", "replace". base None: the chunk is absent. length, crc: of the data of
    # `handle` (write, replace), or the new length (truncate). completion: client, channel, sequence; durable
    # together with the content.
    def stage(
        self,
        job: int,
        chunk: _Chunk,
        next: _Content,
        base: _Content | None,
        operation: str,
        offset: int,
        length: int,
        crc: int,
        handle: int,
        completion: tuple[int, int, int] | None,
    ) -> None: ...
    def commit(self, chunk: _Chunk, content: _Content) -> None: ...
    def drop(self, job: int, chunk: _Chunk, content: _Content, completion: _Completion | None) -> None: ...
    def adopt(self, job: int, completions: Sequence[_Completion], reset: bool) -> None: ...
    def forget(self, client: int) -> None: ...
    # One step of a scrub: committed contents of the chunks after this one, until so many bytes were read;
    # a chunk counts 64 KiB at least (unless it has no bytes at all).
    def verify(self, job: int, after: _Chunk | None, limit_bytes: int) -> None: ...
    @property
    def completion_count(self) -> int: ...
    # committed, pending (length -1: a removal), damaged
    def find(self, chunk: _Chunk) -> tuple[_Held | None, _Held | None, bool] | None: ...
    def completion(self, client: int, channel: int) -> _Completion | None: ...
    # After this (client, channel), in order.
    def completions(self, after: tuple[int, int] | None, limit: int) -> list[_Completion]: ...
    # In order; None: something is pending, or it is damaged, or not committed.
    def chunks(self, after: _Chunk | None, limit: int) -> list[tuple[_Chunk, _Held | None]]: ...
    # Indices of the file's chunks from this one on; 256 at most: go on behind the last. Those with something pending
    # too.
    def of_file(self, file: int, index: int, limit: int, *, backwards: bool = False) -> list[int]: ...
    def pending(self) -> list[_Chunk]: ...
    # chunks, pending, rows, file_bytes, taken_bytes, journal_bytes, memory_bytes, jobs (waiting); of the disk:
    # free_bytes, total_bytes
    def stats(self) -> dict[str, int]: ...
    # Ends what was begun, makes it durable, and gives the directory to others. It is not served from then on.
    # ChunkError: "failed" if not all was written; "hung" after 10 s without an answer of the disk, which stays locked.
    def close(self) -> None: ...

# --- storage/ring.cpp: reads and messages of one client. ---
# One thread at a time (RuntimeError); ValueError once closed.

# Completions:
#   ("read", tag, status, length, made_in, version, chunk_length, chain_version, where, crc)    crc: of these bytes
#        found 1, missing 2, not committed 3 (ask target `where`), stale 4 (the node has `chain_version`), damaged 5,
#        denied 6, usage 7; 0: the connection broke
#   ("reads", completions)                    of `prepare_reads`, all that there are, in front; packed, 56 bytes each,
#        little-endian: u64 tag, version, where; u32 status, length, made_in, chunk_length, chain_version, 0; u64 0
#   ("message", server, body, data | None)    what the node says; which question it answers is in the body
#   ("lost", server, reason)                  once, behind the reads that failed with it; no message from it comes after
class ChunkRing:
    def __init__(self) -> None: ...
    # Readable when `wait(0, 0)` has something to do: for add_reader.
    @property
    def fd(self) -> int: ...
    # A connected, authenticated stream socket's descriptor (detached), nothing read ahead. Numbers are never used
    # twice.
    def add(self, fd: int) -> int: ...
    # As if the connection broke.
    def remove(self, server: int) -> None: ...
    # The first `length` bytes of `into`, writable and contiguous, held until the completion. Returns a number for
    # `cancel`.
    def prepare_read(
        self,
        server: int,
        tag: int,
        chain: int,
        chain_version: int,
        file: int,
        index: int,
        offset: int,
        length: int,
        into: _Buffer,
    ) -> int: ...
    # Many at once. `requests`: packed, 48 bytes each, little-endian: u64 file, at (in `into`); u32 server, chain,
    # chain_version, index, offset, length; u64 0. Read i has tag `tag + i`, and the number that is returned + i.
    # ValueError for what does not fit, before any is prepared.
    def prepare_reads(self, requests: _Buffer, into: _Buffer, tag: int) -> int: ...
    # `data` (contiguous, up to 64 MiB) is sent from where it lies, and held until it was sent or the server is lost.
    # ValueError: the loss of the server was told already; body above 256 KiB.
    def prepare_message(self, server: int, body: bytes, data: _Buffer | None = None) -> None: ...
    def submit(self) -> None: ...
    # At least `least` completions; fewer only after timeout_ns (negative: none), or when no more are under way: reads,
    # and messages that were not followed by one from the same server. Handlers of signals run meanwhile (not with this
    # ring: RuntimeError); what one raises ends the wait, and takes nothing.
    def wait(self, least: int, timeout_ns: int) -> list[tuple[Any, ...]]: ...
    # True: its memory is not touched any more and no completion comes.
    def cancel(self, read: int) -> bool: ...
    @property
    def under_way(self) -> int: ...
    def close(self) -> None: ...
