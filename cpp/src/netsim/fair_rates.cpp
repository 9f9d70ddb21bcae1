#include "fireflyer/netsim/fair_rates.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace ff {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
// Rounding: what differs by less counts as equal. Each level is computed of the state itself, so that errors do not add up.
constexpr double tolerance = 1e-12;
// Of the paths with flows, one in so many: where more change, all links are filled from zero.
constexpr std::size_t part_of_all = 4;
// Of its capacity: a link with more to spare is not full, whatever rounding there was.
constexpr double margin = 1e-9;
// Far more often than each link is looked at after a change.
constexpr std::uint64_t visits_of_link = 64;

bool same(double level, double before) { return level == before || (std::isfinite(before) && std::abs(level - before) <= before * tolerance); }

}  // namespace

FairRates::FairRates(std::vector<double> capacities) {
  links_.resize(capacities.size());
  for (std::size_t link = 0; link < capacities.size(); ++link) {
    if (!(capacities[link] > 0) || !std::isfinite(capacities[link])) throw std::invalid_argument("capacities are above 0 and finite");
    links_[link].capacity = capacities[link];
  }
  levels_.assign(links_.size(), infinity);
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
  path.weight = weight;
  if (links.size() >= none - hops_.size()) throw std::invalid_argument("too many links of paths");
  for (const std::uint32_t link : links) hops_.push_back({link, 0});
  shares_.insert(shares_.end(), shares.begin(), shares.end());
  starts_.push_back(static_cast<std::uint32_t>(hops_.size()));
  paths_.push_back(path);
  limits_.push_back(none);
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
  mark(link);
}

double FairRates::rate(std::uint32_t path) const {
  const Path& one = paths_.at(path);
  if (one.solved_flows == 0) return 0;
  return hops(path).empty() ? infinity : levels_[limits_[path]] * one.weight;
}

std::uint64_t FairRates::solve() {
  for (const std::uint32_t link : changed_links_) links_[link].changed = false;
  for (const std::uint32_t path : moved_paths_) paths_[path].moved = false;
  changed_links_.clear();
  moved_paths_.clear();
  computed_ = 0;
  const bool many = apply_changes();
  if (many || !follow()) fill_all();
  return computed_;
}

// Whether so many paths changed that all links are filled from zero.
bool FairRates::apply_changes() {
  std::size_t count = 0;
  for (const std::uint32_t number : changed_) {
    Path& path = paths_[number];
    path.changed = false;
    if (path.flows == path.solved_flows) continue;  // as many ended as began
    ++count;
    if (path.solved_flows == 0) insert(number);
    if (path.flows == 0) erase(number);
    path.solved_flows = path.flows;
    for (std::uint32_t at = starts_[number]; at < starts_[number + 1]; ++at) {
      const Hop hop = hops_[at];
      mark(hop.link);
      if (path.flows != 0) links_[hop.link].uses[hop.slot].demand = path.weight * path.flows * shares_[at];
    }
  }
  changed_.clear();
  return count > active_.size() / part_of_all;
}

void FairRates::insert(std::uint32_t path) {
  Path& one = paths_[path];
  one.place = static_cast<std::uint32_t>(active_.size());
  active_.push_back(path);
  for (std::uint32_t at = starts_[path]; at < starts_[path + 1]; ++at) {
    Hop& hop = hops_[at];
    std::vector<Use>& uses = links_[hop.link].uses;
    hop.slot = static_cast<std::uint32_t>(uses.size());
    uses.push_back({path, at - starts_[path], 0, 0, infinity});
  }
  if (!hops(path).empty()) set_limit(path, limit_of(path));
}

void FairRates::erase(std::uint32_t path) {
  Path& one = paths_[path];
  active_[one.place] = active_.back();
  paths_[active_.back()].place = one.place;
  active_.pop_back();
  for (const Hop hop : hops(path)) {
    std::vector<Use>& uses = links_[hop.link].uses;
    const Use last = uses.back();
    uses[hop.slot] = last;
    hops_[starts_[last.path] + last.hop].slot = hop.slot;
    uses.pop_back();
  }
  set_limit(path, none);
}

void FairRates::mark(std::uint32_t link) {
  if (links_[link].dirty) return;
  links_[link].dirty = true;
  heap_.push_back({levels_[link], link});
  std::push_heap(heap_.begin(), heap_.end());
}

// Without an end only where rounding makes two links change each other for ever: false, and they are filled from zero.
bool FairRates::follow() {
  const std::uint64_t most = visits_of_link * (links_.size() + 1);
  while (!heap_.empty()) {
    if (++computed_ > most) return false;
    const std::uint32_t link = heap_.front().link;
    std::pop_heap(heap_.begin(), heap_.end());
    heap_.pop_back();
    links_[link].dirty = false;
    const double level = level_of(link);
    if (!same(level, levels_[link])) set_level(link, level);
  }
  return true;
}

