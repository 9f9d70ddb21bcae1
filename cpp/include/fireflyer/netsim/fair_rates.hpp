// Max-min fair rates, solved again where a change reaches. Not for use by several threads at once.
//
// Flows with the same links are one *path* with a number of flows. The level of a path is the rate of each of its flows
// over their weight; a flow of rate r takes r times its share of each link. An allocation is max-min fair if and only if
// no link carries more than it can and each path has a *bottleneck*: a full link on which no path has a higher level
// (Bertsekas and Gallager, Data Networks, 6.5.2).
//
// A change touches the links of the paths whose flows changed. The paths with their bottleneck there are solved anew by
// progressive filling, all others keeping their rates; then the condition above is checked on every link that these use.
// Where it does not hold, the paths that break it join, and all that joined are solved again. What does not join has kept
// its bottleneck, so the result is the solution of the whole network, without a look at the rest of it. Once a part of all
// paths has joined and more do, all join: where a change reaches most of a network, one filling is cheaper than many.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace ff {

class FairRates {
 public:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  // Capacity of each link, above 0. Throws std::invalid_argument.
  explicit FairRates(std::vector<double> capacities);

  // A path without flows; its number. Links occur once each. Throws std::invalid_argument.
  std::uint32_t add_path(std::span<const std::uint32_t> links, std::span<const double> shares, double weight);

  // What the next solve() takes into account. Throws std::out_of_range.
  void set_flows(std::uint32_t path, std::uint32_t flows);
  void set_capacity(std::uint32_t link, double capacity);

  // Paths that were solved again; valid until the next call.
  std::span<const std::uint32_t> solve();

  // Of each flow of a path, as of the last solve(); infinite without links, 0 without flows.
  double rate(std::uint32_t path) const;

  std::uint32_t flows(std::uint32_t path) const { return paths_.at(path).flows; }
  std::uint32_t paths() const { return static_cast<std::uint32_t>(paths_.size()); }
  std::uint32_t links() const { return static_cast<std::uint32_t>(links_.size()); }
  // Of a path: links with shares.
  struct Hop {
    std::uint32_t link;
    std::uint32_t slot;  // among the uses of the link
    double share;
  };
  std::span<const Hop> hops(std::uint32_t path) const;

 private:
  struct Path {
    std::uint64_t first;
    std::uint32_t count;
    std::uint32_t flows = 0, solved_flows = 0;
    bool changed = false, active = false, joined = false;
    std::uint32_t place = 0;  // among the active ones
    double weight;
    double demand = 0;  // weight times flows
    double level = 0;
  };
  // Of a link by a path with flows. What is read of all uses of a link is here, so that a look at them is one sweep.
  struct Use {
    std::uint32_t path;
    std::uint32_t hop;  // of the path
    double demand;      // of the path, times its share
    double level;       // of the path
    bool joined, open;  // solved again; and its level is not known yet
    bool limited;       // the link is the bottleneck of the path
  };
  struct Link {
    double capacity;
    double fixed = 0;   // carried by paths whose level is known
    double demand = 0;  // of the paths that still grow
    std::uint32_t open = 0;
    bool touched = false, dirty = false, resized = false;
    std::vector<Use> uses;
  };
  struct Candidate {
    double level;
    std::uint32_t link;
    bool operator<(const Candidate& other) const { return level > other.level; }  // the lowest on top of a heap
  };

  void apply_changes();
  void insert(std::uint32_t path);
  void erase(std::uint32_t path);
  void mark_dirty(std::uint32_t link);
  void join(std::uint32_t path);
  void join_all();
  void fill();
  Use& use_of(const Hop& hop) { return links_[hop.link].uses[hop.slot]; }
  static void measure(Link& link);
  void fix(std::uint32_t path, std::uint32_t link, double level);
  bool grow();

  std::vector<Link> links_;
  std::vector<Path> paths_;
  std::vector<Hop> hops_;
  std::vector<std::uint32_t> active_, changed_, dirty_, joined_, touched_, solved_;
  std::vector<Candidate> heap_;
};

}  // namespace ff
