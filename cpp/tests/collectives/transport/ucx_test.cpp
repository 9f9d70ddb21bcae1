// UCX as a transport, over its own tcp and shared memory: streams of bytes with back pressure, strangers, ends of every kind,
// and that memory is let go of when a transport or a failed operation says so; meant to be run under the address sanitizer.
#include <poll.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "collectives/executor_group.hpp"
#include "fireflyer/collectives/transport/fabric.hpp"

#ifdef FF_UCX_MODULE

namespace {

using Bytes = std::vector<char>;
using Fabrics = std::vector<std::shared_ptr<ff::Fabric>>;

constexpr std::size_t head_bytes = 64;

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

ff::Fabric::Key key(int from, int to) {
  ff::Fabric::Key made{};
  made[0] = static_cast<unsigned char>(from + 1);
  made[1] = static_cast<unsigned char>(to + 1);
  return made;
}

void meet(ff::Fabric& a, ff::Fabric& b, int a_node, int b_node) {
  CHECK(a.meet(b_node, b.address(), key(a_node, b_node), key(b_node, a_node)).empty());
  CHECK(b.meet(a_node, a.address(), key(b_node, a_node), key(a_node, b_node)).empty());
}

struct Pair {
  std::shared_ptr<ff::Fabric> a = ff::load_fabric(FF_UCX_MODULE), b = ff::load_fabric(FF_UCX_MODULE);
  std::unique_ptr<ff::Transport> at_a, at_b;

  Pair() {
    meet(*a, *b, 0, 1);
    at_a = a->transport(1, 3, 2);
    at_b = b->transport(0, 3, 2);
    CHECK(at_a && at_b && !a->transport(1, 3, 2) && !a->transport(7, 3, 2));
  }

  void drive() const {
    a->progress();
    b->progress();
  }

  template <typename Condition>
  bool until(const Condition& condition, std::int64_t limit_ns = 10 * second) const {
    for (const std::int64_t end_ns = now_ns() + limit_ns; now_ns() < end_ns; drive()) {
      if (condition()) return true;
    }
    return false;
  }
};

struct Frame {
  Bytes head = Bytes(head_bytes), data;

