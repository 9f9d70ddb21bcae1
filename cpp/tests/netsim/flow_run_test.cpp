// Engines under random transfers, failures and buffers: all ends, bytes are conserved, and memory is used as it should be.
#include "fireflyer/netsim/flow_run.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "fireflyer/netsim/packet_run.hpp"

namespace {

constexpr double forever = std::numeric_limits<double>::infinity();

// Nodes 0..3 at one switch, vertex 4: link n leads from node n, link 4 + n to it.
struct Star {
  std::vector<double> capacities = std::vector<double>(8, 1e9);
  std::vector<std::int64_t> from{0, 1, 2, 3, 4, 4, 4, 4}, to{4, 4, 4, 4, 0, 1, 2, 3};
};

struct Drawn {
  std::vector<double> nbytes, delay_s, latency_s, shares;
  std::vector<std::int64_t> flow_starts{0}, paths, after_starts{0}, after;
  ff::TransferArrays arrays() const { return {nbytes, delay_s, latency_s, flow_starts, paths, shares, after_starts, after}; }
};

Drawn drawn(std::mt19937& random, std::int64_t paths) {
  Drawn made;
  const auto count = static_cast<std::int64_t>(1 + random() % 40);
  for (std::int64_t transfer = 0; transfer < count; ++transfer) {
    made.nbytes.push_back(static_cast<double>(random() % 1'000'000));
    made.delay_s.push_back(static_cast<double>(random() % 3) * 1e-4);
    made.latency_s.push_back(1e-6);
    for (unsigned flow = 0; flow < 2; ++flow) {
      made.paths.push_back(static_cast<std::int64_t>(random()) % paths);
      made.shares.push_back(0.5);
    }
    made.flow_starts.push_back(static_cast<std::int64_t>(made.paths.size()));
    if (transfer > 0 && random() % 2 == 0) made.after.push_back(static_cast<std::int64_t>(random()) % transfer);
    made.after_starts.push_back(static_cast<std::int64_t>(made.after.size()));
  }
  return made;
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double value : values) total += value;
  return total;
}

void flows_end_and_no_byte_is_lost(unsigned seed) {
  std::mt19937 random(seed);
  const Star star;
  ff::FlowRun run(star.capacities);
  const std::vector<double> shares{1.0, 1.0};
  for (std::uint32_t source = 0; source < 4; ++source) {
    for (std::uint32_t target = 0; target < 4; ++target) run.add_path(std::vector<std::uint32_t>{source, 4 + target}, shares, 1.0 + target);
  }
  const Drawn made = drawn(random, 16);
  run.add_transfers(made.arrays());
  for (int step = 1; step < 5; ++step) {  // some flows lose their path, or take another one
    run.run_until(step * 2e-4);
    for (const std::int64_t flow : run.pending_flows()) run.set_route(static_cast<std::uint32_t>(flow), static_cast<std::int64_t>(random() % 17) - 1);
  }
  run.set_capacity(0, 5e8);
  for (const std::int64_t flow : run.pending_flows()) run.set_route(static_cast<std::uint32_t>(flow), static_cast<std::int64_t>(random() % 16));
  run.run_until(forever);
  for (const double end : run.finish_s()) CHECK(std::isfinite(end));
  CHECK(run.pending_flows().empty());
  CHECK(std::abs(sum(run.path_bytes()) - sum(made.nbytes)) <= 1.0);
}

void packets_end_in_the_smallest_buffers(unsigned seed) {
  std::mt19937 random(seed);
  const Star star;
  ff::PacketRun run(star.capacities, star.from, star.to, {4, 1000, 1000 + 500 * (seed % 3), seed % 3, 1e-7, {1.0, 3.0}});
  for (std::uint32_t source = 0; source < 4; ++source) {
    for (std::uint32_t target = 0; target < 4; ++target) run.add_path(std::vector<std::uint32_t>{source, 4 + target}, random() % 2);
  }
  Drawn made = drawn(random, 16);
  for (std::size_t flow = 1; flow < made.paths.size(); flow += 2) made.paths[flow] = made.paths[flow - 1];  // of the same target
  run.add_transfers(made.arrays());
  run.run();
  for (std::size_t transfer = 0; transfer < made.nbytes.size(); ++transfer) {
    CHECK(std::isfinite(run.finish_s()[transfer]));
    CHECK(run.finish_s()[transfer] - run.start_s()[transfer] >= made.nbytes[transfer] / 1e9);
  }
}

void arrays_that_do_not_fit_are_refused() {
  std::mt19937 random(1);
  for (int wrong = 0; wrong < 7; ++wrong) {
    Drawn made = drawn(random, 1);
    if (wrong == 0) made.paths[0] = 1;
    if (wrong == 1) made.delay_s.pop_back();
    if (wrong == 2) made.flow_starts.back() += 1;
    if (wrong == 3) made.after.push_back(0);
    if (wrong == 4) made.delay_s[0] = std::nan("");
    if (wrong == 5) made.latency_s[0] = forever;
    if (wrong == 6) made.nbytes[0] = -1;
    ff::FlowRun run({1.0});
    run.add_path(std::vector<std::uint32_t>{0}, std::vector<double>{1.0}, 1.0);
    bool refused = false;
    try {
      run.add_transfers(made.arrays());
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

void paths_that_lead_nowhere_are_refused() {
  ff::PacketRun run({1e9, 1e9}, std::vector<std::int64_t>{0, 2}, std::vector<std::int64_t>{2, 1}, {2, 1000, 1000, 0, 0, {1.0}});
  run.add_path(std::vector<std::uint32_t>{0, 1}, 0);
  bool refused = false;
  try {
    run.add_path(std::vector<std::uint32_t>{0}, 0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 60; ++seed) {
    flows_end_and_no_byte_is_lost(seed);
    packets_end_in_the_smallest_buffers(seed);
  }
  arrays_that_do_not_fit_are_refused();
  paths_that_lead_nowhere_are_refused();
}
