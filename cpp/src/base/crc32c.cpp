// CRC-32C by table: eight bytes a step.
#include "fireflyer/base/crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

#include "crc32c_powers.hpp"
#include "fireflyer/base/cpu.hpp"

namespace ff {

#if defined(__x86_64__)
std::uint32_t crc32c_sse42(std::uint32_t crc, const void* data, std::size_t n);
std::uint32_t crc32c_vpclmul(std::uint32_t crc, const void* data, std::size_t n);
std::uint32_t crc32c_copy_vpclmul(std::uint32_t crc, void* to, const void* from, std::size_t n);
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

namespace {

using Checksum = std::uint32_t (*)(std::uint32_t, const void*, std::size_t);
using Copy = std::uint32_t (*)(std::uint32_t, void*, const void*, std::size_t);

struct Choice {
  Checksum checksum;
  Copy copy;
};

// Copies as much as a first-level cache holds, then reads it again from there.
template <Checksum checksum>
std::uint32_t copy_by_pieces(std::uint32_t crc, void* to, const void* from, std::size_t n) {
  constexpr std::size_t piece = 16384;
  auto* target = static_cast<std::uint8_t*>(to);
  const auto* source = static_cast<const std::uint8_t*>(from);
  while (n > 0) {
    const std::size_t part = n < piece ? n : piece;
    std::memcpy(target, source, part);
    crc = checksum(crc, target, part);
    target += part, source += part, n -= part;
  }
  return crc;
}

Choice choose() {
#if defined(__x86_64__)
  const CpuFeatures cpu = cpu_features();
  const bool sse42 = cpu.sse42 && cpu.pclmul;
  if (sse42 && cpu.vpclmul && cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512dq)
    return {crc32c_vpclmul, crc32c_copy_vpclmul};
  if (sse42) return {crc32c_sse42, copy_by_pieces<crc32c_sse42>};
#endif
  return {crc32c_portable, copy_by_pieces<crc32c_portable>};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t n) { return chosen().checksum(crc, data, n); }

std::uint32_t crc32c_copy(std::uint32_t crc, void* to, const void* from, std::size_t n) { return chosen().copy(crc, to, from, n); }

namespace {

// a * b modulo the polynomial; bit 31 is the coefficient of x^0
constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r = 0;
  for (; b != 0; b <<= 1, a = (a >> 1) ^ ((a & 1u) ? 0x82f63b78u : 0u))
    if (b & 0x80000000u) r ^= a;
  return r;
}

// squares[k]: x^(8 * 2^k), which moves a checksum past 2^k bytes
constexpr std::array<std::uint32_t, 64> make_squares() {
  std::array<std::uint32_t, 64> squares{};
  squares[0] = power_of_x(8);
  for (std::size_t k = 1; k < squares.size(); ++k) squares[k] = product(squares[k - 1], squares[k - 1]);
  return squares;
}

constexpr std::array<std::uint32_t, 64> squares = make_squares();

}  // namespace

std::uint32_t crc32c_joined(std::uint32_t a, std::uint32_t b, std::size_t bytes_of_b) {
  for (std::size_t k = 0; bytes_of_b != 0; ++k, bytes_of_b >>= 1)
    if (bytes_of_b & 1u) a = product(a, squares[k]);
  return a ^ b;
}

}  // namespace ff
