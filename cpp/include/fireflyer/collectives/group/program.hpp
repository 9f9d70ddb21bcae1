// What a node does with each chunk of a lane: see fireflyer.collectives.planning.programs, which builds programs and
// says why they never block. Here they are checked and made ready to be run. The numbers are those of that module.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fireflyer/collectives/group/operation.hpp"

namespace ff {

enum class Algorithm : std::uint8_t {
  double_binary_tree = 0,
  ring = 1,
  halving_doubling = 2,
  line = 3
};

inline constexpr int algorithm_count = 4;
inline constexpr const char* algorithm_names[algorithm_count] = {"double_binary_tree", "ring", "halving_doubling", "line"};
inline constexpr int lanes = 2;
inline constexpr int control_channel = -1;
inline constexpr int channel_count = algorithm_count * lanes;
inline constexpr int max_sockets = 8;  // connections of one channel with one neighbour

constexpr int channel_of(Algorithm algorithm, int lane) { return lanes * static_cast<int>(algorithm) + lane; }

enum class Action : std::uint8_t {
  send_acc = 0,
  receive_add = 1,
  finish = 2,
  send_result = 3,
  receive_result = 4
};

constexpr bool sends(Action action) { return action == Action::send_acc || action == Action::send_result; }
constexpr bool receives(Action action) { return action == Action::receive_add || action == Action::receive_result; }

struct Step {
  Action action = Action::finish;
  int peer = -1;             // the other node of a send or receive
  std::uint32_t block = 0;   // the first one
  std::uint32_t span = 1;    // how many
  std::uint32_t round = 0;
  std::vector<std::uint32_t> after;  // earlier steps

  bool operator==(const Step&) const = default;
};

struct Program {
  OpKind kind = OpKind::allreduce;
  int lane = 0;
  int channel = 0;
  std::uint32_t blocks = 1;
  std::uint32_t rounds = 1;
  std::vector<Step> steps;
};

// By how much the keys of successive chunks differ, so that `depth` chunks in flight never block each other.
constexpr std::uint64_t stride_of(std::uint64_t rounds, std::uint64_t depth) { return rounds <= depth ? 1 : (rounds + depth - 1) / depth; }

// Operations of this kind on arrays of up to so many bytes (all parts together) are done like this.
struct Route {
  OpKind kind = OpKind::allreduce;
  std::uint64_t up_to_bytes = 0;
  Algorithm algorithm = Algorithm::double_binary_tree;
  std::size_t chunk_bytes = 0;
};

// A tree seen from one node: towards `root`, and away from it, children in ascending order.
struct Orientation {
  int parent = -1;
  std::vector<int> children;
};

// Re-roots the undirected tree given by parents. Throws std::invalid_argument where it is not a tree.
Orientation orient(const std::vector<int>& parents, int root, int node);

// A tree as one node sees it, for every root: `neighbours` ascending, `towards[r]` the one that leads to node r.
struct TreeView {
  std::vector<int> neighbours;
  std::vector<int> towards;  // -1 for the node itself
  int root = 0;              // of the tree as it was given

  TreeView() = default;
  TreeView(const std::vector<int>& parents, int node);  // throws std::invalid_argument where it is not a tree
  Orientation at(int root) const;
};

// Rounds are all 0: in a tree each connection carries one frame of a chunk in each direction.
Program tree_program(OpKind kind, const Orientation& view, int lane);

// Of each step: whether nothing has been added yet to the first of its blocks, so that a sum there is this node's alone.
std::vector<bool> of_one_node(const Program& program);

// Throws std::invalid_argument where the program of `node` makes no sense in a group of `nodes` nodes.
void check(const Program& program, int node, int nodes);

}  // namespace ff
