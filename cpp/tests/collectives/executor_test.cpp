// The executor with threads as ranks, over socket pairs; meant to be run under the sanitizers.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "executor_group.hpp"
#include "fireflyer/base/clock.hpp"

namespace {

void sums_are_right(const std::vector<int>& nodes) {
  Ranks ranks = make_group({.node_of_rank = nodes});
  const auto world = static_cast<std::int64_t>(ranks.size());
  for (const std::size_t count : {0, 1, 511, 512, 513, 20'000}) {
    std::vector<std::vector<std::int64_t>> sum, reduced, copied;
    std::vector<std::shared_ptr<ff::Work>> works;
    for (std::int64_t r = 0; r < world; ++r) {
      sum.emplace_back(count, r + 1);
      reduced.emplace_back(count, r + 1);
      copied.emplace_back(count, r + 1);
    }
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      std::iota(copied[r].begin(), copied[r].end(), static_cast<std::int64_t>(r));
      works.push_back(ranks[r]->submit({0, count, ff::OpKind::allreduce, ff::DType::i64, -1}, sum[r].data(), sum[r].data()));
      works.push_back(ranks[r]->submit({0, count, ff::OpKind::broadcast, ff::DType::i64, static_cast<int>(world) - 1}, copied[r].data(), copied[r].data()));
      works.push_back(ranks[r]->submit({0, count, ff::OpKind::reduce, ff::DType::i64, 0}, reduced[r].data(), reduced[r].data()));
      works.push_back(ranks[r]->submit({0, 0, ff::OpKind::barrier, ff::DType::f8e4m3, -1}, nullptr, nullptr));
    }
    for (const auto& work : works) expect_well(*work);
    for (std::int64_t r = 0; r < world; ++r) {
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(sum[static_cast<std::size_t>(r)][i] == world * (world + 1) / 2);
        CHECK(copied[static_cast<std::size_t>(r)][i] == world - 1 + static_cast<std::int64_t>(i));
        CHECK(reduced[static_cast<std::size_t>(r)][i] == (r == 0 ? world * (world + 1) / 2 : r + 1));
      }
    }
  }
  close_all(ranks);
}

// Nobody sleeps until the next poll over something that could be done: that would be right, but slow.
void wakeups_are_not_lost(const std::vector<int>& nodes, Memory memory) {
  constexpr std::size_t count = 200'000;
  std::vector<std::shared_ptr<ff::Arena>> arenas;
  Ranks ranks = make_group({.node_of_rank = nodes, .memory = memory}, &arenas);
  std::vector<std::vector<float>> owned(ranks.size(), std::vector<float>(memory == Memory::arenas ? 0 : count));
  std::vector<float*> arrays;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    arrays.push_back(memory == Memory::arenas ? reinterpret_cast<float*>(arenas[r]->allocate(count * 4)) : owned[r].data());
    std::fill(arrays[r], arrays[r] + count, 1.0F);
  }
  for (int round = 0; round < 10; ++round) {
    std::vector<std::shared_ptr<ff::Work>> works;
    for (std::size_t r = 0; r < ranks.size(); ++r) works.push_back(ranks[r]->submit({0, count, ff::OpKind::allreduce, ff::DType::f32, -1}, arrays[r], arrays[r]));
    for (const auto& work : works) expect_well(*work);
  }
  std::uint64_t unrung = 0;
  for (const auto& rank : ranks) unrung += rank->stats().unrung;
  if (unrung > 0) std::fprintf(stderr, "%llu sleeps over work on %zu ranks\n", static_cast<unsigned long long>(unrung), ranks.size());
  CHECK(unrung <= 3);  // a machine that stalls for 50 ms between a step and its ring may cause a few
  close_all(ranks);
}

