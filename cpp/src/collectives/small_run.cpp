// An operation through the mailboxes: everybody writes one, everybody reads all. One crossing between processors.
#include <algorithm>
#include <cstring>

#include "fireflyer/collectives/kernels/kernels.hpp"
#include "run.hpp"

namespace ff {
namespace {

std::size_t message_elems(const Group& group, const OpDescriptor& op) {
  return op.kind == OpKind::reduce_scatter ? op.count * static_cast<std::size_t>(group.world_size()) : op.count;
}

constexpr std::size_t block_bytes = 64;  // a multiple of what any instruction set reduces at a time

bool counts_clipped(DType dtype) { return dtype == DType::f8e4m3 || dtype == DType::f8e5m2; }

bool writes_message(const Group& group, const OpDescriptor& op) {
  return op.kind != OpKind::broadcast || op.root == group.rank;
}

class SmallRun final : public Run {
 public:
  SmallRun(const EagerMessages& messages, std::uint64_t base) : messages_(messages), base_(base) {}

  bool step() override {
    if (done_ || !messages_.arrived()) return false;
    saturated_ += messages_.read();
    done_ = true;
    return true;
  }

  bool finished() const override { return done_; }
  std::uint64_t done_chunks() const override { return done_ ? 1 : 0; }

  Wants wants() const override {
    Wants wants;
    wants.fill(never);
    wants[counter_entered] = base_ + 1;
    return wants;
  }

 private:
  EagerMessages messages_;
  std::uint64_t base_;
  bool done_ = false;
};

}  // namespace

void EagerMessages::post() const {
  EagerMessage& mine = context_->window.eager_message(context_->local, turn_);
  const std::size_t bytes = writes_message(context_->group, op_) ? message_elems(context_->group, op_) * unit_ : 0;
  mine.count = op_.count;
  mine.kinds = call_of(op_);
  if (bytes > 0) std::memcpy(mine.payload(), in_, bytes);
  mine.number.store(op_.seq + 1, std::memory_order_release);
}

bool EagerMessages::arrived() {
  for (; arrived_ < context_->window.ranks(); ++arrived_) {
    const EagerMessage& theirs = context_->window.eager_message(arrived_, turn_);
    if (theirs.number.load(std::memory_order_acquire) != op_.seq + 1) return false;  // not yet, or of another call: the executor finds and says why
    if (theirs.count != op_.count || theirs.kinds != call_of(op_)) return false;
  }
  return true;
}

std::uint64_t EagerMessages::read() const {
  const Group& group = context_->group;
  const int ranks = context_->window.ranks();
  const std::size_t bytes = op_.count * unit_;
  const auto message = [this](int local) { return context_->window.eager_message(local, turn_).payload(); };
  if (op_.count == 0 || op_.kind == OpKind::barrier) return 0;
  if (op_.kind == OpKind::broadcast) {
    if (op_.root != group.rank) std::memcpy(out_, message(group.local_index(op_.root)), bytes);
    return 0;
  }
  if (op_.kind == OpKind::allgather) {
    for (int r = 0; r < ranks; ++r) std::memcpy(out_ + static_cast<std::size_t>(group.local_rank_at(r)) * bytes, message(r), bytes);
    return 0;
  }
  if (op_.kind == OpKind::reduce && op_.root != group.rank) return 0;
  const std::size_t skip = op_.kind == OpKind::reduce_scatter ? static_cast<std::size_t>(group.rank) * bytes : 0;
  std::array<const void*, max_local_ranks> inputs;
  for (int r = 0; r < ranks; ++r) inputs[static_cast<std::size_t>(r)] = message(r) + skip;
  const auto divisor = static_cast<std::uint32_t>(op_.reduce == ReduceOp::mean ? group.world_size() : 1);
  if (bytes >= block_bytes || counts_clipped(op_.dtype)) {
    const std::uint64_t clipped = reduce_to(out_, inputs.data(), ranks, op_.count, op_.dtype, op_.reduce, divisor);
    return op_.kind == OpKind::allreduce && context_->local != 0 ? 0 : clipped;  // what everybody works out is counted once
  }
  alignas(block_bytes) char block[block_bytes];  // a whole one is reduced faster than a part; what lies behind in a mailbox is of no use, and does no harm
  reduce_to(block, inputs.data(), ranks, block_bytes / unit_, op_.dtype, op_.reduce, divisor);
  std::memcpy(out_, block, bytes);
  return 0;
}

bool fits_small(const Group& group, const OpDescriptor& op) {
  if (op.count > mailbox_bytes || group.nodes() > 1 || exchanged(op.kind)) return false;
  return message_elems(group, op) * dtype_size(op.dtype) <= mailbox_bytes;
}

std::unique_ptr<Run> small_run(const EagerMessages& messages, std::uint64_t base) { return std::make_unique<SmallRun>(messages, base); }

}  // namespace ff
