#include "fireflyer/collectives/group/program.hpp"

#include <algorithm>
#include <stdexcept>

namespace ff {
namespace {

constexpr std::size_t max_steps = 1U << 20;

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

std::vector<std::vector<int>> neighbours_of(const std::vector<int>& parents) {
  const int n = static_cast<int>(parents.size());
  std::vector<std::vector<int>> near(parents.size());
  int edges = 0;
  for (int v = 0; v < n; ++v) {
    const int p = parents[static_cast<std::size_t>(v)];
    if (p < -1 || p >= n || p == v) refuse("a parent is not a node of the tree");
    if (p < 0) continue;
    near[static_cast<std::size_t>(v)].push_back(p);
    near[static_cast<std::size_t>(p)].push_back(v);
    ++edges;
  }
  if (edges != n - 1) refuse("the parents do not form a tree");
  for (auto& some : near) std::sort(some.begin(), some.end());
  return near;
}

void mark(const Step& step, std::vector<bool>& added) { std::fill_n(added.begin() + step.block, step.span, true); }

bool mixed(const Step& step, const std::vector<bool>& added) {
  const auto first = added.begin() + step.block;
  return std::find(first, first + step.span, !*first) != first + step.span;
}

}  // namespace

TreeView::TreeView(const std::vector<int>& parents, int node) : towards(parents.size(), -2) {
  if (node < 0 || node >= static_cast<int>(parents.size())) refuse("the root is not a node of the tree");
  const auto near = neighbours_of(parents);
  root = static_cast<int>(std::find(parents.begin(), parents.end(), -1) - parents.begin());
  neighbours = near[static_cast<std::size_t>(node)];
  std::vector<int> queue{node};
  towards[static_cast<std::size_t>(node)] = -1;
  for (std::size_t head = 0; head < queue.size(); ++head) {
    const int from = queue[head];
    for (const int next : near[static_cast<std::size_t>(from)]) {
      int& way = towards[static_cast<std::size_t>(next)];
      if (way != -2) continue;
      way = from == node ? next : towards[static_cast<std::size_t>(from)];
      queue.push_back(next);
    }
  }
  if (queue.size() != parents.size()) refuse("the parents do not form a tree");
}

Orientation TreeView::at(int top) const {
  if (top < 0 || top >= static_cast<int>(towards.size())) refuse("the root is not a node of the tree");
  Orientation view;
  view.parent = towards[static_cast<std::size_t>(top)];
  for (const int next : neighbours) {
    if (next != view.parent) view.children.push_back(next);
  }
  return view;
}

Orientation orient(const std::vector<int>& parents, int root, int node) { return TreeView(parents, node).at(root); }

Program tree_program(OpKind kind, const Orientation& view, int lane) {
  Program program;
  program.kind = kind;
  program.lane = lane;
  program.channel = channel_of(Algorithm::double_binary_tree, lane);
  std::vector<std::uint32_t> ready;
  const auto add = [&](Action action, int peer) {
    program.steps.push_back(Step{action, peer, 0, 1, 0, ready});
    return std::vector<std::uint32_t>{static_cast<std::uint32_t>(program.steps.size() - 1)};
  };
  if (kind != OpKind::broadcast) {
    for (const int child : view.children) ready = add(Action::receive_add, child);
    ready = view.parent >= 0 ? add(Action::send_acc, view.parent) : add(Action::finish, -1);
  }
  if (kind != OpKind::reduce) {
    if (view.parent >= 0) ready = add(Action::receive_result, view.parent);
    for (const int child : view.children) add(Action::send_result, child);
  }
  return program;
}

std::vector<bool> of_one_node(const Program& program) {
  std::vector<bool> added(program.blocks, false), alone;
  for (const Step& step : program.steps) {
    alone.push_back(!added[step.block]);
    if (step.action == Action::receive_add) mark(step, added);
  }
  return alone;
}

void check(const Program& program, int node, int nodes) {
  if (program.lane < 0 || program.lane >= lanes || program.channel < 0 || program.channel >= channel_count || program.channel % lanes != program.lane) {
    refuse("a program is for no lane or channel");
  }
  const bool parted = program.kind == OpKind::reduce_scatter || program.kind == OpKind::allgather;
  if (program.blocks < 1 || program.blocks > static_cast<std::uint32_t>(nodes) || (parted && program.blocks != static_cast<std::uint32_t>(nodes))) {
    refuse("a program has a wrong number of blocks");
  }
  if (program.steps.size() > max_steps || program.rounds < 1) refuse("a program is too long");
  std::vector<bool> added(program.blocks, false);
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    if (static_cast<int>(step.action) > static_cast<int>(Action::receive_result)) refuse("a step does nothing known");
    const bool alone = step.action == Action::finish;
    if (alone ? step.peer != -1 : (step.peer < 0 || step.peer >= nodes || step.peer == node)) refuse("a step has a peer that cannot be");
    if (step.span < 1 || step.block >= program.blocks || step.span > program.blocks - step.block) refuse("a step is on blocks that do not exist");
    if (step.round >= program.rounds) refuse("a step is in a round that does not exist");
    for (const std::uint32_t before : step.after) {
      if (before >= i) refuse("a step waits for a later one");
    }
    const bool sums = step.action == Action::send_acc || step.action == Action::receive_add || step.action == Action::finish;
    if (sums && mixed(step, added)) refuse("a step is on blocks of which only some have been added to");
    if (step.action == Action::receive_add) mark(step, added);
  }
}

}  // namespace ff
