// Rates that are solved where a change reaches are those of a solver that starts anew, over random networks and changes.
#include "fireflyer/netsim/fair_rates.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"

namespace {

struct Described {
  std::vector<std::uint32_t> links;
  std::vector<double> shares;
  double weight;
  std::uint32_t flows;
};

std::vector<double> solved_anew(const std::vector<double>& capacities, const std::vector<Described>& paths) {
  ff::FairRates rates(capacities);
  std::vector<double> found;
  for (const Described& path : paths) rates.set_flows(rates.add_path(path.links, path.shares, path.weight), path.flows);
  rates.solve();
  for (std::uint32_t path = 0; path < paths.size(); ++path) found.push_back(rates.rate(path));
  return found;
}

// The definition: no link carries more than it can, each path has a full link on which no path has a higher level.
void check_fair(const std::vector<double>& capacities, const std::vector<Described>& paths, const std::vector<double>& rates) {
  std::vector<double> carried(capacities.size(), 0.0), highest(capacities.size(), 0.0);
  for (std::size_t path = 0; path < paths.size(); ++path) {
    for (std::size_t hop = 0; hop < paths[path].links.size(); ++hop) {
      const std::uint32_t link = paths[path].links[hop];
      carried[link] += paths[path].shares[hop] * paths[path].flows * rates[path];
      highest[link] = std::max(highest[link], rates[path] / paths[path].weight);
    }
  }
  for (std::size_t link = 0; link < capacities.size(); ++link) CHECK(carried[link] <= capacities[link] * (1 + 1e-9));
  for (std::size_t path = 0; path < paths.size(); ++path) {
    if (paths[path].flows == 0) continue;
    CHECK(std::any_of(paths[path].links.begin(), paths[path].links.end(), [&](std::uint32_t link) {
      return carried[link] >= capacities[link] * (1 - 1e-9) && rates[path] / paths[path].weight >= highest[link] * (1 - 1e-9);
    }));
  }
}

void changes_of_a_network(unsigned seed) {
  std::mt19937 random(seed);
  const auto drawn = [&](std::uint32_t most) { return static_cast<std::uint32_t>(random() % most); };
  std::vector<double> capacities(1 + drawn(30));
  for (double& capacity : capacities) capacity = 1.0 + drawn(5);
  ff::FairRates rates(capacities);
  std::vector<Described> paths;
  for (int step = 0; step < 60; ++step) {
    if (paths.empty() || drawn(3) == 0) {
      Described path{{}, {}, drawn(2) == 0 ? 1.0 : 2.5, 0};
      for (std::uint32_t link = 0; link < capacities.size(); ++link) {
        if (drawn(static_cast<std::uint32_t>(capacities.size())) < 3) path.links.push_back(link);
      }
      if (path.links.empty()) path.links.push_back(0);
      for (std::size_t hop = 0; hop < path.links.size(); ++hop) path.shares.push_back(drawn(2) == 0 ? 1.0 : 0.25);
      CHECK(rates.add_path(path.links, path.shares, path.weight) == paths.size());
      paths.push_back(path);
    }
    if (drawn(5) == 0) {
      const std::uint32_t link = drawn(static_cast<std::uint32_t>(capacities.size()));
      rates.set_capacity(link, capacities[link] = 0.5 + drawn(8));
    }
    const std::uint32_t path = drawn(static_cast<std::uint32_t>(paths.size()));
    rates.set_flows(path, paths[path].flows = drawn(4));
    rates.solve();
    const std::vector<double> anew = solved_anew(capacities, paths);
    for (std::uint32_t one = 0; one < paths.size(); ++one) CHECK(std::abs(rates.rate(one) - anew[one]) <= 1e-9 * anew[one]);
    check_fair(capacities, paths, anew);
  }
}

template <class Call>
bool refused(Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void what_is_no_network_is_refused() {
  CHECK(refused([] { ff::FairRates rates({1.0, 0.0}); }));
  ff::FairRates rates({1.0, 1.0});
  const std::vector<double> one{1.0}, two{1.0, 1.0};
  CHECK(refused([&] { rates.add_path(std::vector<std::uint32_t>{2}, one, 1.0); }));
  CHECK(refused([&] { rates.add_path(std::vector<std::uint32_t>{0, 0}, two, 1.0); }));
  CHECK(refused([&] { rates.add_path(std::vector<std::uint32_t>{0}, two, 1.0); }));
  CHECK(refused([&] { rates.add_path(std::vector<std::uint32_t>{0}, one, 0.0); }));
  CHECK(refused([&] { rates.set_capacity(0, -1.0); }));
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 100; ++seed) changes_of_a_network(seed);
  what_is_no_network_is_refused();
}
