#include "fireflyer/group.hpp"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace ff {

int Group::nodes() const { return *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1; }

std::vector<int> Group::ranks_of(int node) const {
  std::vector<int> ranks;
  for (int r = 0; r < world_size(); ++r) {
    if (node_of_rank[static_cast<std::size_t>(r)] == node) ranks.push_back(r);
  }
  return ranks;
}

int Group::leader_of(int node) const { return ranks_of(node).front(); }

int Group::local_index(int of) const {
  int index = 0;
  for (int r = 0; r < of; ++r) index += node_of_rank[static_cast<std::size_t>(r)] == node_of_rank[static_cast<std::size_t>(of)];
  return index;
}

int Group::local_rank_at(int index) const { return ranks_of(node())[static_cast<std::size_t>(index)]; }

std::vector<int> Group::positions() const {
  std::vector<int> found(node_of_rank.size());
  int next = 0;
  for (int n = 0; n < nodes(); ++n) {
    for (const int r : ranks_of(n)) found[static_cast<std::size_t>(r)] = next++;
  }
  return found;
}

void Group::check() const {
  if (node_of_rank.empty() || rank < 0 || rank >= world_size()) throw std::invalid_argument("the rank is not in the group");
  if (labels.size() != node_of_rank.size()) throw std::invalid_argument("every rank needs a label");
  if (timeout_ns <= 0) throw std::invalid_argument("the timeout must be positive");
  if (*std::min_element(node_of_rank.begin(), node_of_rank.end()) < 0) throw std::invalid_argument("nodes count from 0");
  const int count = nodes();
  if (count > world_size()) throw std::invalid_argument("nodes are numbered without gaps");
  for (int n = 0; n < count; ++n) {
    if (ranks_of(n).empty()) throw std::invalid_argument("nodes are numbered without gaps");
  }
  if (count > 1 && trees.size() != 2) throw std::invalid_argument("several nodes need two trees");
  for (const auto& tree : trees) {
    if (static_cast<int>(tree.size()) != count) throw std::invalid_argument("a tree needs one parent for each node");
    orient(tree, 0, 0);
  }
}

Orientation orient(const std::vector<int>& parents, int root, int node) {
  const int n = static_cast<int>(parents.size());
  if (root < 0 || root >= n || node < 0 || node >= n) throw std::invalid_argument("the root is not a node of the tree");
  std::vector<std::vector<int>> near(parents.size());
  int edges = 0;
  for (int v = 0; v < n; ++v) {
    const int p = parents[static_cast<std::size_t>(v)];
    if (p < -1 || p >= n || p == v) throw std::invalid_argument("a parent is not a node of the tree");
    if (p < 0) continue;
    near[static_cast<std::size_t>(v)].push_back(p);
    near[static_cast<std::size_t>(p)].push_back(v);
    ++edges;
  }
  std::vector<int> above(parents.size(), -2);
  std::vector<int> queue{root};
  above[static_cast<std::size_t>(root)] = -1;
  for (std::size_t head = 0; head < queue.size(); ++head) {
    for (const int next : near[static_cast<std::size_t>(queue[head])]) {
      if (above[static_cast<std::size_t>(next)] != -2) continue;
      above[static_cast<std::size_t>(next)] = queue[head];
      queue.push_back(next);
    }
  }
  if (edges != n - 1 || static_cast<int>(queue.size()) != n) throw std::invalid_argument("the parents do not form a tree");
  Orientation result;
  result.parent = above[static_cast<std::size_t>(node)];
  for (const int next : near[static_cast<std::size_t>(node)]) {
    if (next != result.parent) result.children.push_back(next);
  }
  std::sort(result.children.begin(), result.children.end());
  return result;
}

Rules::Rules(const Window& window, const Group& group, const Geometry& geometry)
    : window_(window), geometry_(geometry), multi_(group.nodes() > 1), root_here_(false), root_local_(-1) {
  const int root = geometry.op.root;
  if (root < 0) return;
  root_here_ = group.node_of_rank[static_cast<std::size_t>(root)] == group.node();
  if (root_here_) root_local_ = group.local_index(root);
}

bool Rules::takes(Stage stage, int local) const {
  const bool broadcast = geometry_.op.kind == OpKind::broadcast;
  switch (stage) {
    case Stage::in: return !broadcast && window_.ranks() > 1;
    case Stage::reduce: return !broadcast || local == root_local_;
    case Stage::out:
      if (broadcast) return local != root_local_;
      return geometry_.op.kind != OpKind::reduce || local == root_local_;
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

bool Rules::able(int local) const {
  if (exchanged(geometry_.op.kind)) return false;  // it waits for others than those of this node, too
  for (const Stage stage : {Stage::in, Stage::reduce, Stage::out}) {
    const std::uint64_t next = window_.line(local).count[static_cast<std::size_t>(stage)].load();
    if (next < geometry_.base + geometry_.chunks && holds(needs(stage, std::max(next, geometry_.base)))) return true;
  }
  return false;
}

char* Rules::result(std::uint64_t chunk) const {
  return geometry_.unit == geometry_.accum_unit ? window_.acc(chunk) : window_.result(chunk);
}

char* Rules::sum(std::uint64_t chunk) const { return multi_ ? window_.acc(chunk) : result(chunk); }

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
      const Geometry theirs = window.signature(local, entered - 1, group.world_size());
      if (Rules(window, group, theirs).able(local)) return blame(local, " stopped in the middle of " + theirs.op.name() + ": no progress for " + seconds(idle_ns));
    } else if (entered <= op.seq) {
      return blame(local, " has not entered " + op.name() + " for " + seconds(idle_ns));
    }
  }
  return std::nullopt;
}

std::int64_t Watch::idle_ns(std::uint64_t fingerprint, std::int64_t now_ns, std::int64_t own_gap_ns) {
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
