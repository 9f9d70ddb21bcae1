// An allreduce between nodes whose arrays all lie in the arenas of their node: whichever rank of the node is awake takes the
// next piece of work, sums it from all arrays, or writes a finished piece into all of them.
//
// A node with fewer processors than ranks would otherwise change from rank to rank several times for every chunk. Here the
// first rank that is awake does the work, and another wakes only when a chunk more is waiting for each rank before it. Which
// rank does a piece has no influence on its bits.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fireflyer/collectives/kernels/kernels.hpp"
#include "run.hpp"

namespace ff {
namespace {

constexpr std::size_t slice_align = 64;  // elements

class PoolRun final : public Run {
 public:
  PoolRun(const RunContext& context, const Geometry& geometry, const Rules& rules, const Places& mine)
      : context_(context), geometry_(geometry), rules_(rules), ranks_(context.window.ranks()), last_(geometry.base + geometry.chunks), places_(context.peer_access.places(geometry.op, mine)) {
    const auto ranks = static_cast<std::uint64_t>(ranks_);
    turn_ = (static_cast<std::uint64_t>(context.local) + geometry.op.seq) % ranks;  // not always the same rank works for the others
    for (const Counter which : {counter_in, counter_reduced, counter_out}) {
      context.window.advance(context.local, which, geometry.end);
      if (which != counter_in) context.window.raise_pool(which, geometry.chunks == 0 ? geometry.end : geometry.base);
    }
    for (const Counter which : {counter_reduced, counter_out}) {
      std::atomic<std::uint64_t>& next = context.window.pool(which).next;
      for (std::uint64_t now = next.load(); now < geometry.base * ranks && !next.compare_exchange_weak(now, geometry.base * ranks);) {
      }
    }
  }

  // Finished chunks come first: that frees slots, and their data are still in the cache.
  bool step() override { return take(Stage::out) || take(Stage::reduce); }

  bool finished() const override { return context_.window.value(counter_out) >= geometry_.end; }
  std::uint64_t done_chunks() const override { return std::min(context_.window.value(counter_out), last_) - geometry_.base; }
  std::uint64_t chunks() const override { return geometry_.chunks; }

  Wants wants() const override {
    Wants wants;
    wants.fill(never);
    for (const Stage stage : {Stage::reduce, Stage::out}) {
      const std::uint64_t chunk = next(stage);
      if (chunk >= last_) continue;
      // Lanes run ahead of each other: a backlog may lack its first chunk.
      if (!ask(stage, std::min(chunk + turn_, last_ - 1), wants) && !ask(stage, chunk, wants)) wants[counter_entered] = 0;
    }
    wants[counter_out] = std::min(wants[counter_out], geometry_.end);
    return wants;
  }

 private:
  static Counter counter_of(Stage stage) { return stage == Stage::reduce ? counter_reduced : counter_out; }

  std::uint64_t next(Stage stage) const { return context_.window.pool(counter_of(stage)).next.load() / static_cast<std::uint64_t>(ranks_); }

  // Adds what this chunk lacks; false where it lacks nothing.
  bool ask(Stage stage, std::uint64_t chunk, Wants& wants) const {
    const Wants needs = rules_.needs(stage, chunk);
    bool lacks = false;
    for (std::size_t which = 0; which < needs.size(); ++which) {
      if (needs[which] == 0 || context_.window.value(static_cast<Counter>(which)) >= needs[which]) continue;
      wants[which] = std::min(wants[which], needs[which]);
      lacks = true;
    }
    return lacks;
  }

