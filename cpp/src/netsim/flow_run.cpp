#include "fireflyer/netsim/flow_run.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <utility>

namespace ff {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double no_bytes = 1e-6;      // less than one, more than what rounding leaves
constexpr double same_time = 1e-13;    // relative: events that differ by less happen together
constexpr std::size_t arity = 4;       // of heaps whose entries know their places

void check(bool fits, const char* words) {
  if (!fits) throw std::invalid_argument(words);
}

// Puts the entry at `place` of a heap where it belongs, the lowest being the first. `put` is told of each new place.
template <class Entry, class Before, class Put>
void sift(std::vector<Entry>& heap, std::size_t place, Before before, Put put) {
  const Entry moving = heap[place];
  const auto set = [&](std::size_t at, const Entry& entry) {
    heap[at] = entry;
    put(entry, static_cast<std::uint32_t>(at));
  };
  for (; place > 0 && before(moving, heap[(place - 1) / arity]); place = (place - 1) / arity) set(place, heap[(place - 1) / arity]);
  while (true) {
    const std::size_t first = place * arity + 1, last = std::min(first + arity, heap.size());
    if (first >= last) break;
    std::size_t least = first;
    for (std::size_t child = first + 1; child < last; ++child) {
      if (before(heap[child], heap[least])) least = child;
    }
    if (!before(heap[least], moving)) break;
    set(place, heap[least]);
    place = least;
  }
  set(place, moving);
}

template <class Entry, class Before, class Put>
void remove_from(std::vector<Entry>& heap, std::size_t place, Before before, Put put) {
  heap[place] = heap.back();
  heap.pop_back();
  if (place < heap.size()) sift(heap, place, before, put);
}

}  // namespace

std::uint32_t FlowRun::add_path(std::span<const std::uint32_t> links, std::span<const double> shares, double weight) {
  check(!links.empty(), "a path has at least one link");
  const std::uint32_t path = rates_.add_path(links, shares, weight);
  progress_.emplace_back();
  return path;
}

void FlowRun::add_transfers(const TransferArrays& arrays) {
  check(start_s_.empty() && !begun_, "transfers are given once");
  arrays.check(progress_.size());
  const std::size_t count = arrays.nbytes.size();
  dependencies_ = Dependencies(arrays);
  flow_starts_.assign(arrays.flow_starts.begin(), arrays.flow_starts.end());
  flows_.resize(arrays.flow_paths.size());
  delay_s_.assign(arrays.delay_s.begin(), arrays.delay_s.end());
  latency_s_.assign(arrays.latency_s.begin(), arrays.latency_s.end());
  start_s_.assign(count, infinity);
  finish_s_.assign(count, infinity);
  open_flows_.assign(count, 0);
  for (std::size_t transfer = 0; transfer < count; ++transfer) {
    for (std::uint64_t flow = flow_starts_[transfer]; flow < flow_starts_[transfer + 1]; ++flow) {
      flows_[flow].transfer = static_cast<std::uint32_t>(transfer);
      flows_[flow].path = arrays.flow_paths[flow];
      flows_[flow].left = arrays.nbytes[transfer] * arrays.flow_shares[flow];
    }
  }
}

bool FlowRun::due(double time_s) const { return time_s <= now_s_ * (1 + same_time); }

void FlowRun::run_until(double time_s) {
  if (!begun_) {
    begun_ = true;
    for (const std::uint32_t transfer : dependencies_.first()) begin(transfer);
  }
  update_rates();  // of what was routed anew
  while (true) {
    const double start_s = starts_.empty() ? infinity : starts_.front().time_s;
    const double end_s = queue_.empty() ? infinity : groups_[queue_.front()].finish_s;
    const double next_s = std::min(start_s, end_s);
    if (next_s == infinity || next_s > time_s) break;
    now_s_ = std::max(now_s_, next_s);
    ++events_;
    while (!queue_.empty() && due(groups_[queue_.front()].finish_s)) end_flows(groups_[queue_.front()].paths.front().path);
    while (!starts_.empty() && due(starts_.front().time_s)) {
      const std::uint32_t transfer = starts_.front().transfer;
      std::pop_heap(starts_.begin(), starts_.end());
      starts_.pop_back();
      open(transfer);
    }
    update_rates();
  }
  if (time_s != infinity) now_s_ = std::max(now_s_, time_s);
}

