#include "fireflyer/collectives/group/operation.hpp"

#include <algorithm>

namespace ff {

namespace {

constexpr const char* kind_names[op_kind_count] = {"none", "allreduce", "reduce", "broadcast", "barrier", "reduce_scatter", "allgather", "all_to_all", "gather", "scatter"};
constexpr const char* failure_names[failure_kind_count] = {"none", "peer_failed", "usage", "aborted", "data_corruption", "mismatch"};
static_assert(kind_names[op_kind_count - 1] != nullptr, "an OpKind has no name");
static_assert(failure_names[failure_kind_count - 1] != nullptr, "a FailureKind has no name");

}  // namespace

const char* kind_name(OpKind kind) {
  const auto number = static_cast<std::size_t>(kind);
  return number < op_kind_count ? kind_names[number] : "unknown operation";
}

const char* failure_name(FailureKind kind) {
  const auto number = static_cast<std::size_t>(kind);
  return number < failure_kind_count ? failure_names[number] : "unknown failure";
}

std::string OpDescriptor::name() const { return std::string(kind_name(kind)) + " #" + std::to_string(seq); }

std::string OpDescriptor::describe() const {
  std::string text = name();
  if (kind == OpKind::all_to_all) text += std::string(" of ") + dtype_name(dtype);  // parts may differ: the messages say
  else if (kind != OpKind::barrier) text += " of " + std::to_string(count) + " " + dtype_name(dtype);
  if (reduce != ReduceOp::sum) text += std::string(", ") + reduce_op_name(reduce);
  if (root >= 0) text += ", root " + std::to_string(root);
  return text;
}

Geometry::Geometry(const OpDescriptor& descriptor, std::uint64_t first, std::size_t chunk_bytes, int world_size)
    : op(descriptor), base(first), unit(dtype_size(descriptor.dtype)) {
  accum_unit = sums() ? dtype_size(accum_dtype(op.dtype)) : unit;
  if (op.kind == OpKind::reduce_scatter || op.kind == OpKind::allgather) parts = static_cast<std::size_t>(world_size);
  chunk_elems = std::max<std::size_t>(1, chunk_bytes / accum_unit / parts);
  chunks = std::max<std::uint64_t>(1, (op.count + chunk_elems - 1) / chunk_elems);
  end = base + chunks + (chunks & 1);
}

std::size_t Geometry::part_elems(std::uint64_t chunk) const {
  const std::uint64_t first = (chunk - base) * chunk_elems;
  return first >= op.count ? 0 : std::min<std::uint64_t>(chunk_elems, op.count - first);
}

}  // namespace ff