// The same where small operations keep a caller waiting until it sleeps.
void sleepers_over_small_operations_are_woken() {
  constexpr std::int64_t longer_than_polling_ns = 300'000;
  Ranks ranks = make_group({.node_of_rank = {0, 0, 0}});
  const auto body = [&](std::size_t rank) {
    for (std::uint64_t round = 0; round < 30; ++round) {
      if (rank == round % ranks.size()) {  // comes when the others have been there for a while
        const auto all_there = [&] {
          const ff::Snapshot shot = ranks[rank]->flight();
          return std::all_of(shot.peer_progress.begin(), shot.peer_progress.end(), [&](const ff::PeerProgress& other) { return other.entered > round; });
        };
        while (!all_there()) std::this_thread::yield();
        for (const std::int64_t until_ns = ff::monotonic_ns() + longer_than_polling_ns; ff::monotonic_ns() < until_ns;) std::this_thread::yield();
      }
      float value = 1.0F;
      const auto work = ranks[rank]->call({0, 1, ff::OpKind::allreduce, ff::DType::f32, -1}, &value, &value, -1);
      if (work) expect_well(*work);
      CHECK(value == 3.0F);
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) threads.emplace_back(body, r);
  for (auto& thread : threads) thread.join();
  std::uint64_t unrung = 0;
  for (const auto& rank : ranks) unrung += rank->stats().unrung;
  CHECK(unrung <= 3);
  close_all(ranks);
}

// Descriptor numbers are used again at once: what a closed executor still touched would belong to somebody else.
void nothing_is_touched_after_close() {
  Ranks ranks = make_group({.node_of_rank = {0, 1}});
  close_all(ranks);
  std::vector<int> pipes;
  for (int i = 0; i < 32; ++i) {
    int fds[2];
    CHECK(pipe2(fds, O_NONBLOCK | O_CLOEXEC) == 0);
    pipes.insert(pipes.end(), {fds[0], fds[1]});
  }
  for (const auto& rank : ranks) rank->abort("too late");
  ranks.clear();
  char byte = 0;
  for (std::size_t i = 0; i < pipes.size(); i += 2) CHECK(read(pipes[i], &byte, 1) < 0 && errno == EAGAIN);
  for (const int fd : pipes) CHECK(close(fd) == 0);
}

void a_missing_rank_is_named(const std::vector<int>& nodes, int missing) {
  Ranks ranks = make_group({.node_of_rank = nodes, .timeout_ns = second / 2});
  std::vector<std::vector<float>> arrays(ranks.size(), std::vector<float>(10'000, 1.0F));
  std::vector<std::shared_ptr<ff::Work>> works;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) != missing) works.push_back(ranks[r]->submit({0, arrays[r].size(), ff::OpKind::allreduce, ff::DType::f32, -1}, arrays[r].data(), arrays[r].data()));
  }
  for (const auto& work : works) {
    CHECK(work->wait(60 * second));
    CHECK(work->failure().kind == ff::FailureKind::peer_failed);
    CHECK(work->failure().culprit == missing);
  }
  const auto later = ranks.back()->submit({0, 0, ff::OpKind::barrier, ff::DType::f32, -1}, nullptr, nullptr);
  CHECK(later->wait(60 * second) && later->failure().culprit == missing);
  close_all(ranks);
}

void a_rank_that_left_is_named(const std::vector<int>& nodes, int leaver) {
  Ranks ranks = make_group({.node_of_rank = nodes});
  ranks[static_cast<std::size_t>(leaver)]->close();
  std::vector<float> array(10'000, 1.0F);
  std::vector<std::shared_ptr<ff::Work>> works;
  std::vector<std::vector<float>> arrays(ranks.size(), array);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) != leaver) works.push_back(ranks[r]->submit({0, arrays[r].size(), ff::OpKind::allreduce, ff::DType::f32, -1}, arrays[r].data(), arrays[r].data()));
  }
  for (const auto& work : works) {
    CHECK(work->wait(60 * second));
    CHECK(work->failure().culprit == leaver);
  }
  close_all(ranks);
}

