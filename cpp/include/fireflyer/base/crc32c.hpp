// CRC-32C (Castagnoli; RFC 3720 appendix B.4), the checksum of every payload and record.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

// crc32c(0, "123456789", 9) == 0xE3069283; chainable: crc32c(crc32c(0, a), b) is the sum of a followed by b
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t n);

// Copies n bytes from `from` to `to`, which do not overlap, and returns crc32c(crc, from, n), in one pass over memory.
std::uint32_t crc32c_copy(std::uint32_t crc, void* to, const void* from, std::size_t n);

// crc32c(0, a followed by b) from crc32c(0, a), crc32c(0, b) and the number of bytes of b.
std::uint32_t crc32c_joined(std::uint32_t a, std::uint32_t b, std::size_t bytes_of_b);

std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t n);  // the same on any CPU, slower

}  // namespace ff
