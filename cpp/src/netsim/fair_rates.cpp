#include "fireflyer/netsim/fair_rates.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace ff {
namespace {

// Rounding: what differs by less counts as equal. Each check is of the state itself, so that errors do not add up.
constexpr double tolerance = 1e-12;
// Of the paths with flows, one in so many: where more have joined and others follow, all join.
constexpr std::size_t part_of_all = 4;

}  // namespace

FairRates::FairRates(std::vector<double> capacities) {
  links_.resize(capacities.size());
  for (std::size_t link = 0; link < capacities.size(); ++link) {
    if (!(capacities[link] > 0) || !std::isfinite(capacities[link])) throw std::invalid_argument("capacities are above 0 and finite");
    links_[link].capacity = capacities[link];
  }
}

std::uint32_t FairRates::add_path(std::span<const std::uint32_t> links, std::span<const double> shares, double weight) {
  if (links.size() != shares.size()) throw std::invalid_argument("a path has one share for each link");
  if (!(weight > 0) || !std::isfinite(weight)) throw std::invalid_argument("the weight of a path is above 0 and finite");
  for (const std::uint32_t link : links) {
    if (link >= links_.size()) throw std::invalid_argument("a path uses a link that does not exist");
  }
  for (const double share : shares) {
    if (!(share > 0) || !std::isfinite(share)) throw std::invalid_argument("shares of a path are above 0 and finite");
  }
  std::vector<std::uint32_t> sorted(links.begin(), links.end());
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) throw std::invalid_argument("a path uses a link twice");
  Path path{};
  path.first = hops_.size();
  path.count = static_cast<std::uint32_t>(links.size());
  path.weight = weight;
  for (std::size_t hop = 0; hop < links.size(); ++hop) hops_.push_back({links[hop], 0, shares[hop]});
  paths_.push_back(path);
  return paths() - 1;
}

void FairRates::set_flows(std::uint32_t path, std::uint32_t flows) {
  Path& one = paths_.at(path);
  one.flows = flows;
  if (!one.changed) {
    one.changed = true;
    changed_.push_back(path);
  }
}

void FairRates::set_capacity(std::uint32_t link, double capacity) {
  if (!(capacity > 0) || !std::isfinite(capacity)) throw std::invalid_argument("capacities are above 0 and finite");
  links_.at(link).capacity = capacity;
  links_[link].resized = true;
  mark_dirty(link);
}

double FairRates::rate(std::uint32_t path) const {
  const Path& one = paths_.at(path);
  if (one.solved_flows == 0) return 0;
  return one.count == 0 ? std::numeric_limits<double>::infinity() : one.level * one.weight;
}

std::span<const FairRates::Hop> FairRates::hops(std::uint32_t path) const {
  const Path& one = paths_.at(path);
  return {hops_.data() + one.first, one.count};
}

std::span<const std::uint32_t> FairRates::solve() {
  joined_.clear();
  solved_.clear();
  apply_changes();
  fill();
  while (grow()) {
    if (joined_.size() > active_.size() / part_of_all) join_all();
    fill();
  }
  for (const std::uint32_t path : joined_) {
    paths_[path].joined = false;
    for (const Hop& hop : hops(path)) use_of(hop).joined = false;
    solved_.push_back(path);
  }
  for (const std::uint32_t link : touched_) links_[link].touched = false;
  touched_.clear();
  return solved_;
}

void FairRates::apply_changes() {
  for (const std::uint32_t number : changed_) {
    Path& path = paths_[number];
    path.changed = false;
    if (path.flows == path.solved_flows) continue;  // as many ended as began
    path.solved_flows = path.flows;
    path.demand = path.weight * path.flows;
    if (path.flows != 0 && !path.active) insert(number);
    if (path.flows == 0 && path.active) erase(number);
    for (const Hop& hop : hops(number)) mark_dirty(hop.link);
    if (path.flows != 0) {
      for (const Hop& hop : hops(number)) use_of(hop).demand = path.demand * hop.share;
      join(number);
    } else {
      path.level = 0;
      solved_.push_back(number);
    }
  }
  changed_.clear();
  for (const std::uint32_t link : dirty_) {
    const bool resized = links_[link].resized;  // less may be too little for paths with another bottleneck
    links_[link].dirty = links_[link].resized = false;
    for (const Use& use : links_[link].uses) {
      if (resized || use.limited) join(use.path);
    }
  }
  dirty_.clear();
}

