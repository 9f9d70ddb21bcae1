// An operation through the mailboxes: everybody writes one, everybody reads all. One crossing between processors.
#include <algorithm>
#include <cstring>

#include "fireflyer/kernels.hpp"
#include "run.hpp"

namespace ff {
namespace {

std::size_t letter_elems(const Group& group, const OpDescriptor& op) {
  return op.kind == OpKind::reduce_scatter ? op.count * static_cast<std::size_t>(group.world_size()) : op.count;
}

bool writes_letter(const Group& group, const OpDescriptor& op) {
  return op.kind != OpKind::broadcast || op.root == group.rank;
}

std::uint64_t kinds_of(const OpDescriptor& op) {
  return static_cast<std::uint64_t>(op.kind) << 16 | static_cast<std::uint64_t>(op.reduce) << 8 | static_cast<std::uint64_t>(op.dtype);
}

class SmallRun final : public Run {
 public:
  SmallRun(const Scene& scene, const Geometry& geometry, const char* in, char* out, std::uint64_t turn)
      : scene_(scene), geometry_(geometry), in_(in), out_(out), turn_(turn) {
    Mail& mine = scene_.window.mail(scene_.local, turn_);
    const OpDescriptor& op = geometry_.op;
    mine.count = op.count;
    mine.kinds = kinds_of(op);
    mine.root = static_cast<std::uint32_t>(op.root);
    const std::size_t bytes = writes_letter(scene_.group, op) ? letter_elems(scene_.group, op) * geometry_.unit : 0;
    if (bytes > 0) std::memcpy(mine.payload(), in_, bytes);
    mine.number.store(turn_ + 1, std::memory_order_release);
  }

  bool step() override {
    if (done_) return false;
    while (arrived_ < scene_.window.ranks()) {
      const Mail& theirs = scene_.window.mail(arrived_, turn_);
      if (theirs.number.load(std::memory_order_acquire) != turn_ + 1 || !agrees(theirs)) return false;  // the executor finds and says why
      ++arrived_;
    }
    read();
    done_ = true;
    return true;
  }

  bool finished() const override { return done_; }
  std::uint64_t done_chunks() const override { return done_ ? 1 : 0; }

  Wants wants() const override {
    Wants wants;
    wants.fill(never);
    wants[counter_entered] = geometry_.base + 1;
    return wants;
  }

 private:
  bool agrees(const Mail& theirs) const {
    const OpDescriptor& op = geometry_.op;
    return theirs.count == op.count && theirs.kinds == kinds_of(op) && theirs.root == static_cast<std::uint32_t>(op.root);
  }

  const char* letter(int local) const { return scene_.window.mail(local, turn_).payload(); }

  void read() {
    const OpDescriptor& op = geometry_.op;
    const int ranks = scene_.window.ranks();
    const std::size_t bytes = op.count * geometry_.unit;
    if (op.count == 0 || op.kind == OpKind::barrier) return;
    if (op.kind == OpKind::broadcast) {
      if (op.root != scene_.group.rank) std::memcpy(out_, letter(scene_.group.local_index(op.root)), bytes);
      return;
    }
    if (op.kind == OpKind::allgather) {
      for (int r = 0; r < ranks; ++r) std::memcpy(out_ + static_cast<std::size_t>(scene_.group.local_rank_at(r)) * bytes, letter(r), bytes);
      return;
    }
    if (op.kind == OpKind::reduce && op.root != scene_.group.rank) return;
    const std::size_t skip = op.kind == OpKind::reduce_scatter ? static_cast<std::size_t>(scene_.group.rank) * bytes : 0;
    std::array<const void*, max_local_ranks> inputs{};
    for (int r = 0; r < ranks; ++r) inputs[static_cast<std::size_t>(r)] = letter(r) + skip;
    const auto divisor = static_cast<std::uint32_t>(op.reduce == ReduceOp::mean ? scene_.group.world_size() : 1);
    saturated_ += reduce_to(out_, inputs.data(), ranks, op.count, op.dtype, op.reduce, divisor);
  }

  const Scene& scene_;
  Geometry geometry_;
  const char* in_;
  char* out_;
  std::uint64_t turn_;
  int arrived_ = 0;
  bool done_ = false;
};

}  // namespace

bool fits_small(const Group& group, const OpDescriptor& op) {
  if (group.nodes() > 1) return false;
  switch (op.kind) {
    case OpKind::allreduce:
    case OpKind::reduce:
    case OpKind::broadcast:
    case OpKind::barrier:
    case OpKind::reduce_scatter:
    case OpKind::allgather: break;
    default: return false;
  }
  const std::size_t limit = mailbox_bytes / dtype_size(op.dtype);
  return op.count <= limit && letter_elems(group, op) <= limit;
}

std::unique_ptr<Run> small_run(const Scene& scene, const Geometry& geometry, const char* in, char* out, std::uint64_t turn) {
  return std::make_unique<SmallRun>(scene, geometry, in, out, turn);
}

}  // namespace ff
