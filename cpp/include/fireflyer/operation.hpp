// What ranks agree on about one collective operation, and how it can fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fireflyer/dtype.hpp"

namespace ff {

enum class OpKind : std::uint32_t { allreduce = 1, reduce = 2, broadcast = 3, barrier = 4 };

const char* kind_name(OpKind kind);

// `seq` counts the operations of a communicator from 0; `count` is in elements; `root` is a rank, -1 where there is none
struct OpDescriptor {
  std::uint64_t seq = 0;
  std::uint64_t count = 0;
  OpKind kind = OpKind::barrier;
  DType dtype = DType::f32;
  std::int32_t root = -1;

  bool operator==(const OpDescriptor&) const = default;
  std::string describe() const;  // "allreduce #17 of 1000 f32"
  std::string name() const;      // "allreduce #17"
};

enum class FailureKind : std::uint32_t { none = 0, peer_failed = 1, usage = 2, aborted = 3, corruption = 4 };

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
struct Geometry {
  OpDescriptor op;
  std::uint64_t base = 0;
  std::uint64_t end = 0;
  std::uint64_t chunks = 0;
  std::size_t unit = 1;         // bytes of an element in the caller's array
  std::size_t accum_unit = 1;   // bytes of an element while it is being summed
  std::size_t chunk_elems = 1;  // elements of every chunk but the last

  Geometry() = default;
  Geometry(const OpDescriptor& op, std::uint64_t base, std::size_t chunk_bytes);

  bool sums() const { return op.kind != OpKind::broadcast; }
  std::size_t elems(std::uint64_t chunk) const;                       // of chunk base + i, given base + i
  std::size_t offset_bytes(std::uint64_t chunk) const { return (chunk - base) * chunk_elems * unit; }
};

}  // namespace ff
