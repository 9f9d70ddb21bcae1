#include "fireflyer/operation.hpp"

#include <algorithm>

namespace ff {

const char* kind_name(OpKind kind) {
  switch (kind) {
    case OpKind::allreduce: return "allreduce";
    case OpKind::reduce: return "reduce";
    case OpKind::broadcast: return "broadcast";
    case OpKind::barrier: return "barrier";
  }
  return "unknown operation";
}

std::string OpDescriptor::name() const { return std::string(kind_name(kind)) + " #" + std::to_string(seq); }

std::string OpDescriptor::describe() const {
  std::string text = name();
  if (kind != OpKind::barrier) text += " of " + std::to_string(count) + " " + dtype_name(dtype);
  if (root >= 0) text += ", root " + std::to_string(root);
  return text;
}

Geometry::Geometry(const OpDescriptor& descriptor, std::uint64_t first, std::size_t chunk_bytes)
    : op(descriptor), base(first), unit(dtype_size(descriptor.dtype)) {
  accum_unit = sums() ? dtype_size(accum_dtype(op.dtype)) : unit;
  chunk_elems = chunk_bytes / accum_unit;
  chunks = std::max<std::uint64_t>(1, (op.count + chunk_elems - 1) / chunk_elems);
  end = base + chunks + (chunks & 1);
}

std::size_t Geometry::elems(std::uint64_t chunk) const {
  const std::uint64_t first = (chunk - base) * chunk_elems;
  return first >= op.count ? 0 : std::min<std::uint64_t>(chunk_elems, op.count - first);
}

}  // namespace ff