// Every rank in a thread of its own, which works on small and large sums itself.
void callers_do_the_work(const std::vector<int>& nodes, Memory memory) {
  std::vector<std::shared_ptr<ff::Arena>> arenas;
  Ranks ranks = make_group({.node_of_rank = nodes, .memory = memory}, &arenas);
  const auto world = static_cast<int>(ranks.size());
  const auto body = [&](int rank) {
    ff::Executor& executor = *ranks[static_cast<std::size_t>(rank)];
    const auto& arena = arenas[static_cast<std::size_t>(rank)];
    for (const std::size_t count : {1UL, 100UL, 40'000UL}) {
      std::vector<float> owned(memory == Memory::arenas ? 0 : count * static_cast<std::size_t>(world));
      float* array = memory == Memory::arenas ? reinterpret_cast<float*>(arena->allocate(count * static_cast<std::size_t>(world) * 4)) : owned.data();
      const auto now = [&](ff::OpKind kind, std::size_t elems, const float* in, float* out, int root) {
        const auto work = executor.call({0, elems, kind, ff::DType::f32, root}, in, out, -1);
        if (work) expect_well(*work);
      };
      for (int round = 0; round < 20; ++round) {
        const auto mine = static_cast<float>(rank + round);
        const float total = static_cast<float>(world * (world - 1)) / 2 + static_cast<float>(world * round);
        std::fill(array, array + count, mine);
        now(ff::OpKind::allreduce, count, array, array, -1);
        CHECK(std::all_of(array, array + count, [&](float x) { return x == total; }));
        std::vector<float> all(count * static_cast<std::size_t>(world));
        std::fill(array, array + count, mine);
        if (nodes.back() == 0) {  // between nodes these need a ring
          now(ff::OpKind::allgather, count, array, all.data(), -1);
          for (std::size_t i = 0; i < all.size(); ++i) CHECK(all[i] == static_cast<float>(i / count) + static_cast<float>(round));
          std::copy(all.begin(), all.end(), array);
          now(ff::OpKind::reduce_scatter, count, array, all.data(), -1);
          CHECK(std::all_of(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count), [&](float x) { return x == static_cast<float>(world) * mine; }));
        }
        std::fill(array, array + count, mine);
        now(ff::OpKind::broadcast, count, array, array, world - 1);
        CHECK(array[count - 1] == static_cast<float>(world - 1 + round));
        std::fill(array, array + count, 1.0F);
        now(ff::OpKind::reduce, count, array, array, 0);
        CHECK(array[0] == (rank == 0 ? static_cast<float>(world) : 1.0F));
      }
      if (memory == Memory::arenas) arena->release(reinterpret_cast<char*>(array));
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) threads.emplace_back(body, r);
  for (auto& thread : threads) thread.join();
  close_all(ranks);
}

// Small operations that are over at once are kept apart from the others: what is told of both is one list.
void records_are_in_the_order_of_calls() {
  constexpr std::uint64_t operations = 3000;
  Ranks ranks = make_group({.node_of_rank = {0, 0}});
  const auto body = [&](ff::Executor& executor) {
    std::vector<float> array(40'000, 1.0F);
    for (std::uint64_t i = 0; i < operations; ++i) {
      const std::size_t count = i % 100 == 99 ? array.size() : 3;
      const ff::OpDescriptor op{0, count, ff::OpKind::broadcast, ff::DType::f32, 0};
      const auto work = i % 7 == 0 ? executor.submit(op, array.data(), array.data()) : executor.call(op, array.data(), array.data(), -1);
      if (work) expect_well(*work);
    }
  };
  std::thread other(body, std::ref(*ranks[1]));
  body(*ranks[0]);
  other.join();
  for (const auto& rank : ranks) {
    const ff::Snapshot shot = rank->flight();
    CHECK(shot.submitted == operations && shot.finished == operations && shot.records.size() >= 1000);
    CHECK(shot.records.back().op.seq == operations - 1 && shot.records.back().id == operations - 1);
    std::uint64_t large = 0;
    for (std::size_t i = 0; i < shot.records.size(); ++i) {
      const ff::RecordView& record = shot.records[i];
      CHECK(i == 0 || (record.id == shot.records[i - 1].id + 1 && record.op.seq > shot.records[i - 1].op.seq));
      CHECK(record.state == ff::RecordState::done && record.finished_ns >= record.started_ns && record.started_ns >= record.submitted_ns);
      CHECK((record.path == ff::Path::small) == (record.op.count == 3) && record.bytes == 4 * record.op.count);
      large += record.path != ff::Path::small;
    }
    CHECK(large > 0);
    const ff::Stats stats = rank->stats();
    CHECK(stats.operations[static_cast<std::size_t>(ff::OpKind::broadcast)] == operations);
    CHECK(stats.bytes == 4 * (3 * (operations - operations / 100) + 40'000 * (operations / 100)));
    CHECK(stats.in_flight_ns > 0);
  }
  close_all(ranks);
}

// Large results apart from the arrays are written around the caches, from and to any place.
void large_results_are_right() {
  constexpr std::size_t count = (9 << 18) + 7;
  std::vector<std::shared_ptr<ff::Arena>> arenas;
  Ranks ranks = make_group({.node_of_rank = {0, 0}, .memory = Memory::arenas, .arena_bytes = 32 << 20}, &arenas);
  const auto body = [&](std::size_t rank) {
    auto* in = reinterpret_cast<std::int32_t*>(arenas[rank]->allocate(count * 4));
    auto* out = reinterpret_cast<std::int32_t*>(arenas[rank]->allocate(count * 4 + 64)) + 3 + rank;
    std::iota(in, in + count, static_cast<std::int32_t>(rank));
    const auto work = ranks[rank]->call({0, count, ff::OpKind::allreduce, ff::DType::i32, -1}, in, out, -1);
    if (work) expect_well(*work);
    for (std::size_t i = 0; i < count; ++i) CHECK(out[i] == static_cast<std::int32_t>(2 * i + 1));
  };
  std::thread other(body, 1);
  body(0);
  other.join();
  close_all(ranks);
}

void an_arena_gives_and_takes() {
  const int fd = ff::Arena::create(16 << 20);
  ff::Arena arena(fd);
  close(fd);
  char* first = arena.allocate(5000);
  char* second_one = arena.allocate(4 << 20);
  CHECK(arena.holds(first, 5000) && !arena.holds(first, 17 << 20) && !arena.holds(first - 1, 1));
  CHECK(reinterpret_cast<std::uintptr_t>(second_one) % (2 << 20) == reinterpret_cast<std::uintptr_t>(arena.base()) % (2 << 20));
  first[0] = 1;
  arena.release(first);
  char* again = arena.allocate(5000);
  CHECK(again == first && again[0] == 0);
  bool full = false;
  try {
    arena.allocate(16 << 20);
  } catch (const std::bad_alloc&) {
    full = true;
  }
  CHECK(full);
  arena.release(again);
  arena.release(second_one);
  CHECK(arena.used() == 0);
  CHECK(arena.allocate(16 << 20) == arena.base());
}

void an_abort_is_heard_by_all(const std::vector<int>& nodes) {
  Ranks ranks = make_group({.node_of_rank = nodes});
  std::vector<std::vector<float>> arrays(ranks.size(), std::vector<float>(100'000, 1.0F));
  std::vector<std::shared_ptr<ff::Work>> works;
  for (std::size_t r = 1; r < ranks.size(); ++r) works.push_back(ranks[r]->submit({0, arrays[r].size(), ff::OpKind::allreduce, ff::DType::f32, -1}, arrays[r].data(), arrays[r].data()));
  ranks.back()->abort("test");
  for (const auto& work : works) {
    CHECK(work->wait(60 * second));
    CHECK(work->failure().kind == ff::FailureKind::aborted);
  }
  close_all(ranks);
}

}  // namespace

int main() {
  const std::vector<std::vector<int>> layouts{{0}, {0, 0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2}, {0, 1, 2, 3}};
  for (const auto& nodes : layouts) sums_are_right(nodes);
  for (const auto& nodes : layouts) {
    for (const Memory memory : {Memory::staged, Memory::arenas}) wakeups_are_not_lost(nodes, memory);
  }
  for (const auto& nodes : layouts) {
    for (const Memory memory : {Memory::staged, Memory::foreign, Memory::arenas}) callers_do_the_work(nodes, memory);
  }
  sleepers_over_small_operations_are_woken();
  records_are_in_the_order_of_calls();
  large_results_are_right();
  an_arena_gives_and_takes();
  nothing_is_touched_after_close();
  a_missing_rank_is_named({0, 0, 0}, 0);
  a_missing_rank_is_named({0, 0, 0}, 2);
  a_missing_rank_is_named({0, 0, 1, 1}, 3);
  a_missing_rank_is_named({0, 1, 2, 3}, 1);
  a_rank_that_left_is_named({0, 0}, 1);
  a_rank_that_left_is_named({0, 1, 2}, 2);
  an_abort_is_heard_by_all({0, 0, 1, 1});
  a_failed_operation_lets_go_of_its_array([] { return make_group({.node_of_rank = {0, 1}, .chunk_bytes = 262144}); });
  std::puts("executor: all well");
  return 0;
}
