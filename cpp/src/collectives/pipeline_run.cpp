// An operation in chunks through the slots of the window: copy in (where the others cannot reach this rank's array), reduce
// one's slice of every chunk, copy the finished chunk out; whichever of the three is possible (see Rules).
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fireflyer/collectives/kernels/kernels.hpp"
#include "run.hpp"

namespace ff {
namespace {

constexpr std::size_t slice_align = 64;  // elements; keeps slices apart by at least a cache line

class PipelineRun final : public Run {
 public:
  PipelineRun(const RunContext& context, const Geometry& geometry, const Rules& rules, const char* in, char* out)
      : context_(context), geometry_(geometry), rules_(rules), in_(in), out_(out), ranks_(context.window.ranks()) {
    const Places mine = context.window.places(context.local, geometry.op.seq);
    peeks_ = context.peer_access.everywhere() && rules.multi();
    lent_ = peeks_ || mine.in_arena != never;
    for (const Stage stage : {Stage::in, Stage::reduce, Stage::out}) {
      const bool works = rules.takes(stage, context.local) && !(stage == Stage::in && lent_) && !(stage == Stage::reduce && at_home());
      next(stage) = works ? geometry.base : geometry.end;
      context.window.advance(context.local, counter_of(stage), next(stage));  // operations of other kinds left it behind
    }
    if (rules.takes(Stage::reduce, context.local) && geometry.sums() && ranks_ > 1 && peeks_) {
      scratch_ = context.scratch.at_least(context.window.chunk_bytes() * static_cast<std::size_t>(ranks_));
    }
  }

  // Finishing comes first: it frees slots that others wait for, and its data are still in the cache.
  bool step() override {
    for (const Stage stage : {Stage::out, Stage::reduce, Stage::in}) {
      std::uint64_t& chunk = next(stage);
      if (chunk >= geometry_.end || !rules_.holds(rules_.needs(stage, chunk))) continue;
      perform(stage, chunk);
      if (stage == Stage::reduce && chunk + 1 == geometry_.base + geometry_.chunks && scratch_ != nullptr) {  // no rank has a result without this chunk
        if (const auto failure = context_.peer_access.betrayed(context_.group, geometry_.op)) context_.window.fail(*failure);
      }
      if (context_.window.failed()) return true;
      ++chunk;
      if (stage == Stage::out) ++finished_chunks_;
      if (chunk == geometry_.base + geometry_.chunks) chunk = geometry_.end;
      context_.window.advance(context_.local, counter_of(stage), chunk);
      return true;
    }
    return false;
  }

  // Who lends its array to the others, or to the network, stays until they have done with it.
  bool finished() const override {
    const bool done = std::all_of(next_.begin(), next_.end(), [&](std::uint64_t n) { return n >= geometry_.end; });
    return done && (!lends() || context_.window.value(counter_reduced) >= geometry_.end) && (geometry_.home == nullptr || network_done());
  }

  // Those that this rank has received whole; a rank that receives nothing counts what it has added or handed out.
  std::uint64_t done_chunks() const override {
    if (geometry_.home != nullptr) {
      const std::uint64_t first = geometry_.base >> 1;
      const std::uint64_t both = context_.window.value(counter_done0) + context_.window.value(counter_done1);
      return std::min(both - std::min(both, 2 * first), geometry_.chunks);
    }
    if (rules_.takes(Stage::out, context_.local)) return finished_chunks_;
    return std::min(next_[static_cast<std::size_t>(Stage::reduce)] - geometry_.base, geometry_.chunks);
  }
  std::uint64_t chunks() const override { return geometry_.chunks; }

