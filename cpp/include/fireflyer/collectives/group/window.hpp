// The memory that the ranks of one node share: counters, an abort word, and a ring of chunk slots.
//
// The leader creates it (an anonymous memory file), hands the descriptor to the other ranks of its node, and everybody
// maps it. A slot holds one chunk: an input from every local rank, the node's sum ("acc"), and the result. Slot c % slots
// serves chunk c. Nobody locks; each counter has one writer and only grows:
//
//   entered[r]                  1 + the first chunk of the operation that local rank r is in, which it has described
//   in[r], reduced[r], out[r]   chunks that local rank r has copied in, has reduced its slice of, has copied out
//   done[t]                     chunks of tree t whose result the network has delivered into the result slot
//   freed[t]                    chunks of tree t that the network needs no longer
//
// Small operations go through mailboxes: two for each rank, used in turn, so that a rank may fill one while others still
// read the other. Nobody fills one for the second time before all have entered the operation in between.
//
// A rank that finds nothing to do says which counter values it waits for (`wants`), sets `waiting` and sleeps on its
// `bell`; whoever moves a counter past a wanted value rings. Whoever drives the leader's network sleeps in
// poll() and is woken through an eventfd.
//
// Every rank of the node can write all of it at any time, also one that is broken. So what it says about its own sizes is
// read once, checked, and kept elsewhere; and nothing else that is read from it is used for an address without a bound.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fireflyer/collectives/group/operation.hpp"

namespace ff {

inline constexpr int max_local_ranks = 64;
inline constexpr std::uint64_t signature_ring = 64;  // more than a root can run ahead of the others (max_slots)
inline constexpr std::uint32_t max_slots = 32;
inline constexpr std::size_t max_chunk_bytes = std::size_t{64} << 20;
inline constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

inline constexpr std::size_t mailbox_bytes = 64 * 1024;
inline constexpr std::size_t eager_stride = mailbox_bytes + 128;  // each begins a cache line, which holds header and first bytes

enum Counter : int {
  counter_entered,
  counter_in,
  counter_reduced,
  counter_out,
  counter_done0,
  counter_done1,
  counter_freed0,
  counter_freed1,
  counters
};

using Wants = std::array<std::uint64_t, counters>;

// Where a rank's arrays of one operation lie: their addresses there, and their offsets in its arena, `never` if outside.
struct Places {
  std::uint64_t in = 0, out = 0;
  std::uint64_t in_arena = never, out_arena = never;
};

struct EagerMessage {  // in a mailbox: header; the payload follows
  std::atomic<std::uint64_t> number;  // 1 + number of the operation, once the rest may be read
  std::uint64_t count;
  std::uint64_t kinds;                // see call_of
  char* payload() { return reinterpret_cast<char*>(this + 1); }
};

// What a rank calls, but for the number of elements, in one word.
constexpr std::uint64_t call_of(const OpDescriptor& op) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(op.root)) << 32 | static_cast<std::uint64_t>(op.kind) << 16 |
         static_cast<std::uint64_t>(op.reduce) << 8 | static_cast<std::uint64_t>(op.dtype);
}

struct alignas(128) Line {
  std::array<std::atomic<std::uint64_t>, counters> count;  // of a rank: entered to out; of the network: the others, and the pools'
  std::atomic<std::uint64_t> entered;                      // operations begun
  std::atomic<std::uint64_t> finished;                     // operations ended
  std::atomic<std::uint32_t> left;                         // closed its communicator in good order
  std::atomic<std::uint32_t> waits;                        // its program waits for a message from rank to rank
  std::atomic<std::int64_t> heartbeat_ns;                  // last time that the thread which works here went round
  std::atomic<std::uint64_t> withdrawn;                    // 1 + the broken operation in which it touches no array any more
  std::atomic<std::uint64_t> moved;                        // pieces of work done, for watchers only
  alignas(128) std::atomic<std::uint32_t> waiting;
  std::atomic<std::uint32_t> bell;
  std::array<std::atomic<std::uint64_t>, counters> wants;
  alignas(128) std::array<std::array<std::atomic<std::uint64_t>, 6>, signature_ring> signature;
};

// Pieces of work that any rank of the node may take: `next` counts them through the life of a communicator. Of the chunk in
// a slot: how many pieces are done, and 1 + its number once all are. See pool_run.
struct alignas(128) Pool {
  std::atomic<std::uint64_t> next;
  std::array<std::atomic<std::uint32_t>, max_slots> done;
  std::array<std::atomic<std::uint64_t>, max_slots> complete;
};

