#include "fireflyer/netsim/flow_run.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace ff {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double no_bytes = 1e-6;      // less than one, more than what rounding leaves
constexpr double same_time = 1e-13;    // relative: events that differ by less happen together
constexpr std::uint32_t arity = 4;     // of the heap of completions

void check(bool fits, const char* words) {
  if (!fits) throw std::invalid_argument(words);
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
    const double end_s = completions_.empty() ? infinity : progress_[completions_.front()].finish_s;
    const double next_s = std::min(start_s, end_s);
    if (next_s == infinity || next_s > time_s) break;
    now_s_ = std::max(now_s_, next_s);
    ++events_;
    while (!completions_.empty() && due(progress_[completions_.front()].finish_s)) end_flows(completions_.front());
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

void FlowRun::advance(Progress& progress) const {
  progress.service += progress.rate * (now_s_ - progress.since_s);
  progress.since_s = now_s_;
}

void FlowRun::enter(std::uint32_t flow) {
  Flow& one = flows_[flow];
  const auto path = static_cast<std::uint32_t>(one.path);
  Progress& progress = progress_[path];
  if (progress.open == 0) {
    progress.service = 0;  // keeps it small, and exact
    progress.ending.clear();
    progress.since_s = now_s_;
  }
  advance(progress);
  one.entered = progress.service;
  progress.ending.push_back({progress.service + one.left, flow});
  std::push_heap(progress.ending.begin(), progress.ending.end());
  rates_.set_flows(path, ++progress.open);
  if (progress.rate > 0) schedule(path);
}

// To another path, with what is left of it.
void FlowRun::leave(std::uint32_t flow) {
  Flow& one = flows_[flow];
  const auto path = static_cast<std::uint32_t>(one.path);
  Progress& progress = progress_[path];
  advance(progress);
  const double sent = std::min(one.left, progress.service - one.entered);
  progress.carried += sent;
  one.left -= sent;
  one.path = -1;
  rates_.set_flows(path, --progress.open);
  drop_gone(progress, path);
  if (progress.open == 0) {
    unschedule(path);
  } else {
    schedule(path);
  }
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
  advance(progress);
  const double until = progress.service + std::max(no_bytes, progress.rate * now_s_ * same_time);
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
  if (progress.open == 0) {
    unschedule(path);
  } else {
    schedule(path);
  }
}

void FlowRun::update_rates() {
  for (const std::uint32_t path : rates_.solve()) {
    Progress& progress = progress_[path];
    const double rate = rates_.rate(path);
    if (rate == progress.rate && progress.place != FairRates::none) continue;
    advance(progress);
    progress.rate = rate;
    if (progress.open != 0) schedule(path);
  }
}

void FlowRun::schedule(std::uint32_t path) {
  Progress& progress = progress_[path];
  if (progress.rate <= 0) return unschedule(path);
  progress.finish_s = progress.since_s + std::max(0.0, progress.ending.front().service - progress.service) / progress.rate;
  if (progress.place == FairRates::none) {
    progress.place = static_cast<std::uint32_t>(completions_.size());
    completions_.push_back(path);
  }
  sift(progress.place);
}

void FlowRun::unschedule(std::uint32_t path) {
  const std::uint32_t place = progress_[path].place;
  if (place == FairRates::none) return;
  progress_[path].place = FairRates::none;
  const std::uint32_t last = completions_.back();
  completions_.pop_back();
  if (last == path) return;
  completions_[place] = last;
  progress_[last].place = place;
  sift(place);
}

void FlowRun::sift(std::uint32_t place) {
  const std::uint32_t path = completions_[place];
  // The number decides between equal times, so that the order of events is always the same.
  const auto before = [&](std::uint32_t a, std::uint32_t b) {
    return progress_[a].finish_s < progress_[b].finish_s || (progress_[a].finish_s == progress_[b].finish_s && a < b);
  };
  const auto put = [&](std::uint32_t at, std::uint32_t one) {
    completions_[at] = one;
    progress_[one].place = at;
  };
  while (place > 0 && before(path, completions_[(place - 1) / arity])) {
    put(place, completions_[(place - 1) / arity]);
    place = (place - 1) / arity;
  }
  while (true) {
    const std::uint64_t first = std::uint64_t{place} * arity + 1;
    const std::uint64_t last = std::min<std::uint64_t>(first + arity, completions_.size());
    std::uint32_t least = place;
    for (std::uint64_t child = first; child < last; ++child) {
      if (before(completions_[child], least == place ? path : completions_[least])) least = static_cast<std::uint32_t>(child);
    }
    if (least == place) break;
    put(place, completions_[least]);
    place = least;
  }
  put(place, path);
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
