// The flight recorder: what a rank was asked for last, how far each of it came, and when.
//
// A bounded ring of records. `begin` takes one (an allocation-free store under a short mutex) and gives a handle to it;
// the thread that performs the operation then says when it starts, how far it is, and how it ended. Anyone may take a
// `snapshot` at any time, also while operations run or hang: each record carries a version that is odd while it is being
// written, so a reader never holds a writer up, and every field is an atomic of its own.
//
// The ring overwrites the oldest record that has ended, never one that still waits or runs: the operation that hangs is
// the one that is looked for. When all records are of that kind, a new operation goes unrecorded (`dropped`); its handle
// does nothing. `submitted` and `finished` count on regardless, so that nobody takes a rank for one that missed a call.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "fireflyer/collectives/group/operation.hpp"

namespace ff {

// How the bytes travel. `unknown`: not yet decided (the operation waits for its turn) or nothing travels at all.
enum class Path : std::uint8_t {
  unknown = 0,
  small = 1,
  direct = 2,
  vm = 3,
  staged = 4,
  pipeline = 5,
  exchange = 6
};
enum class Direction : std::uint8_t {
  none = 0,
  send = 1,
  receive = 2
};
enum class RecordState : std::uint8_t {
  queued = 0,
  running = 1,
  done = 2,
  failed = 3
};

const char* path_name(Path path);
const char* direction_name(Direction direction);  // "", "send", "recv"
const char* record_state_name(RecordState state);

inline constexpr std::size_t max_samples = 32;
inline constexpr std::size_t max_algorithms = 16;

struct Sample {
  std::uint64_t chunk;  // chunks done
  std::int64_t ns;      // CLOCK_MONOTONIC, rounded down to 1 us after the start
};

// A copy of one record. Times are CLOCK_MONOTONIC, 0 where it has not happened yet.
struct RecordView {
  std::uint64_t id = 0;   // counts everything that was recorded, from 0
  OpDescriptor op;        // seq: of the collectives of this rank, or of the messages of this pair and direction
  Direction direction = Direction::none;
  std::int32_t peer = -1;     // of a send or receive; -1 otherwise, and while a receive from any rank has met no message
  std::int64_t tag = 0;
  std::uint64_t bytes = 0;    // of this rank's arrays
  Path path = Path::unknown;
  std::string algorithm;      // "" where there is no choice
  RecordState state = RecordState::queued;
  FailureKind failure = FailureKind::none;
  std::int64_t submitted_ns = 0;
  std::int64_t started_ns = 0;
  std::int64_t finished_ns = 0;
  std::int64_t progress_ns = 0;  // when the last chunk was done
  std::uint64_t chunks = 0;      // in all; 0 where unknown
  std::uint64_t chunks_done = 0;
  std::uint64_t chunk_bytes = 0; // of the array, in each but the last; 0 where unknown
  std::uint64_t saturated = 0;   // values that fp8 could not hold
  std::vector<Sample> samples;   // ascending, evenly thinned
};

// One instant on both clocks, so that the records of several hosts can be laid side by side.
struct ClockPair {
  std::int64_t monotonic_ns = 0;
  std::int64_t realtime_ns = 0;
};

// What this rank knows of another one: from the memory of its node, or from the last heartbeat of a neighbouring node.
struct PeerProgress {
  std::int32_t rank = -1;
  std::uint64_t entered = 0;   // collectives that it has begun
  std::uint64_t finished = 0;  // of these, that have ended; of a rank of another node, at least as many
  bool left = false;           // closed its communicator
  std::int64_t seen_ns = 0;    // CLOCK_MONOTONIC; when that was so
};

// This rank's end of a connection to a neighbouring node, at `at_ns`: which way bytes went, and what holds them up.
struct LinkEnd {
  std::int32_t rank = -1;            // the other end: the leader of its node
  int channel = -1;                  // -1: control
  int socket = 0;
  std::int64_t at_ns = 0;
  std::uint64_t sent = 0;            // bytes that the transport took; those of a header included
  std::int64_t sent_ns = 0;          // when it took the last ones
  std::int64_t blocked_since_ns = 0; // since when there are bytes that it does not take; 0: there are none
  std::int64_t unacknowledged = -1;  // of `sent`, bytes that the other system has not confirmed; -1: unknown
  std::int64_t retransmits = -1;     // how often in a row they have been sent again in vain; -1: unknown
  std::uint64_t received = 0;        // bytes that were read
  std::int64_t awaiting_since_ns = 0;  // since when nothing came although more was awaited; 0: nothing is
  std::int64_t unread = -1;          // bytes that lie ready to be read; -1: unknown
  std::uint64_t frames_sent = 0;     // begun
  std::uint64_t frames_received = 0; // whole
  std::uint64_t frames_announced = 0;  // that the other end had begun, by its last heartbeat
  std::int64_t announced_ns = 0;     // when that came
  std::string broken;                // why it is of no use any more; empty where it is
};

struct Snapshot {
  std::vector<RecordView> records;  // ascending id
  ClockPair clock;
  std::uint64_t submitted = 0;  // collectives: one more than the highest seq that was begun
  std::uint64_t finished = 0;   // collectives: one more than the highest seq that ended well
  std::uint64_t dropped = 0;    // operations that found no record
  std::vector<PeerProgress> peer_progress;  // for the owner of the recorder to fill in
  std::vector<LinkEnd> links;       // likewise
};

class Recorder {
  struct Slot;