struct Control {
  std::uint64_t magic;
  std::uint32_t local_ranks;
  std::uint32_t slots;
  std::uint64_t chunk_bytes;
  std::uint64_t total_bytes;
  alignas(128) std::atomic<std::uint32_t> failed;  // 0 well, 1 being written, 2 `failure_*` may be read
  std::atomic<std::uint32_t> failure_kind;
  std::atomic<std::int32_t> failure_culprit;
  std::atomic<std::uint64_t> failure_seq;
  char failure_text[max_failure_text];
  Pool pools[2];                                   // of sums, of copies out
  alignas(128) Line lines[max_local_ranks + 1];    // the last one in use (index local_ranks) is the network's
};

class Window {
 public:
  static int create(int local_ranks, std::uint32_t slots, std::size_t chunk_bytes);  // a descriptor; throws std::system_error
  static std::string interleave(int fd, const std::vector<int>& nodes);  // before anybody maps it; empty, or why not
  Window(int fd, int doorbell);  // maps it; keeps neither descriptor: `doorbell` is borrowed, -1 for none. Throws.
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  int ranks() const { return ranks_; }
  int network() const { return ranks(); }
  std::uint32_t slots() const { return slots_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  Line& line(int index) const { return control_->lines[index]; }

  char* input(std::uint64_t chunk, int rank) const { return slot(chunk) + static_cast<std::size_t>(rank) * stride_; }
  char* acc(std::uint64_t chunk) const { return slot(chunk) + static_cast<std::size_t>(ranks()) * stride_; }
  char* result(std::uint64_t chunk) const { return slot(chunk) + static_cast<std::size_t>(ranks() + 1) * stride_; }

  std::uint64_t value(Counter which) const;  // of a rank counter: the least over all ranks and the pool
  void advance(int index, Counter which, std::uint64_t to) const;  // sets a counter of one's own line and rings
  void ring_for(int self, Counter which) const;  // whoever else sleeps until that counter is where it is now
  Pool& pool(Counter which) const { return control_->pools[which == counter_reduced ? 0 : 1]; }
  std::uint64_t pool_value(Counter which) const { return line(network()).count[which].load(); }  // of counter_reduced, counter_out
  void raise_pool(Counter which, std::uint64_t to) const;  // never lowers it; rings
  bool wait(int rank, const Wants& wants, std::int64_t timeout_ns) const;  // until one of the wants may hold; false: time is up
  bool met(const Wants& wants) const;        // any of them
  void announce(int index, const Wants& wants) const;  // for whoever drives the network, and sleeps in poll()
  void retract(int index) const;

  void enter(int rank, const Geometry& geometry, const Places& places) const;
  // The same, but rings for nobody: `ring_for` is to follow, when all others have entered at the latest.
  void enter_quietly(int rank, const OpDescriptor& op, std::uint64_t base, const Places& places, std::int64_t now_ns) const;
  void leave(int rank, const OpDescriptor& op) const;
  OpDescriptor signature(int rank, std::uint64_t seq) const;  // what that rank said when it entered; no known kind: nonsense
  Places places(int rank, std::uint64_t seq) const;
  EagerMessage& eager_message(int rank, std::uint64_t turn) const { return *reinterpret_cast<EagerMessage*>(eager_messages_ + eager_stride * (2 * static_cast<std::size_t>(rank) + (turn & 1))); }

  bool fail(const Failure& failure) const;   // the first one wins and is returned to all; wakes everybody
  bool failed() const { return control_->failed.load(std::memory_order_acquire) == 2; }
  Failure failure() const;                   // once failed()
  std::uint64_t fingerprint() const;         // changes with every progress on this node

 private:
  char* slot(std::uint64_t chunk) const { return data_ + (chunk % slots_) * slot_bytes_; }
  void ring(int index) const;

  Control* control_ = nullptr;
  char* eager_messages_ = nullptr;
  char* data_ = nullptr;
  int ranks_ = 0;
  std::uint32_t slots_ = 0;
  std::size_t chunk_bytes_ = 0;
  std::size_t total_bytes_ = 0;
  std::size_t stride_ = 0;
  std::size_t slot_bytes_ = 0;
  int doorbell_ = -1;
};

}  // namespace ff
