// Powers of x modulo the polynomial of CRC-32C, bits reflected: the factors that move a checksum past bytes behind it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {
namespace {

// x^n; bit 31 is the coefficient of x^0
constexpr std::uint32_t power_of_x(std::size_t n) {
  std::uint32_t r = 0x80000000u;
  for (; n > 0; --n) r = (r >> 1) ^ ((r & 1u) ? 0x82f63b78u : 0u);
  return r;
}

}  // namespace
}  // namespace ff