 public:
  // To one record; to be used by one thread at a time. Without a record, or when it has been overwritten, does nothing.
  class Entry {
   public:
    Entry() = default;
    explicit operator bool() const { return slot_ != nullptr; }
    // What became known since `begin`; may be repeated.
    void route(Path path, int algorithm = 0, std::uint64_t chunks = 0, std::uint64_t chunk_bytes = 0) const;
    void started(std::int64_t now_ns) const;
    void progress(std::uint64_t chunks_done, std::int64_t now_ns) const;  // `chunks_done` only grows
    void met(std::int32_t peer) const;                                    // of a receive from any rank: who sent
    void saturated(std::uint64_t values) const;                           // adds
    void finish(FailureKind kind, std::int64_t now_ns) const;

   private:
    friend class Recorder;
    Entry(Recorder* owner, Slot* slot, std::uint64_t id, std::uint64_t ends_at) : owner_(owner), slot_(slot), id_(id), ends_at_(ends_at) {}
    Recorder* owner_ = nullptr;
    Slot* slot_ = nullptr;
    std::uint64_t id_ = 0;
    std::uint64_t ends_at_ = 0;  // what `finished` is at least when this one ended well; 0 for a message
  };

  explicit Recorder(std::size_t capacity = 1024);  // throws std::invalid_argument for 0
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // From any thread. A collective operation has been called for.
  Entry begin(const OpDescriptor& op, Path path, std::uint64_t bytes, std::int64_t submitted_ns);
  // A message to or from one rank; `seq` counts those of the same pair and direction.
  Entry begin(Direction direction, std::int32_t peer, std::int64_t tag, std::uint64_t seq, std::uint64_t count, DType dtype, std::uint64_t bytes,
              std::int64_t submitted_ns);

  // The number under which `route` records that algorithm: 0 for "", and for more names than max_algorithms.
  int algorithm(std::string_view name);

  std::size_t capacity() const;
  Snapshot snapshot() const;

 private:
  Entry take(const RecordView& record);
  void count_finished(std::uint64_t upto);

  std::vector<Slot> slots_;
  mutable std::mutex mutex_;  // of the members below; held for some stores, never while an operation runs
  std::uint64_t next_ = 0;
  std::uint64_t next_id_ = 0;
  std::uint64_t dropped_ = 0;
  std::uint64_t submitted_ = 0;
  std::vector<std::string> algorithms_;
  std::atomic<std::uint64_t> finished_{0};
};

}  // namespace ff
