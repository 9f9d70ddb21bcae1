// One operation of one rank, in pieces: whoever drives it calls `step` while that does something, and otherwise sleeps
// until one of the counters that it `wants` has moved. Private to the executor.
//
//   small     one node, a few KiB: every rank puts its array into a mailbox and reads those of the others
//   flat      one node, all arrays reachable: every rank sums its slice of the whole arrays where they lie
//   pool      several nodes, an allreduce of arrays in arenas: any rank of the node does what is to be done
//   pipeline  several nodes, or arrays that others cannot reach: chunk by chunk through the slots of the window
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "fireflyer/collectives/group/group.hpp"
#include "fireflyer/collectives/group/peer_access.hpp"
#include "fireflyer/collectives/group/window.hpp"

namespace ff {

struct Slice {
  std::size_t first, count;
};

// Part `part` of `elems` elements in `parts` parts whose borders are multiples of `align` elements.
Slice slice_of(std::size_t elems, int parts, int part, std::size_t align);

// Memory for what is read from other processes, kept from run to run: the system hands out pages, and zeroes them, at about
// the cost of copying them. Of one run at a time.
class Scratch {
 public:
  char* at_least(std::size_t bytes) {
    if (bytes <= bytes_) return memory_.get();
    bytes_ = 0;
    memory_.reset(static_cast<char*>(std::aligned_alloc(page_bytes, (bytes + page_bytes - 1) / page_bytes * page_bytes)));
    if (!memory_) throw std::bad_alloc();
    bytes_ = bytes;
    return memory_.get();
  }

 private:
  static constexpr std::size_t page_bytes = 4096;
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  std::size_t bytes_ = 0;
};

struct RunContext {  // where a run takes place; outlives it
  const Group& group;
  const Window& window;
  const PeerAccess& peer_access;
  int local;
  Scratch& scratch;
};

class Run {
 public:
  virtual ~Run() = default;
  virtual bool step() = 0;             // one piece of work; false where none is possible now
  virtual bool finished() const = 0;
  virtual Wants wants() const = 0;     // counter values of which any may make a step possible; `never` elsewhere
  virtual std::uint64_t done_chunks() const = 0;
  virtual std::uint64_t chunks() const { return 1; }  // of this rank
  std::uint64_t saturated() const { return saturated_; }

 protected:
  std::uint64_t saturated_ = 0;
};

inline constexpr std::uint64_t flat_chunks = 2;  // how many chunk numbers a small or flat operation uses up

// A small operation: every rank writes its array as a message into its mailbox, and reads those of all.
class EagerMessages {
 public:
  EagerMessages(const RunContext& context, const OpDescriptor& op, const char* in, char* out, std::uint64_t turn)
      : context_(&context), op_(op), unit_(dtype_size(op.dtype)), in_(in), out_(out), turn_(turn) {}
  void post() const;           // from now on others may read
  bool arrived();              // all messages have arrived, and their senders called the same as this rank
  std::uint64_t read() const;  // once they have: the result into `out`; returns how many elements were clipped

 private:
  const RunContext* context_;
  OpDescriptor op_;
  std::size_t unit_;
  const char* in_;
  char* out_;
  std::uint64_t turn_;
  int arrived_ = 0;
};

bool fits_small(const Group& group, const OpDescriptor& op);

std::unique_ptr<Run> small_run(const EagerMessages& messages, std::uint64_t base);  // of messages of which this rank's is posted
std::unique_ptr<Run> flat_run(const RunContext& context, const Geometry& geometry, const Places& mine);  // where this rank's arrays lie
std::unique_ptr<Run> pool_run(const RunContext& context, const Geometry& geometry, const Rules& rules, const Places& mine);
std::unique_ptr<Run> pipeline_run(const RunContext& context, const Geometry& geometry, const Rules& rules, const char* in, char* out);

}  // namespace ff