void FairRates::insert(std::uint32_t path) {
  Path& one = paths_[path];
  one.active = true;
  one.place = static_cast<std::uint32_t>(active_.size());
  active_.push_back(path);
  for (std::uint32_t at = 0; at < one.count; ++at) {
    Hop& hop = hops_[one.first + at];
    std::vector<Use>& uses = links_[hop.link].uses;
    hop.slot = static_cast<std::uint32_t>(uses.size());
    uses.push_back({path, at, 0, 0, false, false, false});
  }
}

void FairRates::erase(std::uint32_t path) {
  Path& one = paths_[path];
  one.active = false;
  active_[one.place] = active_.back();
  paths_[active_.back()].place = one.place;
  active_.pop_back();
  for (std::uint32_t at = 0; at < one.count; ++at) {
    const Hop hop = hops_[one.first + at];
    std::vector<Use>& uses = links_[hop.link].uses;
    const Use last = uses.back();
    uses[hop.slot] = last;
    hops_[paths_[last.path].first + last.hop].slot = hop.slot;
    uses.pop_back();
  }
}

void FairRates::mark_dirty(std::uint32_t link) {
  if (links_[link].dirty) return;
  links_[link].dirty = true;
  dirty_.push_back(link);
}

void FairRates::join(std::uint32_t path) {
  Path& one = paths_[path];
  if (one.joined) return;
  one.joined = true;
  joined_.push_back(path);
  for (const Hop& hop : hops(path)) {
    use_of(hop).joined = true;
    if (links_[hop.link].touched) continue;
    links_[hop.link].touched = true;
    touched_.push_back(hop.link);
  }
}

void FairRates::join_all() {
  for (const std::uint32_t path : active_) join(path);
}

// What a link carries for the paths whose level is known, and what grows on it.
void FairRates::measure(Link& link) {
  link.fixed = link.demand = 0;
  link.open = 0;
  for (const Use& use : link.uses) {
    if (use.open) {
      link.demand += use.demand;
      ++link.open;
    } else {
      link.fixed += use.demand * use.level;
    }
  }
}

// Progressive filling of the paths that joined. The level at which a link is full only rises while others are fixed, so a
// candidate of the heap is a lower bound, and is computed again when it comes up.
void FairRates::fill() {
  for (const std::uint32_t path : joined_) {
    for (const Hop& hop : hops(path)) use_of(hop).open = true;
  }
  heap_.clear();
  for (const std::uint32_t number : touched_) {
    Link& link = links_[number];
    measure(link);
    heap_.push_back({std::max(0.0, link.capacity - link.fixed) / link.demand, number});
  }
  std::make_heap(heap_.begin(), heap_.end());
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    const Candidate candidate = heap_.back();
    heap_.pop_back();
    Link& link = links_[candidate.link];
    if (link.open == 0) continue;
    double level = std::max(0.0, link.capacity - link.fixed) / link.demand;
    if (level <= candidate.level * (1 + tolerance)) {
      measure(link);  // without the rounding of what was taken away
      level = std::max(0.0, link.capacity - link.fixed) / link.demand;
    }
    if (level > candidate.level * (1 + tolerance)) {
      heap_.push_back({level, candidate.link});
      std::push_heap(heap_.begin(), heap_.end());
      continue;
    }
    for (const Use& use : link.uses) {
      if (use.open) fix(use.path, candidate.link, level);
    }
  }
}

void FairRates::fix(std::uint32_t path, std::uint32_t link, double level) {
  Path& one = paths_[path];
  one.level = level;
  for (const Hop& hop : hops(path)) {
    Link& other = links_[hop.link];
    Use& use = other.uses[hop.slot];
    use.open = false;
    use.level = level;
    use.limited = hop.link == link;
    other.fixed += use.demand * level;
    other.demand -= use.demand;
    --other.open;
  }
}

// Whether paths joined, because they or others would not have a bottleneck.
bool FairRates::grow() {
  const std::size_t before = joined_.size();
  const std::size_t links = touched_.size();
  for (std::size_t at = 0; at < links; ++at) {
    const std::uint32_t number = touched_[at];
    const Link& link = links_[number];
    double highest = 0, bound = std::numeric_limits<double>::infinity(), carried = 0;
    for (const Use& use : link.uses) {
      carried += use.demand * use.level;
      highest = std::max(highest, use.level);
      if (use.joined && use.limited) bound = std::min(bound, use.level);
    }
    const bool full = carried >= link.capacity * (1 - tolerance);
    for (const Use& use : link.uses) {
      if (use.joined) continue;
      const bool must_yield = use.level > bound * (1 + tolerance);
      if (must_yield || (use.limited && (!full || use.level < highest * (1 - tolerance)))) join(use.path);
    }
  }
  return joined_.size() > before;
}

}  // namespace ff
