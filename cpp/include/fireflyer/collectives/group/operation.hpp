// What ranks agree on about one collective operation, and how it can fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fireflyer/collectives/kernels/dtype.hpp"

namespace ff {

// The numbers are part of the wire format: append, never renumber.
enum class OpKind : std::uint32_t {
  allreduce = 1,
  reduce = 2,
  broadcast = 3,
  barrier = 4,
  reduce_scatter = 5,
  allgather = 6,
  all_to_all = 7,
  gather = 8,
  scatter = 9,
};

inline constexpr int op_kind_count = 10;

const char* kind_name(OpKind kind);  // the enumerator's name; "none" for 0

// Runs rank to rank (Exchange), not through the window and the trees.
inline bool exchanged(OpKind kind) { return kind == OpKind::all_to_all || kind == OpKind::gather || kind == OpKind::scatter; }

// `seq` counts the operations of a communicator from 0. `count` is in elements: of the array; in a reduce_scatter,
// allgather, gather and scatter of one rank's part of it; in an all_to_all of each pair's part, 0 where they differ.
// `root` is a rank, -1 where there is none.
struct OpDescriptor {
  std::uint64_t seq = 0;
  std::uint64_t count = 0;
  OpKind kind = OpKind::barrier;
  DType dtype = DType::f32;
  std::int32_t root = -1;
  ReduceOp reduce = ReduceOp::sum;

  bool operator==(const OpDescriptor&) const = default;
  std::string describe() const;  // "allreduce #17 of 1000 f32"
  std::string name() const;      // "allreduce #17"
};

enum class FailureKind : std::uint32_t {
  none = 0,
  peer_failed = 1,
  usage = 2,
  aborted = 3,
  corruption = 4,
  mismatch = 5, // of one message: its calls do not fit, and the group goes on; never in the window
};

inline constexpr int failure_kind_count = 6;

const char* failure_name(FailureKind kind);  // of the class of the error; "none" after success

struct Failure {
  FailureKind kind = FailureKind::none;
  std::int32_t culprit = -1;  // the rank to blame; -1 where nobody in particular is
  std::uint64_t seq = 0;
  std::string text;           // one line, at most max_failure_text bytes
};

inline constexpr std::size_t max_failure_text = 400;

// How an operation is cut into chunks. Chunks are counted through the whole life of a communicator: this operation owns
// [base, end), of which the first `chunks` carry data; `end` is even, so chunk c always belongs to tree c & 1 and is
// the (c >> 1)-th of it.
//
// A chunk of a reduce_scatter or allgather holds the same range of every rank's part, one after the other in the order
// of `Group::position` (by node, then by rank), so that the parts of one node lie together: `parts` of `part_elems` each.
struct Geometry {
  OpDescriptor op;
  std::uint64_t base = 0;
  std::uint64_t end = 0;
  std::uint64_t chunks = 0;
  std::size_t unit = 1;         // bytes of an element in the caller's array
  std::size_t accum_unit = 1;   // bytes of an element while it is being summed
  std::size_t chunk_elems = 1;  // elements of each part in every chunk but the last
  std::size_t parts = 1;        // world_size for reduce_scatter and allgather
  char* home = nullptr;         // on a node with one rank: its array, where results, and sums of its type, then lie; not shared
  const char* own = nullptr;    // on such a node, where sums are wider than elements: its contribution, which nobody widens in advance

  Geometry() = default;
  Geometry(const OpDescriptor& op, std::uint64_t base, std::size_t chunk_bytes, int world_size);

  bool sums() const { return op.kind != OpKind::broadcast && op.kind != OpKind::allgather; }
  std::size_t elems(std::uint64_t chunk) const { return parts * part_elems(chunk); }  // of chunk base + i, given base + i
  std::size_t part_elems(std::uint64_t chunk) const;
  std::size_t offset_bytes(std::uint64_t chunk) const { return (chunk - base) * chunk_elems * unit; }
};

}  // namespace ff