  Wants wants() const override {
    Wants wants;
    wants.fill(never);
    for (const Stage stage : {Stage::in, Stage::reduce, Stage::out}) {
      const std::uint64_t chunk = next_[static_cast<std::size_t>(stage)];
      if (chunk >= geometry_.end) continue;
      const Wants needs = rules_.needs(stage, chunk);
      bool possible = true;
      for (std::size_t which = 0; which < needs.size(); ++which) {
        if (needs[which] == 0 || context_.window.value(static_cast<Counter>(which)) >= needs[which]) continue;
        wants[which] = std::min(wants[which], needs[which]);
        possible = false;
      }
      if (possible) wants[counter_entered] = 0;  // it has become so since this rank looked last
    }
    if (geometry_.home != nullptr) {
      for (const Counter which : {counter_done0, counter_done1, counter_freed0, counter_freed1}) {
        if (context_.window.value(which) < geometry_.end >> 1) wants[which] = std::min(wants[which], geometry_.end >> 1);
      }
    }
    // what has come already would end every wait for the rest at once
    if (lends() && context_.window.value(counter_reduced) < geometry_.end) wants[counter_reduced] = std::min(wants[counter_reduced], geometry_.end);
    return wants;
  }

 private:
  static Counter counter_of(Stage stage) { return static_cast<Counter>(counter_in + static_cast<int>(stage)); }
  std::uint64_t& next(Stage stage) { return next_[static_cast<std::size_t>(stage)]; }
  bool network_done() const {
    const auto over = [&](Counter which) { return context_.window.value(which) >= geometry_.end >> 1; };
    return over(counter_done0) && over(counter_done1) && over(counter_freed0) && over(counter_freed1);
  }
  // The network finds the contribution of the node's only rank where it lies.
  bool at_home() const { return geometry_.own != nullptr || (geometry_.home != nullptr && geometry_.sums() && in_ == out_ && geometry_.unit == geometry_.accum_unit); }
  bool lends() const { return lent_ && geometry_.sums() && ranks_ > 1; }

  void perform(Stage stage, std::uint64_t chunk) {
    if (geometry_.elems(chunk) == 0) return;
    switch (stage) {
      case Stage::in: return copy_in(chunk);
      case Stage::reduce: return geometry_.sums() ? reduce(chunk) : contribute(chunk);
      case Stage::out: return copy_out(chunk);
    }
  }

  // All but the slice that this rank sums itself: that is read where it lies.
  void copy_in(std::uint64_t chunk) {
    char* there = context_.window.input(chunk, context_.local);
    const Slice own = slice_of(geometry_.elems(chunk), ranks_, context_.local, slice_align);
    const auto copy = [&](std::size_t at, const char* from, std::size_t bytes) { std::memcpy(there + at, from, bytes); };
    each_piece(chunk, Slice{0, own.first}, copy);
    each_piece(chunk, Slice{own.first + own.count, geometry_.elems(chunk) - own.first - own.count}, copy);
  }

  // Calls f(bytes into the slot, where that lies in this rank's input, bytes) for the stretches of a slot's elements.
  template <class F>
  void each_piece(std::uint64_t chunk, Slice slice, F f) {
    const std::size_t part = geometry_.part_elems(chunk);
    for (std::size_t at = slice.first, end = slice.first + slice.count; at < end;) {
      const std::size_t position = at / part, inside = at % part;
      const std::size_t some = geometry_.parts == 1 ? end - at : std::min(end - at, part - inside);
      f(at * geometry_.unit, in_ + offset_of(chunk, position) + inside * geometry_.unit, some * geometry_.unit);
      at += some;
    }
  }

  // Bytes into an array of all parts.
  std::size_t offset_of(std::uint64_t chunk, std::size_t position) const {
    if (geometry_.parts == 1) return geometry_.offset_bytes(chunk);
    const auto rank = static_cast<std::size_t>(context_.group.layout().order[position]);
    return rank * geometry_.op.count * geometry_.unit + geometry_.offset_bytes(chunk);
  }

  void reduce(std::uint64_t chunk) {
    Slice own = slice_of(geometry_.elems(chunk), ranks_, context_.local, slice_align);
    const std::size_t part = geometry_.part_elems(chunk);
    for (const std::size_t end = own.first + own.count; own.first < end; own.first += own.count) {
      const std::size_t inside = own.first % part;
      own.count = geometry_.parts == 1 ? end - own.first : std::min(end - own.first, part - inside);
      if (!sum(chunk, own)) return;
    }
  }