// At which the paths of a link fill it, each taking no more than its other links leave; infinite if they do not. The limit
// of a path tells what those leave, unless it is this link: then no less than its level, and the others are looked at
// only if it rises.
double FairRates::level_of(std::uint32_t link) {
  Link& one = links_[link];
  double fixed = 0, demand = 0, highest = 0;
  for (const Use& use : one.uses) {
    if (use.limited) {
      demand += use.demand;
    } else {
      fixed += use.demand * use.level;
      highest = std::max(highest, use.level);
    }
  }
  one.spare = 0;
  if (demand == 0 && fixed <= one.capacity * (1 + tolerance)) {
    one.spare = one.capacity - fixed;
    return infinity;
  }
  bounds_.clear();
  const double level = demand == 0 ? 0 : (one.capacity - fixed) / demand;
  if (level >= highest * (1 - tolerance) && demand != 0) {
    if (level <= levels_[link] * (1 + tolerance)) return level;
    for (const Use& use : one.uses) {
      if (use.limited) bounds_.push_back({elsewhere(use.path, link), use.demand});
    }
    return filled(one.capacity - fixed, level);
  }
  double all = 0;
  for (const Use& use : one.uses) {
    bounds_.push_back({use.limited ? elsewhere(use.path, link) : use.level, use.demand});
    all += use.demand;
  }
  return filled(one.capacity, one.capacity / all);
}

// The level at which `bounds_` take that much; `level` is where they would if none of them had a lower one. It rises as
// more of them are known to take less.
double FairRates::filled(double capacity, double level) const {
  for (std::size_t lower = 0;;) {
    double fixed = 0, demand = 0;
    std::size_t count = 0;
    for (const Bound& bound : bounds_) {
      if (bound.level < level) {
        fixed += bound.demand * bound.level;
        ++count;
      } else {
        demand += bound.demand;
      }
    }
    if (count == bounds_.size()) return infinity;
    if (count == lower) return level;
    lower = count;
    level = std::max(level, (capacity - fixed) / demand);
  }
}

std::uint32_t FairRates::limit_of(std::uint32_t path) const {
  const std::span<const Hop> all = hops(path);
  std::uint32_t found = all.front().link;
  for (const Hop& hop : all) {
    if (levels_[hop.link] < levels_[found]) found = hop.link;
  }
  return found;
}

// The lowest level of the other links of a path.
double FairRates::elsewhere(std::uint32_t path, std::uint32_t link) const {
  double found = infinity;
  for (const Hop& hop : hops(path)) {
    if (hop.link != link) found = std::min(found, levels_[hop.link]);
  }
  return found;
}

// The links that are higher than what a path was, or is, given here depend on it.
void FairRates::set_level(std::uint32_t link, double level) {
  const double before = std::exchange(levels_[link], level);
  const double lower = std::min(before, level);
  note_change(link);
  for (const Use& use : links_[link].uses) {
    if (!use.limited && use.level <= level) continue;
    std::uint32_t lowest = link;
    for (const Hop& hop : hops(use.path)) {
      if (levels_[hop.link] < levels_[lowest]) lowest = hop.link;
    }
    const double rise = levels_[lowest] - use.level;
    for (const Hop& hop : hops(use.path)) {
      if (hop.link != link && levels_[hop.link] > lower) mark_neighbor(hop, rise);
    }
    set_limit(use.path, lowest);
  }
}

// After the level of a path of it rose by so much. A link that is not full has no level that it could change, until that
// may have filled it.
void FairRates::mark_neighbor(const Hop& hop, double rise) {
  Link& link = links_[hop.link];
  if (levels_[hop.link] == infinity) {
    link.spare -= link.uses[hop.slot].demand * rise;
    if (link.spare > link.capacity * margin) return;
  }
  mark(hop.link);
}

// With the level that it has now.
void FairRates::set_limit(std::uint32_t path, std::uint32_t link) {
  if (link != none) {
    for (const Hop& hop : hops(path)) {
      Use& use = links_[hop.link].uses[hop.slot];
      use.level = levels_[link];
      use.limited = hop.link == link;
    }
  }
  if (limits_[path] == link) return;
  limits_[path] = link;
  if (std::exchange(paths_[path].moved, true)) return;
  moved_paths_.push_back(path);
}

void FairRates::note_change(std::uint32_t link) {
  if (std::exchange(links_[link].changed, true)) return;
  changed_links_.push_back(link);
}

// By progressive filling. The level at which a link is full only rises while that of others gets known, so a candidate of
// the heap is a lower bound, and is computed again when it comes up.
void FairRates::fill_all() {
  for (const std::uint32_t path : active_) {
    for (const Hop& hop : hops(path)) mark(hop.link);
  }
  for (Candidate& candidate : heap_) {
    Link& link = links_[candidate.link];
    levels_[candidate.link] = infinity;
    note_change(candidate.link);
    link.dirty = false;
    link.spare = 0;
    for (Use& use : link.uses) use.level = infinity;
    candidate.level = measured(candidate.link);
  }
  computed_ += heap_.size();
  std::make_heap(heap_.begin(), heap_.end());
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    const Candidate candidate = heap_.back();
    heap_.pop_back();
    const double level = measured(candidate.link);
    if (level == infinity) continue;
    if (level > candidate.level * (1 + tolerance)) {
      heap_.push_back({level, candidate.link});
      std::push_heap(heap_.begin(), heap_.end());
    } else {
      levels_[candidate.link] = level;
      for (const Use& use : links_[candidate.link].uses) {
        if (use.level == infinity) set_limit(use.path, candidate.link);
      }
    }
  }
}

// The level at which a link is full if its open paths get no less anywhere else; infinite without such paths.
double FairRates::measured(std::uint32_t link) const {
  double fixed = 0, demand = 0;
  for (const Use& use : links_[link].uses) {
    if (use.level == infinity) {
      demand += use.demand;
    } else {
      fixed += use.demand * use.level;
    }
  }
  return demand == 0 ? infinity : std::max(0.0, links_[link].capacity - fixed) / demand;
}

}  // namespace ff
