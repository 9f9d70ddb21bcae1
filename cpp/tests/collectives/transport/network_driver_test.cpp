// Who drives a network changes: between the thread that runs an operation and the network thread, in the middle of
// operations and between them. Threads as ranks; meant to be run under the thread sanitizer.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "collectives/executor_group.hpp"
#include "fireflyer/base/clock.hpp"

namespace {

constexpr std::size_t chunk_bytes = 256 << 10;
constexpr std::size_t short_count = 20'000, long_count = (4 << 18) + 1;  // up to 4 MiB a caller drives the network
constexpr std::uint64_t stalls = 3;                                      // of the machine, each as long as a sleep at the most

template <class Body>
void on_every_rank(Ranks& ranks, const Body& body) {
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) threads.emplace_back([&, r] { body(static_cast<int>(r), *ranks[r]); });
  for (auto& thread : threads) thread.join();
}

void nobody_slept_over_work(const Ranks& ranks) {
  std::uint64_t unrung = 0;
  for (const auto& rank : ranks) unrung += rank->stats().unrung;
  if (unrung > 0) std::fprintf(stderr, "%llu sleeps over work on %zu ranks\n", static_cast<unsigned long long>(unrung), ranks.size());
  CHECK(unrung <= stalls);
}

// The caller for a short operation, the network thread for a long one, a caller without patience and then the executor's
// thread for the same operation, and the executor's thread for what is handed over.
void drivers_take_turns(const std::vector<int>& nodes, Memory memory) {
  std::vector<std::shared_ptr<ff::Arena>> arenas;
  Ranks ranks = make_group({.node_of_rank = nodes, .chunk_bytes = chunk_bytes, .memory = memory, .tcp = true}, &arenas);
  const auto world = static_cast<int>(ranks.size());
  on_every_rank(ranks, [&](int rank, ff::Executor& executor) {
    std::vector<std::int32_t> owned(memory == Memory::arenas ? 0 : long_count);
    auto* array = memory == Memory::arenas ? reinterpret_cast<std::int32_t*>(arenas[static_cast<std::size_t>(rank)]->allocate(long_count * 4)) : owned.data();
    for (int round = 0; round < 60; ++round) {
      const std::size_t count = round % 10 == 9 ? long_count : short_count;
      const std::int64_t patience_ns = round % 3 == 0 ? -1 : (round + rank) % 3 * 50'000;
      std::fill_n(array, count, rank + round);
      const ff::OpDescriptor op{0, count, ff::OpKind::allreduce, ff::DType::i32, -1};
      const auto work = round % 4 == 3 ? executor.submit(op, array, array) : executor.call(op, array, array, patience_ns);
      if (work) expect_well(*work);
      const std::int32_t sum = world * (world - 1) / 2 + world * round;
      CHECK(std::all_of(array, array + count, [&](std::int32_t x) { return x == sum; }));
    }
  });
  close_all(ranks);
}

// A driver that sleeps hears of what other ranks of its node have done: rank 0 has waited for a while when rank 1 comes.
void a_driver_is_woken_by_its_node() {
  constexpr std::int64_t longer_than_offers_ns = 2'000'000;
  Ranks ranks = make_group({.node_of_rank = {0, 0, 1}, .chunk_bytes = chunk_bytes});
  on_every_rank(ranks, [&](int rank, ff::Executor& executor) {
    for (std::uint64_t round = 0; round < 15; ++round) {
      if (rank == 1) {
        while (ranks[0]->flight().submitted <= round) std::this_thread::yield();
        for (const std::int64_t until_ns = ff::monotonic_ns() + longer_than_offers_ns; ff::monotonic_ns() < until_ns;) std::this_thread::yield();
      }
      std::vector<float> array(short_count, 1.0F);
      const auto work = executor.call({0, short_count, ff::OpKind::allreduce, ff::DType::f32, -1}, array.data(), array.data(), -1);
      if (work) expect_well(*work);
      CHECK(array.front() == 3.0F && array.back() == 3.0F);
    }
  });
  nobody_slept_over_work(ranks);
  close_all(ranks);
}

// A rank that only sends is done when its array has been read. What no socket has taken by then is the network thread's.
void what_a_caller_leaves_is_sent_by_the_network_thread() {
  constexpr std::size_t count = chunk_bytes;  // four chunks of floats: as many as there are slots, and more than sockets take
  Ranks ranks = make_group({.node_of_rank = {0, 1}, .chunk_bytes = chunk_bytes});
  for (int round = 0; round < 30; ++round) {
    std::atomic<bool> left{false};
    on_every_rank(ranks, [&](int rank, ff::Executor& executor) {
      std::vector<float> array(count, 1.0F);
      if (rank == 0) left.wait(false);
      const auto work = executor.call({0, count, ff::OpKind::reduce, ff::DType::f32, 0}, array.data(), array.data(), -1);
      if (work) expect_well(*work);
      CHECK(array.front() == (rank == 0 ? 2.0F : 1.0F) && array.back() == array.front());
      if (rank == 1) left = true, left.notify_all();
    });
  }
  nobody_slept_over_work(ranks);
  close_all(ranks);
}

// A caller that drives the network and waits hears of an abort by another thread, and of the death of another node.
void a_driver_hears_of_failures() {
  for (const bool aborts : {true, false}) {
    Ranks ranks = make_group({.node_of_rank = {0, 1}});
    std::thread caller([&] {
      std::vector<float> array(short_count, 1.0F);
      const auto work = ranks[0]->call({0, short_count, ff::OpKind::allreduce, ff::DType::f32, -1}, array.data(), array.data(), -1);
      CHECK(work && work->wait(60 * second));
      CHECK(work->failure().kind == (aborts ? ff::FailureKind::aborted : ff::FailureKind::peer_failed));
    });
    while (ranks[0]->flight().submitted == 0) std::this_thread::yield();
    if (aborts) ranks[0]->abort("test");
    else ranks[1]->close();
    caller.join();
    close_all(ranks);
  }
}

}  // namespace

int main() {
  const std::vector<std::vector<int>> layouts{{0, 1}, {0, 0, 1, 1}, {0, 1, 2}};
  for (const auto& nodes : layouts) {
    for (const Memory memory : {Memory::staged, Memory::arenas}) drivers_take_turns(nodes, memory);
  }
  a_driver_is_woken_by_its_node();
  what_a_caller_leaves_is_sent_by_the_network_thread();
  a_driver_hears_of_failures();
  std::puts("network driver: all well");
  return 0;
}
