// CRC-32C by table: eight bytes a step.
#include "fireflyer/crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

#include "fireflyer/cpu.hpp"

namespace ff {

#if defined(__x86_64__)
std::uint32_t crc32c_sse42(std::uint32_t crc, const void* data, std::size_t n);
#endif

namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: the remainder of byte b followed by k zero bytes
constexpr Tables make_tables() {
  Tables t{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    std::uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? 0x82f63b78u : 0u);
    t[0][b] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xffu];
  return t;
}

constexpr Tables tables = make_tables();

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t n) {
  const auto* p = static_cast<const std::uint8_t*>(data);
  crc = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= tables[7 - k][(word >> (8 * k)) & 0xffu];
  }
  for (; n > 0; --n, ++p) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 0xffu];
  return ~crc;
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t n) {
#if defined(__x86_64__)
  static const bool fast = cpu_features().sse42 && cpu_features().pclmul;
  if (fast) return crc32c_sse42(crc, data, n);
#endif
  return crc32c_portable(crc, data, n);
}

}  // namespace ff
