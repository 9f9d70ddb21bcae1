// Exchanges with threads as ranks: a window for each node, Unix sockets inside nodes and TCP between them.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fireflyer/collectives/executor.hpp"
#include "fireflyer/collectives/p2p/exchange.hpp"

namespace exchange_test {

inline constexpr std::int64_t second = 1'000'000'000;

inline std::pair<int, int> unix_pair() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {fds[0], fds[1]};
}

inline std::pair<int, int> tcp_pair() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), here = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(listener, 1) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  CHECK(connect(here, reinterpret_cast<sockaddr*>(&address), length) == 0);
  const int there = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  CHECK(there >= 0);
  close(listener);
  const int on = 1;
  for (const int fd : {here, there}) CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
  return {here, there};
}

// Every pair of ranks is connected from the start, some of them twice, as when both have called at once.
class Ranks {
 public:
  Ranks(const std::vector<int>& node_of_rank, std::int64_t timeout_ns, bool connected = true) : groups_(node_of_rank.size()) {
    for (std::size_t r = 0; r < groups_.size(); ++r) {
      groups_[r].rank = static_cast<int>(r);
      groups_[r].node_of_rank = node_of_rank;
      groups_[r].timeout_ns = timeout_ns;
      for (std::size_t i = 0; i < groups_.size(); ++i) groups_[r].labels.push_back("rank " + std::to_string(i));
    }
    for (int node = 0; node < groups_[0].nodes(); ++node) {
      const int fd = ff::Window::create(static_cast<int>(groups_[0].ranks_of(node).size()), 2, 4096);
      windows_.push_back(std::make_unique<ff::Window>(fd, -1));
      close(fd);
    }
    for (const ff::Group& group : groups_) exchanges_.push_back(std::make_unique<ff::Exchange>(group, window_of(group.rank), -1));
    for (int a = 0; connected && a < size(); ++a) {
      for (int b = 0; b < a; ++b) {
        connect(a, b);
        if ((a + b) % 3 == 0) connect(b, a);
      }
    }
  }

  ~Ranks() { close_all(); }

  void connect(int a, int b) {
    const auto [x, y] = groups_[0].node_of_rank[static_cast<std::size_t>(a)] == groups_[0].node_of_rank[static_cast<std::size_t>(b)] ? unix_pair() : tcp_pair();
    at(a).link(b, x);
    at(b).link(a, y);
  }

  int size() const { return static_cast<int>(groups_.size()); }
  ff::Exchange& at(int rank) { return *exchanges_[static_cast<std::size_t>(rank)]; }
  const ff::Group& group(int rank) const { return groups_[static_cast<std::size_t>(rank)]; }
  ff::Window& window_of(int rank) { return *windows_[static_cast<std::size_t>(groups_[0].node_of_rank[static_cast<std::size_t>(rank)])]; }

  // As the executor does around a group operation.
  void enter(int rank, const ff::OpDescriptor& op) {
    ff::Geometry geometry;
    geometry.op = op;
    window_of(rank).enter(groups_[0].local_index(rank), geometry, ff::Places{});
  }
  void leave(int rank, const ff::OpDescriptor& op) { window_of(rank).leave(groups_[0].local_index(rank), op); }

  void close_all() {
    std::vector<std::thread> threads;
    for (auto& exchange : exchanges_) threads.emplace_back([&exchange] { exchange->close(); });
    for (auto& thread : threads) thread.join();
  }

 private:
  std::vector<ff::Group> groups_;
  std::vector<std::unique_ptr<ff::Window>> windows_;
  std::vector<std::unique_ptr<ff::Exchange>> exchanges_;
};

inline void expect_well(ff::Work& work) {
  CHECK(work.wait(60 * second));
  const ff::Failure failure = work.failure();
  if (failure.kind != ff::FailureKind::none) std::fprintf(stderr, "%s\n", failure.text.c_str());
  CHECK(failure.kind == ff::FailureKind::none);
}

inline ff::Failure expect_failure(ff::Work& work) {
  CHECK(work.wait(60 * second));
  const ff::Failure failure = work.failure();
  CHECK(failure.kind != ff::FailureKind::none);
  return failure;
}

inline void expect_words(const ff::Failure& failure, ff::FailureKind kind, int culprit, const std::vector<std::string>& words) {
  bool right = failure.kind == kind && failure.culprit == culprit;
  for (const auto& word : words) right = right && failure.text.find(word) != std::string::npos;
  if (!right) std::fprintf(stderr, "kind %d, culprit %d: %s\n", static_cast<int>(failure.kind), failure.culprit, failure.text.c_str());
  CHECK(right);
}

}  // namespace exchange_test
