// Max-min fair rates, solved again where a change reaches. Not for use by several threads at once.
//
// Flows with the same links are one *path* with a number of flows. Each link has a *level*, the most that a flow on it gets
// over the weight of its path; of a link that is not full it is infinite. The lowest level of the links of a path is that
// of its flows, and the link is the *limit* of the path. A flow of rate r takes r times its share of each link. Rates are
// max-min fair if and only if each link has the level at which its paths fill it, each of them taking no more than the
// other links of the path leave (a bottleneck for each path: Bertsekas and Gallager, Data Networks, 6.5.2).
//
// The level of a link is a function of lower levels alone. So a change is followed upwards: of the links whose paths or
// neighbors changed the lowest gets its level anew, and if it differs, the higher links of its paths are to be looked at,
// too. Levels below a change stay, and so does each link that no change of a neighbor reaches. Where many paths change at
// once, all links are filled from zero.
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

  // How many levels of links were computed.
  std::uint64_t solve();

  // By the last solve(); valid until the next: links with another level, and paths that have another limit, or none.
  std::span<const std::uint32_t> changed_links() const { return changed_links_; }
  std::span<const std::uint32_t> moved_paths() const { return moved_paths_; }

  // As of the last solve(). Of a path without flows or without links: none.
  std::uint32_t limit(std::uint32_t path) const { return limits_.at(path); }
  double level(std::uint32_t link) const { return levels_.at(link); }
  // Of each flow of a path; infinite without links, 0 without flows.
  double rate(std::uint32_t path) const;

  double weight(std::uint32_t path) const { return paths_.at(path).weight; }
  std::uint32_t paths() const { return static_cast<std::uint32_t>(paths_.size()); }
  std::uint32_t links() const { return static_cast<std::uint32_t>(links_.size()); }

 private:
  struct Hop {
    std::uint32_t link;
    std::uint32_t slot;  // among the uses of the link
  };
  struct Path {
    std::uint32_t flows = 0, solved_flows = 0;
    bool changed = false, moved = false;
    std::uint32_t place = 0;  // among the active ones
    double weight;
  };
  // Of a link by a path with flows. What is read of all uses of a link is here, so that a look at them is one sweep.
  struct Use {
    std::uint32_t path;
    std::uint32_t hop : 31;     // of the path
    std::uint32_t limited : 1;  // the link is the limit of the path
    double demand;              // of all its flows, at level 1
    double level;               // of the limit of the path
  };
  struct Link {
    double capacity;
    double spare = 0;  // of a link that is not full: at least so much is left
    bool dirty = false, changed = false;
    std::vector<Use> uses;
  };
  struct Candidate {
    double level;
    std::uint32_t link;
    // The lowest on top of a heap; the number decides, so that the order is always the same.
    bool operator<(const Candidate& other) const { return level > other.level || (level == other.level && link > other.link); }
  };
  // Of a use: the lowest level of the other links of its path.
  struct Bound {
    double level, demand;
  };

  std::span<const Hop> hops(std::uint32_t path) const { return {hops_.data() + starts_[path], hops_.data() + starts_[path + 1]}; }
  bool apply_changes();
  void insert(std::uint32_t path);
  void erase(std::uint32_t path);
  void mark(std::uint32_t link);
  void mark_neighbor(const Hop& hop, double rise);
  bool follow();
  double level_of(std::uint32_t link);
  double filled(double capacity, double level) const;
  std::uint32_t limit_of(std::uint32_t path) const;
  double elsewhere(std::uint32_t path, std::uint32_t link) const;
  void set_level(std::uint32_t link, double level);
  void set_limit(std::uint32_t path, std::uint32_t link);
  void note_change(std::uint32_t link);
  void fill_all();
  double measured(std::uint32_t link) const;

  std::vector<Link> links_;
  std::vector<double> levels_;  // of links
  std::vector<Path> paths_;
  std::vector<std::uint32_t> limits_;  // of paths
  // Rows of hops, apart from the rest of a path and small, since a change reads those of many paths.
  std::vector<std::uint32_t> starts_{0};
  std::vector<Hop> hops_;
  std::vector<double> shares_;  // of hops
  std::vector<std::uint32_t> active_, changed_, changed_links_, moved_paths_;
  std::vector<Candidate> heap_;
  std::vector<Bound> bounds_;
  std::uint64_t computed_ = 0;
};

}  // namespace ff