// All that it is after has ended.
void FlowRun::begin(std::uint32_t transfer) {
  start_s_[transfer] = now_s_ + delay_s_[transfer];
  starts_.push_back({start_s_[transfer] + latency_s_[transfer], transfer});
  std::push_heap(starts_.begin(), starts_.end());
}

void FlowRun::open(std::uint32_t transfer) {
  const std::uint64_t first = flow_starts_[transfer], last = flow_starts_[transfer + 1];
  for (std::uint64_t flow = first; flow < last; ++flow) {
    if (flows_[flow].left > 0) {
      ++open_flows_[transfer];
    } else {
      flows_[flow].state = Flow::State::ended;
    }
  }
  if (open_flows_[transfer] == 0) {
    finish(transfer);
    return;
  }
  for (std::uint64_t flow = first; flow < last; ++flow) {
    if (flows_[flow].state == Flow::State::ended) continue;
    flows_[flow].state = Flow::State::open;
    if (flows_[flow].path >= 0) enter(static_cast<std::uint32_t>(flow));
  }
}

void FlowRun::finish(std::uint32_t transfer) {
  finish_s_[transfer] = now_s_;
  dependencies_.finished(transfer, [&](std::uint32_t follower) { begin(follower); });
}

void FlowRun::advance(Group& group) const {
  if (group.since_s >= now_s_) return;  // the level is infinite while paths leave for another limit
  group.service += group.level * (now_s_ - group.since_s);
  group.since_s = now_s_;
}

void FlowRun::advance(Progress& progress, std::uint32_t path) {
  if (progress.place == FairRates::none) return;
  Group& group = groups_[progress.group];
  advance(group);
  progress.service += rates_.weight(path) * (group.service - progress.seen);
  progress.seen = group.service;
}

void FlowRun::enter(std::uint32_t flow) {
  Flow& one = flows_[flow];
  const auto path = static_cast<std::uint32_t>(one.path);
  Progress& progress = progress_[path];
  if (progress.open == 0) {
    progress.service = 0;  // keeps it small, and exact
    progress.ending.clear();
  }
  advance(progress, path);
  one.entered = progress.service;
  progress.ending.push_back({progress.service + one.left, flow});
  std::push_heap(progress.ending.begin(), progress.ending.end());
  rates_.set_flows(path, ++progress.open);
  place(path);
}

// To another path, with what is left of it.
void FlowRun::leave(std::uint32_t flow) {
  Flow& one = flows_[flow];
  const auto path = static_cast<std::uint32_t>(one.path);
  Progress& progress = progress_[path];
  advance(progress, path);
  const double sent = std::min(one.left, progress.service - one.entered);
  progress.carried += sent;
  one.left -= sent;
  one.path = -1;
  rates_.set_flows(path, --progress.open);
  drop_gone(progress, path);
  place(path);
}

void FlowRun::drop_gone(Progress& progress, std::uint32_t path) {
  // A flow that left may have come back: then it has a later entry that counts.
  const auto gone = [&](const Ending& entry) {
    const Flow& flow = flows_[entry.flow];
    return flow.state != Flow::State::open || flow.path != static_cast<std::int64_t>(path) || entry.service != flow.entered + flow.left;
  };
  while (!progress.ending.empty() && gone(progress.ending.front())) {
    std::pop_heap(progress.ending.begin(), progress.ending.end());
    progress.ending.pop_back();
  }
}

// Those of the path that are due; at least one is.
void FlowRun::end_flows(std::uint32_t path) {
  Progress& progress = progress_[path];
  advance(progress, path);
  const double rate = rates_.weight(path) * groups_[progress.group].level;
  const double until = progress.service + std::max(no_bytes, rate * now_s_ * same_time);
  bool first = true;
  while (!progress.ending.empty() && (first || progress.ending.front().service <= until)) {
    const std::uint32_t number = progress.ending.front().flow;
    std::pop_heap(progress.ending.begin(), progress.ending.end());
    progress.ending.pop_back();
    Flow& flow = flows_[number];
    progress.carried += flow.left;
    flow.left = 0;
    flow.state = Flow::State::ended;
    --progress.open;
    first = false;
    drop_gone(progress, path);
    if (--open_flows_[flow.transfer] == 0) finish(flow.transfer);
  }
  rates_.set_flows(path, progress.open);
  place(path);
}

