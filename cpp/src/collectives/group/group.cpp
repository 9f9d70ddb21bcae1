#include "fireflyer/collectives/group/group.hpp"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "fireflyer/base/clock.hpp"

namespace ff {

Layout::Layout(const std::vector<int>& node_of_rank) : nodes(*std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1) {
  const std::size_t world = node_of_rank.size();
  first.assign(static_cast<std::size_t>(nodes) + 1, 0);
  for (const int node : node_of_rank) ++first[static_cast<std::size_t>(node) + 1];
  for (std::size_t node = 0; node + 1 < first.size(); ++node) first[node + 1] += first[node];
  order.resize(world);
  position.resize(world);
  std::vector<int> next(first.begin(), first.end() - 1);
  for (std::size_t rank = 0; rank < world; ++rank) {
    const int at = next[static_cast<std::size_t>(node_of_rank[rank])]++;
    order[static_cast<std::size_t>(at)] = static_cast<int>(rank);
    position[rank] = at;
  }
}

const Layout& Group::layout() const {
  if (!layout_) layout_ = std::make_shared<const Layout>(node_of_rank);
  return *layout_;
}

std::vector<int> Group::ranks_of(int of) const {
  const Layout& where = layout();
  const auto begin = where.order.begin();
  return {begin + where.first[static_cast<std::size_t>(of)], begin + where.first[static_cast<std::size_t>(of) + 1]};
}

int Group::local_index(int of) const {
  const Layout& where = layout();
  const int node = node_of_rank[static_cast<std::size_t>(of)];
  return where.position[static_cast<std::size_t>(of)] - where.first[static_cast<std::size_t>(node)];
}

int Group::local_rank_at(int index) const {
  const Layout& where = layout();
  return where.order[static_cast<std::size_t>(where.first[static_cast<std::size_t>(node())] + index)];
}

const Route& Group::route(OpKind kind, std::uint64_t bytes) const {
  static const Route by_tree{};
  for (const Route& route : routes) {
    if (route.kind == kind && bytes <= route.up_to_bytes) return route;
  }
  return by_tree;
}

const Route& Group::route(const OpDescriptor& op) const {
  const bool parted = op.kind == OpKind::reduce_scatter || op.kind == OpKind::allgather;
  return route(op.kind, op.count * dtype_size(op.dtype) * (parted ? static_cast<std::uint64_t>(world_size()) : 1));
}

void Group::check() const {
  const auto refuse = [](const char* why) { throw std::invalid_argument(why); };
  if (node_of_rank.empty() || rank < 0 || rank >= world_size()) refuse("the rank is not in the group");
  if (labels.size() != node_of_rank.size()) refuse("every rank needs a label");
  if (timeout_ns <= 0) refuse("the timeout must be positive");
  const auto [lowest, highest] = std::minmax_element(node_of_rank.begin(), node_of_rank.end());
  if (*lowest < 0) refuse("nodes count from 0");
  if (*highest >= world_size()) refuse("nodes are numbered without gaps");
  const Layout& where = layout();
  for (std::size_t n = 0; n + 1 < where.first.size(); ++n) {
    if (where.first[n] == where.first[n + 1]) refuse("nodes are numbered without gaps");
  }
  if (where.nodes > 1 && trees.size() != lanes) refuse("several nodes need two trees");
  for (const auto& tree : trees) {
    if (static_cast<int>(tree.size()) != where.nodes) refuse("a tree needs one parent for each node");
    orient(tree, 0, 0);
  }
  for (const Program& program : programs) ff::check(program, node(), where.nodes);
  for (const Route& route : routes) {
    const auto has = [&](int lane) {
      return std::any_of(programs.begin(), programs.end(),
                         [&](const Program& p) { return p.kind == route.kind && p.channel == channel_of(route.algorithm, lane) && p.lane == lane; });
    };
    if (where.nodes > 1 && rank == leader_of(node()) && route.algorithm != Algorithm::double_binary_tree && !(has(0) && has(1))) refuse("a route has no program");
  }
}

Rules::Rules(const Window& window, const Group& group, const Geometry& geometry)
    : window_(window), geometry_(geometry), multi_(group.nodes() > 1), root_here_(false), root_local_(-1) {
  const int root = geometry.op.root;
  if (root < 0) return;
  root_here_ = group.node_of_rank[static_cast<std::size_t>(root)] == group.node();
  if (root_here_) root_local_ = group.local_index(root);
}

bool Rules::takes(Stage stage, int local) const {
  const OpKind kind = geometry_.op.kind;
  switch (stage) {
    case Stage::in: return geometry_.sums() && window_.ranks() > 1;
    case Stage::reduce: return kind != OpKind::broadcast || (local == root_local_ && geometry_.home == nullptr);
    case Stage::out:
      if (geometry_.home != nullptr) return false;
      if (kind == OpKind::broadcast) return local != root_local_;
      return kind != OpKind::reduce || local == root_local_;
  }
  return false;
}

Wants Rules::needs(Stage stage, std::uint64_t chunk) const {
  Wants needs{};
  const std::uint64_t slots = window_.slots();
  const std::uint64_t reused = chunk >= slots ? chunk - slots + 1 : 0;  // chunks that must have left the ring
  const int tree = static_cast<int>(chunk & 1);                         // slots are even: chunk - slots is of this tree too
  switch (stage) {
    case Stage::in:
      needs[counter_reduced] = reused;
      break;
    case Stage::reduce:
      if (geometry_.sums()) needs[counter_in] = chunk + 1;
      needs[counter_out] = reused;
      if (multi_ && reused > 0) needs[static_cast<std::size_t>(counter_freed0 + tree)] = ((chunk - slots) >> 1) + 1;
      break;
    case Stage::out:
      if (!multi_ || (geometry_.op.kind == OpKind::broadcast && root_here_)) {
        needs[counter_reduced] = chunk + 1;
      } else {
        needs[static_cast<std::size_t>(counter_done0 + tree)] = (chunk >> 1) + 1;
      }
      break;
  }
  return needs;
}

bool Rules::holds(const Wants& needs) const {
  for (int which = 0; which < counters; ++which) {
    const std::uint64_t needed = needs[static_cast<std::size_t>(which)];
    if (needed != 0 && window_.value(static_cast<Counter>(which)) < needed) return false;
  }
  return true;
}

char* Rules::result(std::uint64_t chunk) const {
  if (geometry_.home != nullptr) return geometry_.home + geometry_.offset_bytes(chunk);
  return geometry_.unit == geometry_.accum_unit ? window_.acc(chunk) : window_.result(chunk);
}

char* Rules::sum(std::uint64_t chunk) const {
  if (!multi_) return result(chunk);
  return geometry_.home != nullptr && geometry_.unit == geometry_.accum_unit ? result(chunk) : window_.acc(chunk);
}

std::optional<Failure> local_culprit(const Window& window, const Group& group, const OpDescriptor& op, std::int64_t idle_ns, int self) {
  const auto blame = [&](int local, const std::string& what) {
    const int rank = group.local_rank_at(local);
    return Failure{FailureKind::peer_failed, rank, op.seq, group.label(rank) + what};
  };
  for (int local = 0; local < window.ranks(); ++local) {
    const Line& line = window.line(local);
    if (line.entered.load() <= op.seq && line.left.load() != 0) return blame(local, " closed its communicator before " + op.name());
  }
  if (idle_ns < group.timeout_ns) return std::nullopt;
  for (int local = 0; local < window.ranks(); ++local) {
    const Line& line = window.line(local);
    const std::uint64_t entered = line.entered.load();
    if (local == self) continue;
    if (entered > line.finished.load()) {
      const std::int64_t still_ns = monotonic_ns() - line.heartbeat_ns.load();
      const OpDescriptor theirs = window.signature(local, entered - 1);
      if (still_ns > group.timeout_ns) return blame(local, " stopped in the middle of " + theirs.name() + ": no progress for " + seconds(still_ns));
    } else if (entered <= op.seq && line.waits.load() == 0) {
      return blame(local, " has not entered " + op.name() + " for " + seconds(idle_ns));
    }
  }
  return std::nullopt;
}

std::int64_t StallDetector::idle_ns(std::uint64_t fingerprint, std::int64_t now_ns, std::int64_t own_gap_ns) {
  if (fingerprint != fingerprint_ || now_ns - looked_ns_ > own_gap_ns) since_ns_ = now_ns;
  fingerprint_ = fingerprint;
  looked_ns_ = now_ns;
  return now_ns - since_ns_;
}

std::string seconds(std::int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) * 1e-9);
  return text;
}

}  // namespace ff
