// The order of frames on a connection: what both ends work out is the sorted list, whatever the number of sockets.
#include <algorithm>
#include <cstdio>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "collectives/transport/lane_run.hpp"

namespace {

using Key = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>;  // key, chunk, step

void order_is_sorted(std::uint64_t total, std::uint64_t depth, std::uint64_t rounds, const std::vector<std::pair<std::uint32_t, std::uint32_t>>& steps,
                     int sockets) {
  const std::uint64_t stride = ff::stride_of(rounds, depth);
  CHECK(stride >= 1 && stride * depth >= rounds && (stride - 1) * depth < rounds);  // as little as keeps chunks apart
  std::uint64_t seen = 0;
  for (int socket = 0; socket < sockets; ++socket) {
    std::vector<Key> expected;
    for (auto i = static_cast<std::uint64_t>(socket); i < total; i += static_cast<std::uint64_t>(sockets)) {
      for (const auto& [round, step] : steps) expected.emplace_back(i * stride + round, i, step);
    }
    std::sort(expected.begin(), expected.end());
    ff::Cursor cursor(steps, socket, sockets);
    for (int again = 0; again < 2; ++again) {
      cursor.begin(total, depth, stride);
      for (const auto& [key, chunk, step] : expected) {
        const ff::Cursor::Frame* head = cursor.head();
        CHECK(head != nullptr && head->i == chunk && head->step == step);
        cursor.pop();
      }
      CHECK(cursor.head() == nullptr);
    }
    seen += expected.size();
  }
  CHECK(seen == total * steps.size());
}

}  // namespace

int main() {
  for (const std::uint64_t total : {0, 1, 2, 7, 40}) {
    for (const std::uint64_t depth : {1, 2, 3, 16}) {
      for (int sockets = 1; sockets <= 8; ++sockets) {
        order_is_sorted(total, depth, 1, {}, sockets);
        order_is_sorted(total, depth, 1, {{0, 4}}, sockets);
        order_is_sorted(total, depth, 10, {{9, 0}, {0, 1}, {4, 2}}, sockets);
        order_is_sorted(total, depth, 6, {{0, 0}, {1, 2}, {2, 4}, {3, 6}, {4, 8}, {5, 9}}, sockets);
      }
    }
  }
  std::puts("lanes: all well");
  return 0;
}
