// Operations between nodes by every algorithm, with threads as ranks; meant to be run under the sanitizers.
#include <cstdio>
#include <numeric>
#include <thread>
#include <vector>

#include "collectives/executor_group.hpp"
#include "collectives/programs.hpp"

namespace {

using Values = std::vector<std::int32_t>;

struct Way {
  ff::Algorithm algorithm;
  int sockets;
  bool tcp;
};

bool can(ff::Algorithm algorithm, ff::OpKind kind) {
  if (kind == ff::OpKind::allreduce || kind == ff::OpKind::barrier) return true;
  if (kind == ff::OpKind::reduce || kind == ff::OpKind::broadcast) return algorithm == ff::Algorithm::double_binary_tree;
  return algorithm == ff::Algorithm::ring;
}

Setting setting_of(const std::vector<int>& node_of_rank, const Way& way) {
  Setting setting{.node_of_rank = node_of_rank, .sockets = way.sockets, .tcp = way.tcp};
  if (way.algorithm == ff::Algorithm::double_binary_tree) return setting;
  const int nodes = node_of_rank.back() + 1;
  setting.programs.resize(static_cast<std::size_t>(nodes));
  for (const auto kind : {ff::OpKind::allreduce, ff::OpKind::barrier, ff::OpKind::reduce_scatter, ff::OpKind::allgather}) {
    if (!can(way.algorithm, kind)) continue;
    setting.routes.push_back({kind, ff::never, way.algorithm, 0});
    for (int node = 0; node < nodes; ++node) {
      for (int lane = 0; lane < ff::lanes; ++lane) {
        auto& programs = setting.programs[static_cast<std::size_t>(node)];
        programs.push_back(way.algorithm == ff::Algorithm::ring ? ring_program(kind, nodes, node, lane) : halving_doubling_program(kind, nodes, node, lane));
      }
    }
  }
  return setting;
}

void now(ff::Executor& executor, ff::OpKind kind, std::size_t count, const void* in, void* out, int root = -1, ff::DType dtype = ff::DType::i32) {
  if (const auto work = executor.call({0, count, kind, dtype, root}, in, out, -1)) expect_well(*work);
}

template <class Body>
void on_every_rank(Ranks& ranks, const Body& body) {
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) threads.emplace_back([&, r] { body(static_cast<int>(r), *ranks[r]); });
  for (auto& thread : threads) thread.join();
}

// The value of rank r at element i.
std::int32_t value_of(int rank, std::size_t i) { return (rank + 1) * static_cast<std::int32_t>(i % 1000 + 1); }

void results_are_right(const std::vector<int>& node_of_rank, const Way& way) {
  Ranks ranks = make_group(setting_of(node_of_rank, way));
  const auto world = static_cast<int>(ranks.size());
  const std::int32_t all = world * (world + 1) / 2;
  on_every_rank(ranks, [&](int rank, ff::Executor& executor) {
    for (const std::size_t count : {0UL, 1UL, 100UL, 1023UL, 9'000UL}) {
      Values mine(count), many(count * static_cast<std::size_t>(world)), out(count), gathered(many.size());
      for (std::size_t i = 0; i < count; ++i) mine[i] = value_of(rank, i);
      for (std::size_t i = 0; i < many.size(); ++i) many[i] = value_of(rank, i);
      now(executor, ff::OpKind::allreduce, count, mine.data(), out.data());
      for (std::size_t i = 0; i < count; ++i) CHECK(out[i] == all * value_of(0, i));
      now(executor, ff::OpKind::barrier, 0, nullptr, nullptr);
      if (can(way.algorithm, ff::OpKind::allgather)) {
        now(executor, ff::OpKind::allgather, count, mine.data(), gathered.data());
        for (std::size_t i = 0; i < gathered.size(); ++i) CHECK(gathered[i] == value_of(static_cast<int>(i / count), i % count));
        now(executor, ff::OpKind::reduce_scatter, count, many.data(), out.data());
        for (std::size_t i = 0; i < count; ++i) CHECK(out[i] == all * value_of(0, static_cast<std::size_t>(rank) * count + i));
      }
      if (!can(way.algorithm, ff::OpKind::reduce)) continue;
      for (int root = 0; root < world; ++root) {
        now(executor, ff::OpKind::reduce, count, mine.data(), out.data(), root);
        for (std::size_t i = 0; rank == root && i < count; ++i) CHECK(out[i] == all * value_of(0, i));
        std::copy(mine.begin(), mine.end(), out.begin());
        // Ranks map the window at addresses of their own, and a sanitizer takes these for other memory: it does not see
        // that the network's additions are known to all through the root.
        now(executor, ff::OpKind::barrier, 0, nullptr, nullptr);
        now(executor, ff::OpKind::broadcast, count, out.data(), out.data(), root);
        for (std::size_t i = 0; i < count; ++i) CHECK(out[i] == value_of(root, i));
      }
    }
  });
  close_all(ranks);
}

// Every element of a result is clipped by one rank or network thread, which counts it.
void what_is_clipped_is_counted(const std::vector<int>& node_of_rank, const Way& way) {
  Ranks ranks = make_group(setting_of(node_of_rank, way));
  constexpr std::size_t count = 10'000, large = 777;
  constexpr std::uint8_t f8_256 = 0x78, f8_448 = 0x7e, f8_one = 0x38;
  on_every_rank(ranks, [&](int, ff::Executor& executor) {
    std::vector<std::uint8_t> array(count, f8_one);
    std::fill_n(array.begin(), large, f8_256);
    now(executor, ff::OpKind::allreduce, count, array.data(), array.data(), -1, ff::DType::f8e4m3);
    for (std::size_t i = 0; i < count; ++i) CHECK((array[i] == f8_448) == (i < large));
  });
  std::uint64_t saturated = 0;
  for (const auto& rank : ranks) saturated += rank->stats().saturated;
  CHECK(saturated == large);
  close_all(ranks);
}

}  // namespace

int main() {
  const std::vector<Way> ways{{ff::Algorithm::double_binary_tree, 1, false}, {ff::Algorithm::double_binary_tree, 2, true}, {ff::Algorithm::ring, 1, true}, {ff::Algorithm::ring, 2, false}, {ff::Algorithm::halving_doubling, 1, true}, {ff::Algorithm::halving_doubling, 2, false}};
  const std::vector<std::vector<int>> layouts{{0, 1}, {0, 0, 1, 1}, {0, 1, 2}, {0, 1, 1, 2, 3}};
  for (const Way& way : ways) {
    for (const auto& nodes : layouts) {
      results_are_right(nodes, way);
      what_is_clipped_is_counted(nodes, way);
    }
  }
  std::puts("network: all well");
  return 0;
}
