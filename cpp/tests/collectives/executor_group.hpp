// Ranks that are threads of the test: executors of several nodes in one process, joined as `rendezvous` joins them.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fireflyer/collectives/executor.hpp"

inline constexpr std::int64_t second = 1'000'000'000;

using Ranks = std::vector<std::unique_ptr<ff::Executor>>;

enum class Memory {
  staged,
  foreign,
  arenas
};  // how the ranks of a node get at each other's arrays

struct Setting {
  std::vector<int> node_of_rank;
  std::size_t chunk_bytes = 4096;
  std::int64_t timeout_ns = 30 * second;
  Memory memory = Memory::staged;
  std::size_t arena_bytes = 8 << 20;
  std::vector<ff::Route> routes = {};
  std::vector<std::vector<ff::Program>> programs = {};  // of each node
  int sockets = 1;
  bool tcp = false;  // between nodes, instead of pairs of Unix sockets
  std::function<void(std::vector<ff::Config>&)> adapt = {};  // what it changes last
};

inline std::pair<int, int> pair_of_sockets() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {fds[0], fds[1]};
}

inline std::pair<int, int> pair_over_tcp() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* at = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener, at, size) == 0 && listen(listener, 1) == 0 && getsockname(listener, at, &size) == 0);
  CHECK(connect(caller, at, size) == 0);
  const int called = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  CHECK(called >= 0);
  const int on = 1;
  for (const int fd : {caller, called}) CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
  close(listener);
  return {caller, called};
}

// Trees as `double_binary_tree` of the plan makes them for up to four nodes.
inline std::vector<std::vector<int>> trees_of(int nodes) {
  switch (nodes) {
    case 1: return {{-1}, {-1}};
    case 2: return {{-1, 0}, {1, -1}};
    case 3: return {{-1, 2, 0}, {1, -1, 0}};
    default: return {{-1, 2, 0, 2}, {1, 3, 1, -1}};
  }
}

inline void introduce(std::vector<ff::Config>& configs, const std::vector<int>& ranks, const Setting& setting) {
  std::vector<int> fds;
  for (const int rank : ranks) {
    fds.push_back(ff::Arena::create(setting.arena_bytes));
    configs[static_cast<std::size_t>(rank)].arena = std::make_shared<ff::Arena>(fds.back());
  }
  const ff::MemoryProbe probe = setting.memory == Memory::foreign && ff::can_access(ff::memory_probe()) ? ff::memory_probe() : ff::MemoryProbe{};
  for (const int rank : ranks) {
    for (const int fd : fds) configs[static_cast<std::size_t>(rank)].local_peers.push_back({probe, dup(fd)});
  }
  for (const int fd : fds) close(fd);
}

// The connections between nodes that the trees and the programs need.
inline void link(std::vector<ff::Config>& configs, const ff::Group& group, const Setting& setting) {
  std::set<std::tuple<int, int, int>> wanted;  // channel, lower node, higher node
  const auto want = [&](int channel, int a, int b) {
    wanted.insert({channel, std::min(a, b), std::max(a, b)});
    wanted.insert({ff::control_channel, std::min(a, b), std::max(a, b)});
  };
  for (int tree = 0; tree < ff::lanes; ++tree) {
    for (int node = 0; node < group.nodes(); ++node) {
      const int parent = group.trees[static_cast<std::size_t>(tree)][static_cast<std::size_t>(node)];
      if (parent >= 0) want(tree, node, parent);
    }
  }
  for (std::size_t node = 0; node < setting.programs.size(); ++node) {
    for (const ff::Program& program : setting.programs[node]) {
      for (const ff::Step& step : program.steps) {
        if (step.peer >= 0) want(program.channel, static_cast<int>(node), step.peer);
      }
    }
  }
  for (const auto& [channel, a, b] : wanted) {
    for (int socket = 0; socket < (channel == ff::control_channel ? 1 : setting.sockets); ++socket) {
      const auto [x, y] = setting.tcp ? pair_over_tcp() : pair_of_sockets();
      configs[static_cast<std::size_t>(group.leader_of(a))].connections.push_back({channel, b, socket, x});
      configs[static_cast<std::size_t>(group.leader_of(b))].connections.push_back({channel, a, socket, y});
    }
  }
}

