// Ranges of every kind of length, in one thread and in several, against one call for each.
#include "fireflyer/base/ranges.hpp"

#include <cstring>
#include <vector>

#include "check.hpp"
#include "fireflyer/base/crc32c.hpp"

namespace {

const std::vector<std::uint64_t> sizes{0, 1, 63, 4096, 65'535, 65'536, 65'601, 0, 1'500'000, 7, 900'001};

void copies(int threads) {
  std::uint64_t total = 0;
  for (const auto size : sizes) total += size + 3;
  std::vector<std::uint8_t> from(total), to(total, 0xa5);
  unsigned state = 1;
  for (auto& byte : from) byte = static_cast<std::uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  std::vector<const void*> sources;
  std::vector<void*> targets;
  std::vector<std::uint8_t> expected(total, 0xa5);
  std::uint64_t at = 0;
  for (const auto size : sizes) {
    const std::uint64_t other = total - at - size;  // the order is another one there
    sources.push_back(&from[at]);
    targets.push_back(&to[other]);
    std::memcpy(&expected[other], &from[at], size);
    at += size + 3;
  }
  ff::copy_ranges(targets.data(), sources.data(), sizes.data(), sizes.size(), threads);
  CHECK(to == expected);
}

void sums() {
  std::vector<std::uint8_t> data(100'000, 7), copy(5000, 0);
  const std::vector<std::uint64_t> begins{0, 99'000, 500, 100'000}, lengths{70'000, 1000, 5000, 0};
  std::vector<std::uint32_t> found{0, 1, 2, 3}, without = found;
  const std::vector<void*> targets{nullptr, nullptr, copy.data(), nullptr};
  ff::crc32c_ranges(found.data(), data.data(), begins.data(), lengths.data(), targets.data(), 4);
  ff::crc32c_ranges(without.data(), data.data(), begins.data(), lengths.data(), nullptr, 4);
  for (std::uint32_t i = 0; i < 4; ++i) CHECK(found[i] == ff::crc32c(i, data.data() + begins[i], lengths[i]));
  CHECK(without == found);
  CHECK(copy == std::vector<std::uint8_t>(5000, 7));
}

}  // namespace

int main() {
  for (const int threads : {0, 1, 2, 5, 16}) copies(threads);
  sums();
}
