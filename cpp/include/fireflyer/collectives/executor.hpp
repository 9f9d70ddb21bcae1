// Runs the collective operations of one rank, in the order in which they were submitted.
//
// An operation is a Run (see src/collectives/run.hpp). It is driven by the thread that calls, where nothing else is pending and the
// caller wants to wait; otherwise, and where it takes long, by a thread of the executor's own. The leader of a node has a
// second thread (Network) for what goes between nodes and for watching everybody's life; frames of short operations are
// moved by the thread that drives the operation (NetworkDriver). Nothing here knows of Python.
//
// After the first failure every pending and later operation fails with the same Failure.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fireflyer/base/yields.hpp"
#include "fireflyer/collectives/group/arena.hpp"
#include "fireflyer/collectives/group/group.hpp"
#include "fireflyer/collectives/group/huge_pages.hpp"
#include "fireflyer/collectives/group/peer_access.hpp"
#include "fireflyer/collectives/group/recorder.hpp"
#include "fireflyer/collectives/group/small_log.hpp"
#include "fireflyer/collectives/group/window.hpp"
#include "fireflyer/collectives/group/work.hpp"
#include "fireflyer/collectives/transport/connection.hpp"

namespace ff {

class Exchange;
class Fabric;
class Network;
class NetworkDriver;
class Run;
struct Part;
class Scratch;
struct RunContext;

// What a rank adds up when the parts of an operation have arrived: as many rows as there are ranks, in their order.
struct RowSum {
  ReduceOp op = ReduceOp::sum;
  char* out = nullptr;  // may be one of the rows
  std::size_t count = 0;
  std::vector<const void*> rows;
};

struct Config {
  Group group;
  int window_fd = -1;
  int doorbell_fd = -1;                            // an eventfd that all ranks of the node share
  int leader_fd = -1;                              // of a rank that is not the leader: stream socket to it
  std::vector<std::pair<int, int>> local_fds;      // of the leader: (rank, stream socket) of the others of its node
  std::vector<Connection> connections;             // of the leader: to its neighbours
  std::shared_ptr<Fabric> fabric;                  // of the leader: carries the data connections that have no descriptor
  std::shared_ptr<Arena> arena;                    // of this rank; may be null
  std::vector<LocalPeer> local_peers;              // the ranks of the node, in order; none: only slots serve
  std::vector<int> cpus, network_cpus;             // for the threads; none: wherever the system puts them
};

struct Stats {
  std::uint64_t bytes = 0;         // of caller's arrays, finished operations
  std::int64_t in_flight_ns = 0;   // time in which at least one operation was pending
  std::array<std::uint64_t, op_kind_count> operations{};  // finished ones, indexed by OpKind
  std::uint64_t saturated = 0;     // elements of results that were clipped here (fp8)
  std::uint64_t unrung = 0;        // sleeps over work that nobody rang for; 0 but on a machine that stalls
};

class Executor {
 public:
  explicit Executor(Config config);  // owns all descriptors in config, also when it throws
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // `in` and `out` may be the same, and must stay valid until the work is done. Where an operation has no use for one of
  // them it is not looked at. Throws std::out_of_range when too many are pending, std::invalid_argument for what cannot be.
  std::shared_ptr<Work> submit(const OpDescriptor& op, const void* in, void* out);

  // The same, and waits: null where it ended well within `patience_ns`. Otherwise a work that has failed, or that goes on.
  std::shared_ptr<Work> call(const OpDescriptor& op, const void* in, void* out, std::int64_t patience_ns);

  // all_to_all, gather and scatter: what this rank hands to others and gets from them, its part for itself included.
  // With `sum` the operation is done when that is added up too.
  std::shared_ptr<Work> submit_parts(OpKind kind, std::uint64_t count, DType dtype, int root, std::vector<Part> out, std::vector<Part> in,
                                     std::optional<RowSum> sum = std::nullopt);
  Exchange& exchange() { return *exchange_; }
  void abort(const std::string& reason);  // everywhere
  void close();  // finishes what is pending, says goodbye, joins the threads; idempotent
  Stats stats();
  std::vector<std::string> placement_warnings() const { return placement_warnings_; }  // what could not be placed as asked
  Snapshot flight();  // the last operations of this rank, and what it sees of the others of its node
  // In the child of a fork, where the threads do not exist: closes the child's copies of the descriptors, so that the
  // others still notice the death of the parent. Of no further use afterwards; must not be destroyed.
  void abandon();

 private:
  struct Parts;  // executor_exchange.cpp

  struct Task {
    OpDescriptor op;
    const char* in = nullptr;
    char* out = nullptr;
    std::shared_ptr<Work> work;  // null while the caller drives it itself
    std::shared_ptr<const Parts> parts;
    Recorder::Entry entry;
  };
  struct Current;  // the operation under way

  void admit(Task& task, std::uint64_t bytes);  // under the lock
  void enqueue(Task task);                      // under the lock
  std::unique_ptr<Current> call_small(const OpDescriptor& what, const char* in, char* out);
  void check(const OpDescriptor& op) const;
  void work_loop();
  void begin(Current& current);
  bool open(Current& current);
  void note_route(const Current& current, Path path);
  bool flat(const Current& current) const;
  bool carry_on(Current& current, std::int64_t until_ns);
  bool may_pool(const OpDescriptor& op) const;
  void start_pipeline(Current& current, Path path);
  bool in_arenas(const Current& current) const;
  bool drive(Current& current, std::int64_t until_ns);
  bool advance(Current& current);
  void conclude(Current& current);
  void pause(Current& current, NetworkDriver& driver);
  void withdraw(const Current& current);
  void check_peers(Current& current, std::int64_t now_ns);
  std::optional<Failure> run_parts(const Task& task);
  std::optional<Failure> let_others_follow(const OpDescriptor& op);
  std::optional<Failure> mismatch(const OpDescriptor& op, std::uint64_t& verified) const;
  std::optional<Failure> find_failure(const OpDescriptor& op, std::int64_t idle_ns) const;
  void settle(const Current& current);
  void close_descriptors();

  Config config_;
  Group& group_;
  std::unique_ptr<Window> window_;
  std::unique_ptr<PeerAccess> peer_access_;
  HugePages huge_pages_;
  std::optional<OpenMemory> open_;  // as long as others may read this rank's arrays where they lie
  std::unique_ptr<Scratch> scratch_;
  std::unique_ptr<RunContext> context_;
  int local_ = 0;
  bool spin_ = false;
  std::int64_t poll_period_ns_ = 0;
  bool spins() const { return spin_ && oversubscribed_ == 0; }
  int oversubscribed_ = 0;  // operations to come in which polling is of no use
  Yields yields_;
  Recorder recorder_;
  std::array<int, algorithm_count> algorithms_{};  // as the recorder numbers them
  SmallLog log_;  // of what never was pending
  std::unique_ptr<Network> network_;
  std::unique_ptr<Exchange> exchange_;
  std::uint64_t base_ = 0;
  std::uint64_t turn_ = 0;  // of the mailboxes

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  std::unique_ptr<Current> inherited_;  // begun by a caller who waits no longer
  bool running_ = false;
  std::uint64_t next_seq_ = 0;
  std::uint64_t pending_ = 0;
  std::int64_t busy_since_ns_ = 0;
  Stats stats_;
  bool closing_ = false;
  bool closed_ = false;
  std::mutex close_mutex_;
  std::vector<std::string> placement_warnings_;
  std::thread thread_;
};

}  // namespace ff
