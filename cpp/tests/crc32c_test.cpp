// Known answers of RFC 3720 B.4, and the fast path against the table at every length and offset that its loops divide.
#include "fireflyer/crc32c.hpp"

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

void same_as_table() {
  std::vector<unsigned char> data(40'000);
  unsigned state = 1;
  for (auto& byte : data) byte = static_cast<unsigned char>((state = state * 1664525u + 1013904223u) >> 24);
  const std::size_t lengths[] = {1, 7, 8, 9, 255, 767, 768, 769, 1536, 12'287, 12'288, 12'289, 13'056, 24'576, 39'000};
  for (const std::size_t length : lengths)
    for (std::size_t offset = 0; offset < 9; ++offset)
      CHECK(ff::crc32c(7, &data[offset], length) == ff::crc32c_portable(7, &data[offset], length));
}

void chained() {
  const std::string text(30'000, 'x');
  for (const std::size_t cut : {0u, 1u, 300u, 12'288u, 29'999u})
    CHECK(ff::crc32c(ff::crc32c(0, text.data(), cut), text.data() + cut, text.size() - cut) ==
          ff::crc32c(0, text.data(), text.size()));
}

}  // namespace

int main() {
  known_answers();
  same_as_table();
  chained();
}