  bool take(Stage stage) {
    Pool& pool = context_.window.pool(counter_of(stage));
    const auto ranks = static_cast<std::uint64_t>(ranks_);
    std::uint64_t piece = pool.next.load();
    do {
      if (piece / ranks >= last_ || !rules_.holds(rules_.needs(stage, piece / ranks))) return false;
    } while (!pool.next.compare_exchange_weak(piece, piece + 1));
    const std::uint64_t chunk = piece / ranks;
    if (chunk < geometry_.base) {
      turned_back();
      return true;
    }
    const Slice slice = slice_of(geometry_.elems(chunk), ranks_, static_cast<int>(piece % ranks), slice_align);
    if (slice.count > 0) stage == Stage::reduce ? sum(chunk, slice) : spread(chunk, slice);
    if (context_.window.failed()) return true;
    Line& line = context_.window.line(context_.local);
    line.moved.store(line.moved.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    complete(pool, counter_of(stage), chunk);
    return true;
  }

  // Chunks may be completed in any order; the counter says up to which all are.
  void complete(Pool& pool, Counter which, std::uint64_t chunk) {
    const std::size_t slots = context_.window.slots();
    auto& done = pool.done[chunk % slots];
#if defined(__SANITIZE_THREAD__)
    // The sanitizer knows memory by its address, and each rank has a mapping of its own: it does not see that the rank which
    // does the last piece and moves the counter has seen this one.
    for (const Counter any : {counter_reduced, counter_out}) context_.window.line(context_.window.network()).count[any].fetch_add(0);
#endif
    if (done.fetch_add(1) + 1 < static_cast<std::uint32_t>(ranks_)) return;
    done.store(0);
    pool.complete[chunk % slots].store(chunk + 1);
    const Window& window = context_.window;
    for (std::uint64_t up_to = window.pool_value(which); up_to < last_ && pool.complete[up_to % slots].load() == up_to + 1; up_to = window.pool_value(which)) {
      window.raise_pool(which, up_to + 1 == last_ ? geometry_.end : up_to + 1);
    }
  }

  void sum(std::uint64_t chunk, Slice slice) {
    const std::uint64_t offset = geometry_.offset_bytes(chunk) + slice.first * geometry_.unit;
    std::array<const void*, max_local_ranks> inputs{};
    for (int r = 0; r < ranks_; ++r) {
      const char* from = context_.peer_access.input(r, places_[static_cast<std::size_t>(r)], offset, slice.count * geometry_.unit, nullptr);
      if (from == nullptr) return outside(r);
      inputs[static_cast<std::size_t>(r)] = from;
    }
    reduce_to_accum(rules_.sum(chunk) + slice.first * geometry_.accum_unit, inputs.data(), ranks_, slice.count, geometry_.op.dtype, geometry_.op.reduce);
  }

  void spread(std::uint64_t chunk, Slice slice) {
    const std::uint64_t offset = geometry_.offset_bytes(chunk) + slice.first * geometry_.unit;
    for (int r = 0; r < ranks_; ++r) {
      char* to = context_.peer_access.direct_output(r, places_[static_cast<std::size_t>(r)], offset, slice.count * geometry_.unit);
      if (to == nullptr) return outside(r);
      std::memcpy(to, rules_.result(chunk) + slice.first * geometry_.unit, slice.count * geometry_.unit);
    }
  }

  void outside(int local) const { context_.window.fail(context_.peer_access.lost(context_.group, local, geometry_.op, ERANGE)); }

  // Every rank has raised the count of pieces to the first of this operation before it takes one.
  void turned_back() const {
    context_.window.fail(Failure{FailureKind::peer_failed, -1, geometry_.op.seq, "a rank of the node has damaged the shared memory: its count of work went back in " + geometry_.op.name()});
  }

  const RunContext& context_;
  const Geometry& geometry_;
  const Rules& rules_;
  int ranks_;
  std::uint64_t last_;
  std::uint64_t turn_ = 0;
  std::vector<Places> places_;
};

}  // namespace

std::unique_ptr<Run> pool_run(const RunContext& context, const Geometry& geometry, const Rules& rules, const Places& mine) {
  return std::make_unique<PoolRun>(context, geometry, rules, mine);
}

}  // namespace ff
