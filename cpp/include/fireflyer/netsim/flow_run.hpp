// Transfers to their end at max-min fair rates: a fluid model. Not for use by several threads at once.
//
// A transfer begins `delay_s` after the last of those that it is after has ended, or after the beginning, and its bytes
// flow from `latency_s` later on. It ends with the last of its flows; without flows at once. All flows of a path have the
// same rate, so a path keeps the bytes that each of its flows could have sent since the path was last empty, its *service*:
// a flow ends when the service has grown by its bytes. And all paths with the same limit have its level, so a link keeps
// the service of a path of weight 1. A change of its level then costs the same for one path as for many.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "fireflyer/netsim/fair_rates.hpp"
#include "fireflyer/netsim/transfers.hpp"

namespace ff {

class FlowRun {
 public:
  explicit FlowRun(std::vector<double> capacities) : rates_(std::move(capacities)), groups_(rates_.links()) {}

  std::uint32_t add_path(std::span<const std::uint32_t> links, std::span<const double> shares, double weight);

  // Once, before the first run. Throws std::invalid_argument for arrays that do not fit each other.
  void add_transfers(const TransferArrays& arrays);

  // Until then, or to the end of all that can end.
  void run_until(double time_s);

  // From now on, with the bytes that it has not sent yet; -1: it waits. Throws std::out_of_range.
  void set_route(std::uint32_t flow, std::int64_t path);
  void set_capacity(std::uint32_t link, double capacity);

  // Flows that have not ended, of transfers that have begun or not.
  std::vector<std::int64_t> pending_flows() const;

  const std::vector<double>& start_s() const { return start_s_; }
  // Infinite for what has not ended.
  const std::vector<double>& finish_s() const { return finish_s_; }
  // That the flows of each path have sent; of those under way only what they sent over a path that they have left.
  std::vector<double> path_bytes() const;
  std::uint64_t events() const { return events_; }

 private:
  struct Ending {
    double service;
    std::uint32_t flow;
    bool operator<(const Ending& other) const { return service > other.service || (service == other.service && flow > other.flow); }
  };
  struct Progress {              // of a path
    double service = 0;          // as of the time when its group had the service `seen`
    double seen = 0;
    double carried = 0;          // bytes of flows that have left
    std::vector<Ending> ending;  // a heap; entries of flows that left for another path stay until they come up
    std::uint32_t open = 0;
    std::uint32_t group = FairRates::none;
    std::uint32_t place = FairRates::none;  // among the paths of the group
  };
  struct Completion {  // of the next flow of a path
    double service;    // of its group
    std::uint32_t path;
    bool operator<(const Completion& other) const { return service < other.service || (service == other.service && path < other.path); }
  };
  struct Group {  // the paths with flows whose limit is this link
    double service = 0, since_s = 0, level = 0;
    std::vector<Completion> paths;  // a heap
    std::uint32_t place = FairRates::none;  // in the queue of groups
    double finish_s = 0;
  };
  struct Flow {
    std::uint32_t transfer = 0;
    std::int64_t path = -1;
    double left = 0;      // bytes, as of the time when the path took it
    double entered = 0;   // service of the path at that time
    enum class State : std::uint8_t {
      waiting,
      open,
      ended
    } state = State::waiting;
  };
  struct Start {
    double time_s;
    std::uint32_t transfer;
    bool operator<(const Start& other) const { return time_s > other.time_s || (time_s == other.time_s && transfer > other.transfer); }
  };

  void begin(std::uint32_t transfer);
  void open(std::uint32_t transfer);
  void finish(std::uint32_t transfer);
  void enter(std::uint32_t flow);
  void leave(std::uint32_t flow);
  void drop_gone(Progress& progress, std::uint32_t path);
  void end_flows(std::uint32_t path);
  void advance(Group& group) const;
  void advance(Progress& progress, std::uint32_t path);
  void update_rates();
  bool due(double time_s) const;
  void place(std::uint32_t path);
  void remove(std::uint32_t path);
  void schedule(std::uint32_t group);

  FairRates rates_;
  std::vector<Group> groups_;  // of each link
  std::vector<Progress> progress_;
  std::vector<Flow> flows_;
  Dependencies dependencies_;
  std::vector<std::uint64_t> flow_starts_;
  std::vector<std::uint32_t> open_flows_;
  std::vector<double> delay_s_, latency_s_, start_s_, finish_s_;
  std::vector<Start> starts_;               // a heap
  std::vector<std::uint32_t> queue_;        // groups, a heap by the end of their next flow
  double now_s_ = 0;
  std::uint64_t events_ = 0;
  bool begun_ = false;
};

}  // namespace ff
