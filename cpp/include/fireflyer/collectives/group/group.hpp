// Who is where: ranks, nodes, the leader of each node, and what each rank does in an operation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fireflyer/collectives/group/operation.hpp"
#include "fireflyer/collectives/group/program.hpp"
#include "fireflyer/collectives/group/window.hpp"

namespace ff {

// Where every rank is: worked out once, so that no question costs more for a larger group.
struct Layout {
  int nodes = 0;
  std::vector<int> order;     // ranks by node, then by rank
  std::vector<int> first;     // of each node: where its ranks begin in `order`; one more at the end
  std::vector<int> position;  // of each rank in `order`

  explicit Layout(const std::vector<int>& node_of_rank);
};

// Nodes are numbered from 0 without gaps; the leader of a node is its lowest rank.
struct Group {
  int rank = 0;
  std::vector<int> node_of_rank;    // not to be changed once a question about nodes has been asked
  std::vector<std::string> labels;  // of each rank, for people: "rank 3 (node 1, host n17)"
  std::vector<std::vector<int>> trees;  // parent of each node, -1 at the root; none for a single node
  std::int64_t timeout_ns = 0;
  std::vector<Route> routes = {};      // rows of one kind from small to large; none: the trees, chunks as the window's
  std::vector<Program> programs = {};  // of this node, for its leader: for routes by other algorithms than the trees

  int world_size() const { return static_cast<int>(node_of_rank.size()); }
  int node() const { return node_of_rank[static_cast<std::size_t>(rank)]; }
  int nodes() const { return layout().nodes; }
  std::vector<int> ranks_of(int node) const;
  int leader_of(int node) const { return layout().order[static_cast<std::size_t>(layout().first[static_cast<std::size_t>(node)])]; }
  int local_index(int rank) const;     // position of a rank among the ranks of its node
  int local_rank_at(int index) const;  // the rank at that position of my node
  const std::vector<int>& positions() const { return layout().position; }  // of each rank when they are ordered by node, then by rank
  const std::string& label(int of) const { return labels[static_cast<std::size_t>(of)]; }
  const Layout& layout() const;        // the first call must not be made by two threads at once; `check` makes it
  // How an operation is done; `bytes` are those of the array, of all parts together. A route with chunk_bytes 0 leaves
  // them to the window.
  const Route& route(OpKind kind, std::uint64_t bytes) const;
  const Route& route(const OpDescriptor& op) const;
  void check() const;  // throws std::invalid_argument

  mutable std::shared_ptr<const Layout> layout_ = {};
};

enum class Stage : int {
  in = 0,
  reduce = 1,
  out = 2
};

// The rules of who may do what when, on one node and for one operation. All ranks evaluate the same rules on the same
// counters.
class Rules {
 public:
  Rules(const Window& window, const Group& group, const Geometry& geometry);

  bool takes(Stage stage, int local) const;
  Wants needs(Stage stage, std::uint64_t chunk) const;  // counter values that must all be reached; 0 where none
  bool holds(const Wants& needs) const;
  char* result(std::uint64_t chunk) const;  // where the finished chunk lies for everybody of the node
  char* sum(std::uint64_t chunk) const;     // where the ranks of the node put their sum
  bool multi() const { return multi_; }

 private:
  const Window& window_;
  const Geometry& geometry_;
  bool multi_;
  bool root_here_;
  int root_local_;
};

// The local rank that keeps operation `seq` from going on, when nothing has moved for `idle_ns`; or one that has closed
// its communicator instead of taking part. `self` is not suspected (-1: everyone is).
std::optional<Failure> local_culprit(const Window& window, const Group& group, const OpDescriptor& op, std::int64_t idle_ns, int self);

// How long nothing has moved, not counting time in which the observer itself did not run.
class StallDetector {
 public:
  void restart(std::int64_t now_ns) { since_ns_ = looked_ns_ = now_ns; }
  std::int64_t idle_ns(std::uint64_t fingerprint, std::int64_t now_ns, std::int64_t own_gap_ns);

 private:
  std::uint64_t fingerprint_ = 0;
  std::int64_t since_ns_ = 0;
  std::int64_t looked_ns_ = 0;
};

std::string seconds(std::int64_t ns);  // "2.0 s"

}  // namespace ff