void FlowRun::update_rates() {
  rates_.solve();
  for (const std::uint32_t link : rates_.changed_links()) {
    Group& group = groups_[link];
    advance(group);
    group.level = group.paths.empty() ? 0 : rates_.level(link);
  }
  for (const std::uint32_t path : rates_.moved_paths()) {
    Progress& progress = progress_[path];
    advance(progress, path);
    remove(path);
    progress.group = rates_.limit(path);
    if (progress.open != 0) place(path);
  }
  for (const std::uint32_t link : rates_.changed_links()) schedule(link);
}

// Where it belongs in its group, if that is known and it has flows: or update_rates() does so.
void FlowRun::place(std::uint32_t path) {
  Progress& progress = progress_[path];
  if (progress.group == FairRates::none) return;
  if (progress.open == 0) return remove(path);
  Group& group = groups_[progress.group];
  if (progress.place == FairRates::none) {
    if (group.paths.empty()) group = {0, now_s_, rates_.level(progress.group), std::move(group.paths), group.place, 0};
    advance(group);
    progress.seen = group.service;
    progress.place = static_cast<std::uint32_t>(group.paths.size());
    group.paths.push_back({});
  }
  const double left = std::max(0.0, progress.ending.front().service - progress.service);
  group.paths[progress.place] = {progress.seen + left / rates_.weight(path), path};
  sift(group.paths, progress.place, std::less<>(), [&](const Completion& one, std::uint32_t at) { progress_[one.path].place = at; });
  schedule(progress.group);
}

void FlowRun::remove(std::uint32_t path) {
  Progress& progress = progress_[path];
  if (progress.place == FairRates::none) return;
  const std::uint32_t place = std::exchange(progress.place, FairRates::none);
  remove_from(groups_[progress.group].paths, place, std::less<>(), [&](const Completion& one, std::uint32_t at) { progress_[one.path].place = at; });
  schedule(progress.group);
}

// Where it belongs in the queue, if it has paths.
void FlowRun::schedule(std::uint32_t number) {
  Group& group = groups_[number];
  // The number decides between equal times, so that the order of events is always the same.
  const auto before = [&](std::uint32_t a, std::uint32_t b) {
    return groups_[a].finish_s < groups_[b].finish_s || (groups_[a].finish_s == groups_[b].finish_s && a < b);
  };
  const auto put = [&](std::uint32_t one, std::uint32_t at) { groups_[one].place = at; };
  if (group.paths.empty()) {
    if (group.place != FairRates::none) remove_from(queue_, std::exchange(group.place, FairRates::none), before, put);
    return;
  }
  group.finish_s = group.since_s + std::max(0.0, group.paths.front().service - group.service) / group.level;
  if (group.place == FairRates::none) {
    group.place = static_cast<std::uint32_t>(queue_.size());
    queue_.push_back(number);
  }
  sift(queue_, group.place, before, put);
}

void FlowRun::set_route(std::uint32_t flow, std::int64_t path) {
  Flow& one = flows_.at(flow);
  if (path < -1 || path >= static_cast<std::int64_t>(progress_.size())) throw std::out_of_range("no such path");
  if (one.path == path || one.state == Flow::State::ended) return;
  const bool open = one.state == Flow::State::open;
  if (open && one.path >= 0) leave(flow);
  one.path = path;
  if (open && path >= 0) enter(flow);
}

void FlowRun::set_capacity(std::uint32_t link, double capacity) { rates_.set_capacity(link, capacity); }

std::vector<std::int64_t> FlowRun::pending_flows() const {
  std::vector<std::int64_t> found;
  for (std::size_t flow = 0; flow < flows_.size(); ++flow) {
    if (flows_[flow].state != Flow::State::ended) found.push_back(static_cast<std::int64_t>(flow));
  }
  return found;
}

std::vector<double> FlowRun::path_bytes() const {
  std::vector<double> found;
  found.reserve(progress_.size());
  for (const Progress& progress : progress_) found.push_back(progress.carried);
  return found;
}

}  // namespace ff
