// Groups of executors that are threads of one process, over socket pairs.
#pragma once

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fireflyer/executor.hpp"

inline constexpr std::int64_t second = 1'000'000'000;

inline std::pair<int, int> pair_of_sockets() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {fds[0], fds[1]};
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

using Ranks = std::vector<std::unique_ptr<ff::Executor>>;

enum class Memory { staged, foreign, arenas };  // how the ranks of a node get at each other's arrays

inline void introduce(std::vector<ff::Config>& configs, const std::vector<int>& ranks, Memory memory) {
  std::vector<int> fds;
  for (const int rank : ranks) {
    fds.push_back(ff::Arena::create(8 << 20));
    configs[static_cast<std::size_t>(rank)].arena = std::make_shared<ff::Arena>(fds.back());
  }
  const int pid = memory == Memory::foreign && ff::sees(ff::beacon()) ? getpid() : 0;
  for (const int rank : ranks) {
    for (const int fd : fds) configs[static_cast<std::size_t>(rank)].neighbours.push_back({pid, dup(fd)});
  }
  for (const int fd : fds) close(fd);
}

inline Ranks make_group(const std::vector<int>& node_of_rank, std::int64_t timeout_ns, std::size_t chunk_bytes, Memory memory = Memory::staged,
                        std::vector<std::shared_ptr<ff::Arena>>* arenas = nullptr, const std::function<void(std::vector<ff::Config>&)>& adapt = {}) {
  ff::Group group;
  group.node_of_rank = node_of_rank;
  group.timeout_ns = timeout_ns;
  for (std::size_t r = 0; r < node_of_rank.size(); ++r) group.labels.push_back("rank " + std::to_string(r));
  group.trees = trees_of(group.nodes());
  std::vector<ff::Config> configs(node_of_rank.size());
  for (std::size_t r = 0; r < configs.size(); ++r) {
    configs[r].group = group;
    configs[r].group.rank = static_cast<int>(r);
  }
  for (int node = 0; node < group.nodes(); ++node) {
    const std::vector<int> ranks = group.ranks_of(node);
    auto& leader = configs[static_cast<std::size_t>(ranks[0])];
    leader.window_fd = ff::Window::create(static_cast<int>(ranks.size()), 4, chunk_bytes);
    leader.doorbell_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (memory != Memory::staged) introduce(configs, ranks, memory);
    for (std::size_t i = 1; i < ranks.size(); ++i) {
      auto& other = configs[static_cast<std::size_t>(ranks[i])];
      const auto [mine, theirs] = pair_of_sockets();
      leader.local_fds.emplace_back(ranks[i], mine);
      other.leader_fd = theirs;
      other.window_fd = dup(leader.window_fd);
      other.doorbell_fd = dup(leader.doorbell_fd);
    }
  }
  const auto link = [&](int channel, int a, int b) {
    const auto [x, y] = pair_of_sockets();
    configs[static_cast<std::size_t>(group.leader_of(a))].connections.push_back({channel, b, 0, x});
    configs[static_cast<std::size_t>(group.leader_of(b))].connections.push_back({channel, a, 0, y});
  };
  std::map<std::pair<int, int>, bool> controlled;
  for (int tree = 0; tree < 2; ++tree) {
    for (int node = 0; node < group.nodes(); ++node) {
      const int parent = group.trees[static_cast<std::size_t>(tree)][static_cast<std::size_t>(node)];
      if (parent < 0) continue;
      link(tree, node, parent);
      bool& known = controlled[std::pair(std::min(node, parent), std::max(node, parent))];
      if (!known) link(ff::control_channel, node, parent);
      known = true;
    }
  }
  if (adapt) adapt(configs);
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