  Frame(std::size_t bytes, int seed) : data(bytes) {
    for (std::size_t i = 0; i < head.size(); ++i) head[i] = static_cast<char>(seed + static_cast<int>(i));
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(seed * 7 + static_cast<int>(i % 251));
  }
  std::ptrdiff_t offer(ff::Transport& to) const {
    const iovec pieces[2] = {{const_cast<char*>(head.data()), head.size()}, {const_cast<char*>(data.data()), data.size()}};
    return to.send_some(pieces, data.empty() ? 1 : 2);
  }
  std::ptrdiff_t bytes() const { return static_cast<std::ptrdiff_t>(head.size() + data.size()); }
};

void expect_frame(const Pair& pair, ff::Transport& from, const Frame& frame) {
  for (const Bytes* part : {&frame.head, &frame.data}) {
    Bytes got(part->size());
    std::size_t at = 0;
    CHECK(pair.until([&] {
      if (at == got.size()) return true;
      const std::ptrdiff_t more = from.receive_some(got.data() + at, got.size() - at);
      CHECK(more >= 0);
      at += static_cast<std::size_t>(more);
      return at == got.size();
    }));
    CHECK(got == *part);
  }
}

void frames_arrive_in_order_and_whole() {
  const Pair pair;
  const std::vector<std::size_t> sizes{0, 1, 100, 8192, 8193, 0, 300'000, 5, 2'000'000, 0};
  std::vector<Frame> there, back;
  for (std::size_t i = 0; i < sizes.size(); ++i) there.emplace_back(sizes[i], static_cast<int>(i)), back.emplace_back(sizes[sizes.size() - 1 - i], static_cast<int>(i) + 50);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::ptrdiff_t one = there[i].offer(*pair.at_a), other = back[i].offer(*pair.at_b);
    expect_frame(pair, *pair.at_b, there[i]);
    expect_frame(pair, *pair.at_a, back[i]);
    CHECK(pair.until([&] {
      if (one == 0) one = there[i].offer(*pair.at_a);
      if (other == 0) other = back[i].offer(*pair.at_b);
      return one != 0 && other != 0;
    }));
    CHECK(one == there[i].bytes() && other == back[i].bytes());
  }
}

// Short frames go through while the receiver has room for them, long ones when it has taken them.
void a_receiver_that_does_not_read_holds_the_sender_back() {
  const Pair pair;
  const Frame small(1000, 1), large(100'000, 2);
  int through = 0;
  CHECK(!pair.until([&] { return (through += small.offer(*pair.at_a) == small.bytes()) > 20; }, second / 2));
  CHECK(through == 3 && pair.at_a->holds());
  for (int i = 0; i < 4; ++i) expect_frame(pair, *pair.at_b, small);
  CHECK(pair.until([&] { return small.offer(*pair.at_a) == small.bytes(); }));
  CHECK(!pair.at_a->holds());
  CHECK(!pair.until([&] { return large.offer(*pair.at_a) != 0; }, second / 4));
  CHECK(pair.at_a->holds());
  expect_frame(pair, *pair.at_b, large);
  CHECK(pair.until([&] { return large.offer(*pair.at_a) == large.bytes(); }));
}

void what_is_through_survives_the_sender() {
  Pair pair;
  const Frame frame(5000, 3);
  CHECK(pair.until([&] { return frame.offer(*pair.at_a) == frame.bytes(); }));
  pair.a->close(true);
  CHECK(frame.offer(*pair.at_a) == ff::Transport::broken);
  expect_frame(pair, *pair.at_b, frame);
}

void messages_of_strangers_are_dropped() {
  const Pair pair;
  const auto stranger = ff::load_fabric(FF_UCX_MODULE);
  CHECK(stranger->meet(1, pair.b->address(), key(5, 5), key(5, 5)).empty());
  const auto link = stranger->transport(1, 3, 2);
  const Frame evil(100, 9), large(100'000, 9), good(100, 4);
  CHECK(!pair.until([&] {
    stranger->progress();
    return evil.offer(*link) != 0;
  },
                    second / 4));
  stranger->close(false);
  std::ptrdiff_t sent = good.offer(*pair.at_a);
  expect_frame(pair, *pair.at_b, good);
  CHECK(pair.until([&] { return sent != 0 || (sent = good.offer(*pair.at_a)) != 0; }));
}

void data_larger_than_the_memory_for_them_break_the_stream() {
  const Pair pair;
  const Frame large(100'000, 5);
  CHECK(large.offer(*pair.at_a) == 0);
  Bytes head(head_bytes), little(99'999);
  CHECK(pair.until([&] { return pair.at_b->receive_some(head.data(), head.size()) == static_cast<std::ptrdiff_t>(head.size()); }));
  CHECK(pair.at_b->receive_some(little.data(), little.size()) == ff::Transport::broken);
  CHECK(pair.at_b->receive_some(little.data(), little.size()) == ff::Transport::broken);
}

// The memory of both ends may be freed once `close` has returned, whatever was under way.
void closing_lets_go_of_memory(bool receiving, bool kindly) {
  for (int round = 0; round < 20; ++round) {
    Pair pair;
    auto large = std::make_unique<Frame>(3'000'000, 6);
    auto into = std::make_unique<Bytes>(3'000'000);
    CHECK(large->offer(*pair.at_a) == 0);
    Bytes head(head_bytes);
    CHECK(pair.until([&] { return pair.at_b->receive_some(head.data(), head.size()) != 0; }));
    pair.at_b->receive_some(into->data(), into->size());
    for (int step = 0; step < round; ++step) pair.drive();
    const std::int64_t began_ns = now_ns();
    (receiving ? pair.b : pair.a)->close(kindly);
    if (receiving) into.reset();
    else large.reset();
    CHECK(now_ns() - began_ns < 2 * second);
    for (int step = 0; step < 1000; ++step) pair.drive();
  }
}

// A sleeper is woken by a frame, and not by nothing.
void arming_wakes() {
  const Pair pair;
  const Frame frame(10, 7);
  const auto quiet = [](ff::Fabric& fabric) {
    while (fabric.progress() || !fabric.arm()) {
    }
    pollfd entry{fabric.descriptor(), POLLIN, 0};
    return poll(&entry, 1, 50) == 0;
  };
  CHECK(pair.until([&] { return frame.offer(*pair.at_a) == frame.bytes(); }));
  expect_frame(pair, *pair.at_b, frame);
  CHECK(quiet(*pair.b));
  while (pair.b->progress() || !pair.b->arm()) {
  }
  CHECK(frame.offer(*pair.at_a) == 0);
  for (int i = 0; i < 100; ++i) pair.a->progress();
  pollfd entry{pair.b->descriptor(), POLLIN, 0};
  CHECK(poll(&entry, 1, 5000) == 1);
}

// --- groups ---

// Takes the data connections from the sockets and gives them to UCX.
void use_ucx(std::vector<ff::Config>& configs) {
  std::map<int, std::shared_ptr<ff::Fabric>> fabrics;
  for (auto& config : configs) {
    if (config.connections.empty()) continue;
    config.fabric = fabrics[config.group.node()] = ff::load_fabric(FF_UCX_MODULE);
    for (auto& connection : config.connections) {
      if (connection.channel == ff::control_channel) continue;
      close(connection.fd);
      connection.fd = -1;
    }
  }
  for (const auto& [one, a] : fabrics) {
    for (const auto& [other, b] : fabrics) {
      if (one < other) meet(*a, *b, one, other);
    }
  }
}

Ranks ucx_group(const std::vector<int>& nodes, std::int64_t timeout_ns, std::size_t chunk_bytes) {
  return make_group({.node_of_rank = nodes, .chunk_bytes = chunk_bytes, .timeout_ns = timeout_ns, .adapt = use_ucx});
}

void sums_are_right(const std::vector<int>& nodes, std::size_t chunk_bytes) {
  Ranks ranks = ucx_group(nodes, 30 * second, chunk_bytes);
  const auto world = static_cast<std::int64_t>(ranks.size());
  for (const std::size_t count : {0UL, 1UL, 513UL, 200'000UL}) {
    std::vector<std::vector<std::int64_t>> sums, copies;
    std::vector<std::shared_ptr<ff::Work>> works;
    for (std::int64_t r = 0; r < world; ++r) sums.emplace_back(count, r + 1), copies.emplace_back(count, r);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      works.push_back(ranks[r]->submit({0, count, ff::OpKind::allreduce, ff::DType::i64, -1}, sums[r].data(), sums[r].data()));
      works.push_back(ranks[r]->submit({0, count, ff::OpKind::broadcast, ff::DType::i64, static_cast<int>(world) - 1}, copies[r].data(), copies[r].data()));
      works.push_back(ranks[r]->submit({0, 0, ff::OpKind::barrier, ff::DType::f8e4m3, -1}, nullptr, nullptr));
    }
    for (const auto& work : works) expect_well(*work);
    for (const auto& sum : sums) CHECK(std::all_of(sum.begin(), sum.end(), [&](std::int64_t x) { return x == world * (world + 1) / 2; }));
    for (const auto& copy : copies) CHECK(std::all_of(copy.begin(), copy.end(), [&](std::int64_t x) { return x == world - 1; }));
  }
  close_all(ranks);
}

void a_missing_rank_is_named(const std::vector<int>& nodes, int missing) {
  Ranks ranks = ucx_group(nodes, second / 2, 65536);
  std::vector<std::vector<float>> arrays(ranks.size(), std::vector<float>(100'000, 1.0F));
  std::vector<std::shared_ptr<ff::Work>> works;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) != missing) works.push_back(ranks[r]->submit({0, arrays[r].size(), ff::OpKind::allreduce, ff::DType::f32, -1}, arrays[r].data(), arrays[r].data()));
  }
  for (const auto& work : works) {
    CHECK(work->wait(60 * second));
    CHECK(work->failure().kind == ff::FailureKind::peer_failed && work->failure().culprit == missing);
  }
  close_all(ranks);
}

void a_rank_that_left_is_named(const std::vector<int>& nodes, int leaver) {
  Ranks ranks = ucx_group(nodes, 30 * second, 65536);
  ranks[static_cast<std::size_t>(leaver)]->close();
  std::vector<std::vector<float>> arrays(ranks.size(), std::vector<float>(100'000, 1.0F));
  std::vector<std::shared_ptr<ff::Work>> works;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) != leaver) works.push_back(ranks[r]->submit({0, arrays[r].size(), ff::OpKind::allreduce, ff::DType::f32, -1}, arrays[r].data(), arrays[r].data()));
  }
  for (const auto& work : works) {
    CHECK(work->wait(60 * second));
    CHECK(work->failure().culprit == leaver);
  }
  close_all(ranks);
}

}  // namespace

// With arguments: over these values of UCX_TLS, for example those of a cluster.
int main(int count, char** arguments) {
#ifdef __SANITIZE_THREAD__
  setenv("UCX_MEM_EVENTS", "n", 0);  // its hooks in the C library and the sanitizer's do not get along
#endif
  setenv("UCX_LOG_LEVEL", "fatal", 0);
  setenv("UCX_ERROR_SIGNALS", "", 0);
  std::vector<std::string> all(arguments + 1, arguments + count);
  if (all.empty()) all = {"tcp", "shm"};
  for (const std::string& transports : all) {
    setenv("UCX_TLS", transports.c_str(), 1);
    frames_arrive_in_order_and_whole();
    a_receiver_that_does_not_read_holds_the_sender_back();
    what_is_through_survives_the_sender();
    messages_of_strangers_are_dropped();
    data_larger_than_the_memory_for_them_break_the_stream();
    for (const bool receiving : {false, true}) {
      for (const bool kindly : {false, true}) closing_lets_go_of_memory(receiving, kindly);
    }
    arming_wakes();
    for (const std::size_t chunk_bytes : {4096UL, 65536UL}) {
      for (const auto& nodes : {std::vector<int>{0, 1}, {0, 0, 1, 1}, {0, 1, 2}}) sums_are_right(nodes, chunk_bytes);
    }
    for (const auto& nodes : {std::vector<int>{0, 1}, {0, 1, 2}}) a_failed_operation_lets_go_of_its_array([&] { return ucx_group(nodes, 30 * second, 262144); });
    a_missing_rank_is_named({0, 1, 2}, 1);
    a_missing_rank_is_named({0, 0, 1, 1}, 3);
    a_rank_that_left_is_named({0, 1, 2}, 2);
    std::printf("ucx over %s: all well\n", transports.c_str());
  }
  return 0;
}

#else

int main() {
  std::puts("ucx: this build has none");
  return 0;
}

#endif
