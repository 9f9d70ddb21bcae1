// Known answers of RFC 3720 B.4, and the fast path against the table at every length and offset that its loops divide.
#include "fireflyer/base/crc32c.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

void known_answers() {
  CHECK(ff::crc32c(0, "123456789", 9) == 0xe3069283u);
  CHECK(ff::crc32c_portable(0, "123456789", 9) == 0xe3069283u);
  CHECK(ff::crc32c(0, nullptr, 0) == 0);
  std::vector<unsigned char> data(32, 0);
  CHECK(ff::crc32c(0, data.data(), 32) == 0x8a9136aau);
  data.assign(32, 0xff);
  CHECK(ff::crc32c(0, data.data(), 32) == 0x62a8ab43u);
  std::iota(data.begin(), data.end(), static_cast<unsigned char>(0));
  CHECK(ff::crc32c(0, data.data(), 32) == 0x46dd794eu);
}

std::vector<unsigned char> noise(std::size_t n) {
  std::vector<unsigned char> data(n);
  unsigned state = 1;
  for (auto& byte : data) byte = static_cast<unsigned char>((state = state * 1664525u + 1013904223u) >> 24);
  return data;
}

// The copy must not write a byte too many, either.
void check(const std::vector<unsigned char>& data, std::size_t offset, std::size_t length) {
  const std::uint32_t expected = ff::crc32c_portable(7, &data[offset], length);
  CHECK(ff::crc32c(7, &data[offset], length) == expected);
  std::vector<unsigned char> copy(length + 7, 0xa5);
  CHECK(ff::crc32c_copy(7, &copy[3], &data[offset], length) == expected);
  CHECK(std::equal(copy.begin() + 3, copy.end() - 4, data.begin() + static_cast<std::ptrdiff_t>(offset)));
  for (const std::size_t i : {std::size_t{0}, std::size_t{1}, std::size_t{2}, length + 3, length + 4, length + 5, length + 6}) CHECK(copy[i] == 0xa5);
}

void same_as_table() {
  const auto data = noise(150'000);
  for (std::size_t length = 0; length < 1300; ++length) check(data, length % 67, length);
  const std::size_t lengths[] = {1535, 1536, 1537, 4096, 12'287, 12'288, 12'289, 13'056, 16'384, 24'576, 39'000, 65'536, 149'000};
  for (const std::size_t length : lengths)
    for (std::size_t offset = 0; offset < 9; ++offset) check(data, offset, length);
}

void chained() {
  const std::string text(30'000, 'x');
  for (const std::size_t cut : {0u, 1u, 300u, 511u, 512u, 1025u, 12'288u, 29'999u})
    CHECK(ff::crc32c(ff::crc32c(0, text.data(), cut), text.data() + cut, text.size() - cut) ==
          ff::crc32c(0, text.data(), text.size()));
}

void joined() {
  const auto data = noise(70'000);
  for (const std::size_t cut : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{65'535}, data.size()})
    CHECK(ff::crc32c_joined(ff::crc32c(0, data.data(), cut), ff::crc32c(0, data.data() + cut, data.size() - cut), data.size() - cut) ==
          ff::crc32c(0, data.data(), data.size()));
}

}  // namespace

int main() {
  known_answers();
  same_as_table();
  chained();
  joined();
}