inline std::vector<ff::Config> configs_of(const Setting& setting) {
  ff::Group group;
  group.node_of_rank = setting.node_of_rank;
  group.timeout_ns = setting.timeout_ns;
  for (std::size_t r = 0; r < setting.node_of_rank.size(); ++r) group.labels.push_back("rank " + std::to_string(r));
  group.trees = trees_of(group.nodes());
  group.routes = setting.routes;
  std::vector<ff::Config> configs(setting.node_of_rank.size());
  for (std::size_t r = 0; r < configs.size(); ++r) {
    configs[r].group = group;
    configs[r].group.rank = static_cast<int>(r);
  }
  for (int node = 0; node < group.nodes(); ++node) {
    const std::vector<int> ranks = group.ranks_of(node);
    auto& leader = configs[static_cast<std::size_t>(ranks[0])];
    if (!setting.programs.empty()) leader.group.programs = setting.programs[static_cast<std::size_t>(node)];
    leader.window_fd = ff::Window::create(static_cast<int>(ranks.size()), 4, setting.chunk_bytes);
    leader.doorbell_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (setting.memory != Memory::staged) introduce(configs, ranks, setting);
    for (std::size_t i = 1; i < ranks.size(); ++i) {
      auto& other = configs[static_cast<std::size_t>(ranks[i])];
      const auto [mine, theirs] = pair_of_sockets();
      leader.local_fds.emplace_back(ranks[i], mine);
      other.leader_fd = theirs;
      other.window_fd = dup(leader.window_fd);
      other.doorbell_fd = dup(leader.doorbell_fd);
    }
  }
  link(configs, group, setting);
  return configs;
}

inline Ranks make_group(const Setting& setting, std::vector<std::shared_ptr<ff::Arena>>* arenas = nullptr) {
  std::vector<ff::Config> configs = configs_of(setting);
  if (setting.adapt) setting.adapt(configs);
  Ranks ranks;
  for (auto& config : configs) {
    if (arenas != nullptr) arenas->push_back(config.arena);
  }
  for (auto& config : configs) ranks.push_back(std::make_unique<ff::Executor>(std::move(config)));
  return ranks;
}

inline void close_all(Ranks& ranks) {
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank] { rank->close(); });
  for (auto& thread : threads) thread.join();
}

inline void expect_well(ff::Work& work) {
  CHECK(work.wait(60 * second));
  const ff::Failure failure = work.failure();
  if (failure.kind != ff::FailureKind::none) std::fprintf(stderr, "%s\n", failure.text.c_str());
  CHECK(failure.kind == ff::FailureKind::none);
}

// Whoever is told that an operation has failed may free its array at once.
inline void a_failed_operation_lets_go_of_its_array(const std::function<Ranks()>& make) {
  for (int round = 0; round < 12; ++round) {
    Ranks ranks = make();
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      threads.emplace_back([&, r] {
        for (int step = 0;; ++step) {
          auto array = std::make_unique<std::vector<float>>(1'000'000, 1.0F);
          const auto work = ranks[r]->submit({0, array->size(), ff::OpKind::allreduce, ff::DType::f32, -1}, array->data(), array->data());
          if (step == 1 && r == static_cast<std::size_t>(round) % ranks.size()) {
            work->wait(round * 300'000);
            ranks[r]->abort("test");
          }
          CHECK(work->wait(60 * second));
          array.reset();
          if (work->failure().kind == ff::FailureKind::none) continue;
          CHECK(work->failure().kind == ff::FailureKind::aborted);
          return;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    close_all(ranks);
  }
}
