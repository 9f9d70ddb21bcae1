// CRC-32C with the crc32 instruction. It takes one word a cycle but answers after three, so three stretches of the data
// run side by side; a carry-less product then moves the first two checksums past the bytes that follow them.
#if defined(__x86_64__)
#include <nmmintrin.h>
#include <wmmintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "crc32c_powers.hpp"

namespace ff {
namespace {

std::uint64_t word_at(const std::uint8_t* p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// What the crc32 instruction, fed with this word at state 0, turns into `crc` followed by `bytes` zero bytes.
// Reflection costs one bit in the product and the instruction itself multiplies by x^32: hence 33.
template <std::size_t bytes>
std::uint64_t moved(std::uint64_t crc) {
  constexpr std::uint32_t factor = power_of_x(8 * bytes - 33);
  const __m128i a = _mm_cvtsi64_si128(static_cast<long long>(crc));
  const __m128i b = _mm_cvtsi32_si128(static_cast<int>(factor));
  return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_clmulepi64_si128(a, b, 0)));
}

// Consumes whole triples of `stretch` bytes.
template <std::size_t stretch>
std::uint64_t triples(std::uint64_t crc, const std::uint8_t*& p, std::size_t& n) {
  for (; n >= 3 * stretch; n -= 3 * stretch, p += 3 * stretch) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t i = 0; i < stretch; i += 8) {
      crc = _mm_crc32_u64(crc, word_at(p + i));
      second = _mm_crc32_u64(second, word_at(p + stretch + i));
      third = _mm_crc32_u64(third, word_at(p + 2 * stretch + i));
    }
    crc = _mm_crc32_u64(0, moved<2 * stretch>(crc) ^ moved<stretch>(second)) ^ third;
  }
  return crc;
}

}  // namespace

std::uint32_t crc32c_sse42(std::uint32_t start, const void* data, std::size_t n) {
  const auto* p = static_cast<const std::uint8_t*>(data);
  std::uint64_t crc = ~start;
  crc = triples<4096>(crc, p, n);
  crc = triples<256>(crc, p, n);
  for (; n >= 8; n -= 8, p += 8) crc = _mm_crc32_u64(crc, word_at(p));
  for (; n > 0; --n, ++p) crc = _mm_crc32_u8(static_cast<std::uint32_t>(crc), *p);
  return ~static_cast<std::uint32_t>(crc);
}

}  // namespace ff
#endif