  bool sum(std::uint64_t chunk, Slice slice) {
    std::array<const void*, max_local_ranks> inputs{};
    const std::size_t position = geometry_.parts == 1 ? 0 : slice.first / geometry_.part_elems(chunk);
    const std::size_t inside = slice.first - position * geometry_.part_elems(chunk);
    const std::uint64_t offset = offset_of(chunk, position) + inside * geometry_.unit;
    for (int r = 0; r < ranks_; ++r) {
      const char* from = input(chunk, r, offset, slice);
      if (from == nullptr) return false;
      inputs[static_cast<std::size_t>(r)] = from;
    }
    const OpDescriptor& op = geometry_.op;
    if (rules_.multi()) {
      char* to = rules_.sum(chunk) + slice.first * geometry_.accum_unit;
      reduce_to_accum(to, inputs.data(), ranks_, slice.count, op.dtype, op.reduce);
    } else {
      const auto divisor = static_cast<std::uint32_t>(op.reduce == ReduceOp::mean ? context_.group.world_size() : 1);
      saturated_ += reduce_to(rules_.result(chunk) + slice.first * geometry_.unit, inputs.data(), ranks_, slice.count, op.dtype, op.reduce, divisor);
    }
    return true;
  }

  const char* input(std::uint64_t chunk, int r, std::uint64_t offset, Slice slice) {
    if (r == context_.local) return in_ + offset;
    const Places places = context_.window.places(r, geometry_.op.seq);
    if (!peeks_ && places.in_arena == never) return context_.window.input(chunk, r) + slice.first * geometry_.unit;
    char* scratch = scratch_ != nullptr ? scratch_ + static_cast<std::size_t>(r) * context_.window.chunk_bytes() : nullptr;
    const char* from = context_.peer_access.input(r, places, offset, slice.count * geometry_.unit, scratch);
    if (from == nullptr) context_.window.fail(context_.peer_access.lost(context_.group, r, geometry_.op, errno));
    return from;
  }

  // Of a broadcast or allgather: what this rank has to say.
  void contribute(std::uint64_t chunk) {
    const std::size_t bytes = geometry_.part_elems(chunk) * geometry_.unit;
    const std::size_t at = geometry_.parts == 1 ? 0 : static_cast<std::size_t>(context_.group.positions()[static_cast<std::size_t>(context_.group.rank)]) * bytes;
    const char* from = in_ + geometry_.offset_bytes(chunk);
    char* to = rules_.result(chunk) + at;
    if (to != from) std::memcpy(to, from, bytes);
  }

  void copy_out(std::uint64_t chunk) {
    const std::size_t bytes = geometry_.part_elems(chunk) * geometry_.unit;
    const char* result = rules_.result(chunk);
    if (geometry_.op.kind == OpKind::allgather) {
      for (std::size_t position = 0; position < geometry_.parts; ++position) {
        std::memcpy(out_ + offset_of(chunk, position), result + position * bytes, bytes);
      }
      return;
    }
    if (geometry_.op.kind == OpKind::reduce_scatter) result += static_cast<std::size_t>(context_.group.positions()[static_cast<std::size_t>(context_.group.rank)]) * bytes;
    std::memcpy(out_ + geometry_.offset_bytes(chunk), result, bytes);
  }

  const RunContext& context_;
  const Geometry& geometry_;
  const Rules& rules_;
  const char* in_;
  char* out_;
  int ranks_;
  bool peeks_ = false;  // reads arrays in the memory of other ranks; on one node, what is short enough to get here is copied sooner
  bool lent_ = false;
  std::array<std::uint64_t, 3> next_{};
  std::uint64_t finished_chunks_ = 0;
  char* scratch_ = nullptr;
};

}  // namespace

Slice slice_of(std::size_t elems, int parts, int part, std::size_t align) {
  const std::size_t each = (elems / static_cast<std::size_t>(parts) + align) / align * align;
  const std::size_t first = std::min(elems, each * static_cast<std::size_t>(part));
  return {first, std::min(elems, first + each) - first};
}

std::unique_ptr<Run> pipeline_run(const RunContext& context, const Geometry& geometry, const Rules& rules, const char* in, char* out) {
  return std::make_unique<PipelineRun>(context, geometry, rules, in, out);
}

}  // namespace ff
