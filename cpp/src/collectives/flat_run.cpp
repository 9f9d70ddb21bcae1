// An operation on whole arrays that all ranks of the one node reach. Everybody announces where its arrays lie, does its
// share in blocks, and leaves when all have done theirs: until then others read and write its arrays.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fireflyer/collectives/kernels/kernels.hpp"
#include "run.hpp"

namespace ff {
namespace {

// Of each input. Where others' memory is read and written through the kernel, a call costs as much as to copy some 10 KiB.
constexpr std::size_t block_bytes = 64 * 1024;  // so many fit into a core's second-level cache
constexpr std::size_t foreign_block_bytes = 256 * 1024;
constexpr std::size_t page_bytes = 4096;
// Where inputs and outputs of all ranks come to as much, outputs of their own are written around the caches.
constexpr std::size_t streamed_bytes = 32 << 20;

class FlatRun final : public Run {
 public:
  FlatRun(const RunContext& context, const Geometry& geometry, const Places& mine)
      : context_(context), op_(geometry.op), base_(geometry.base), unit_(geometry.unit), out_(reinterpret_cast<char*>(mine.out)), ranks_(context.window.ranks()),
        places_(context.peer_access.places(op_, mine)) {
    for (int r = 0; r < ranks_; ++r) {
      const Places& places = places_[static_cast<std::size_t>(r)];
      foreign_ = foreign_ || (r != context.local && (places.in_arena == never || places.out_arena == never));
    }
    block_ = (foreign_ ? foreign_block_bytes : block_bytes) / unit_;
    stream_ = !foreign_ && 2 * static_cast<std::size_t>(ranks_) * whole_bytes() >= streamed_bytes;
    plan();
    if (foreign_) scratch_ = context.scratch.at_least(foreign_block_bytes * (static_cast<std::size_t>(ranks_) + 1));
  }

  bool step() override {
    if (next_ < share_.first + share_.count) {
      const std::size_t elems = std::min(block_, share_.first + share_.count - next_);
      work(next_, elems);
      next_ += elems;
      ++blocks_;
      Line& line = context_.window.line(context_.local);
      line.moved.store(line.moved.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      if (next_ < share_.first + share_.count) return true;
    }
    if (!announced_) {
      if (foreign_ && share_.count > 0) {  // nobody takes this rank's results for good before this
        if (const auto failure = context_.peer_access.betrayed(context_.group, op_)) {
          context_.window.fail(*failure);
          return true;
        }
      }
      context_.window.advance(context_.local, counter_reduced, base_ + flat_chunks);
      announced_ = true;
      return true;
    }
    if (done_ || context_.window.value(counter_reduced) < base_ + flat_chunks) return false;
    done_ = true;
    return true;
  }

  bool finished() const override { return done_; }
  std::uint64_t done_chunks() const override { return blocks_; }
  std::uint64_t chunks() const override { return (share_.count + block_ - 1) / block_; }

  Wants wants() const override {
    Wants wants;
    wants.fill(never);
    wants[counter_reduced] = base_ + flat_chunks;
    return wants;
  }

 private:
  // Of one rank's larger array.
  std::size_t whole_bytes() const {
    const bool parted = op_.kind == OpKind::reduce_scatter || op_.kind == OpKind::allgather;
    return op_.count * unit_ * (parted ? static_cast<std::size_t>(ranks_) : 1);
  }

  // What this rank works on: a slice of the array, or all of its part, or nothing.
  void plan() {
    const std::size_t align = std::max<std::size_t>(64, page_bytes / unit_);
    switch (op_.kind) {
      case OpKind::allreduce:
      case OpKind::reduce: share_ = slice_of(op_.count, ranks_, context_.local, op_.count * unit_ >= 64 * page_bytes ? align : 64); break;
      case OpKind::broadcast: share_ = {0, op_.root == context_.group.rank ? 0 : op_.count}; break;
      case OpKind::reduce_scatter: share_ = {0, op_.count}; break;
      case OpKind::allgather: share_ = {0, op_.count * static_cast<std::size_t>(ranks_)}; break;
      default: share_ = {0, 0};
    }
    next_ = share_.first;
  }

  void work(std::size_t first, std::size_t elems) {
    switch (op_.kind) {
      case OpKind::allreduce:
        sum(first * unit_, first * unit_, elems);
        break;
      case OpKind::reduce:
        sum(first * unit_, first * unit_, elems);
        break;
      case OpKind::reduce_scatter:
        sum((static_cast<std::size_t>(context_.group.rank) * op_.count + first) * unit_, first * unit_, elems);
        break;
      case OpKind::broadcast:
        copy(context_.group.local_index(op_.root), first * unit_, out_ + first * unit_, elems * unit_);
        break;
      default: gather(first * unit_, elems * unit_);
    }
  }

  // Of an allgather's result: a block may touch the parts of several ranks.
  void gather(std::size_t at, std::size_t bytes) {
    const std::size_t part = op_.count * unit_;
    while (bytes > 0) {
      const std::size_t rank = at / part, inside = at % part;
      const std::size_t some = std::min(bytes, part - inside);
      copy(context_.group.local_index(static_cast<int>(rank)), inside, out_ + at, some);
      at += some;
      bytes -= some;
    }
  }

  void copy(int from, std::size_t offset, char* to, std::size_t bytes) {
    const char* source = context_.peer_access.input(from, places_[static_cast<std::size_t>(from)], offset, bytes, to);
    if (source == nullptr) return lost(from, errno);
    if (source != to) std::memmove(to, source, bytes);
  }

  void sum(std::size_t from, std::size_t to, std::size_t elems) {
    std::array<const void*, max_local_ranks> inputs{};
    for (int r = 0; r < ranks_; ++r) {
      char* scratch = scratch_ != nullptr ? scratch_ + static_cast<std::size_t>(r) * foreign_block_bytes : nullptr;
      const char* input = context_.peer_access.input(r, places_[static_cast<std::size_t>(r)], from, elems * unit_, scratch);
      if (input == nullptr) return lost(r, errno);
      inputs[static_cast<std::size_t>(r)] = input;
    }
    std::array<void*, max_local_ranks> outputs{};
    std::array<int, max_local_ranks> remote{};
    int near = 0, far = 0;
    for (int r = 0; r < ranks_; ++r) {
      if (!receives(r)) continue;
      char* output = context_.peer_access.direct_output(r, places_[static_cast<std::size_t>(r)], to, elems * unit_);
      if (output != nullptr) outputs[static_cast<std::size_t>(near++)] = output;
      else remote[static_cast<std::size_t>(far++)] = r;
    }
    if (near == 0 && scratch_ == nullptr) return lost(remote[0], ERANGE);
    if (near == 0) outputs[static_cast<std::size_t>(near++)] = scratch_ + static_cast<std::size_t>(ranks_) * foreign_block_bytes;
    const auto divisor = static_cast<std::uint32_t>(op_.reduce == ReduceOp::mean ? context_.group.world_size() : 1);
    saturated_ += reduce_to_many(outputs.data(), near, inputs.data(), ranks_, elems, op_.dtype, op_.reduce, divisor, stream_);
    for (int i = 0; i < far; ++i) {
      const int r = remote[static_cast<std::size_t>(i)];
      if (!context_.peer_access.write(r, places_[static_cast<std::size_t>(r)], to, static_cast<const char*>(outputs[0]), elems * unit_)) return lost(r, errno);
    }
  }

  bool receives(int local) const {
    if (op_.kind == OpKind::allreduce) return true;
    if (op_.kind == OpKind::reduce) return context_.group.local_rank_at(local) == op_.root;
    return local == context_.local;
  }

  void lost(int local, int error) const { context_.window.fail(context_.peer_access.lost(context_.group, local, op_, error)); }

  const RunContext& context_;
  OpDescriptor op_;
  std::uint64_t base_;
  std::size_t unit_;
  char* out_;
  int ranks_;
  std::vector<Places> places_;
  bool foreign_ = false;
  bool stream_ = false;
  std::size_t block_ = 1;
  Slice share_{0, 0};
  std::size_t next_ = 0;
  std::uint64_t blocks_ = 0;
  char* scratch_ = nullptr;
  bool announced_ = false, done_ = false;
};

}  // namespace

std::unique_ptr<Run> flat_run(const RunContext& context, const Geometry& geometry, const Places& mine) {
  return std::make_unique<FlatRun>(context, geometry, mine);
}

}  // namespace ff
