// CRC-32C by folding: with carry-less products of four 128-bit lanes at once (VPCLMULQDQ in AVX-512 registers), 512 bytes
// are moved onto the 512 behind them. What is left when the data ends is short and goes through the crc32 instruction.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// The intrinsics' own undefined operands, in GCC 12's header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstring>

#include "crc32c_powers.hpp"

namespace ff {

std::uint32_t crc32c_sse42(std::uint32_t crc, const void* data, std::size_t n);

namespace {

constexpr int registers = 8;
constexpr std::size_t register_bytes = 64, stride = registers * register_bytes;

// In each lane, the first eight bytes weigh x^64 more than the last eight. Reflection costs one bit in a product, and a
// factor in the lower half of its 64 bits weighs x^32 less: hence 33.
template <std::size_t bytes>
__m512i factors() {
  constexpr long long of_last = power_of_x(8 * bytes - 33), of_first = power_of_x(8 * bytes + 31);
  return _mm512_set_epi64(of_last, of_first, of_last, of_first, of_last, of_first, of_last, of_first);
}

// `later`, with `x` moved onto it from as many bytes before as the factors were made for
__m512i folded(__m512i x, __m512i by, __m512i later) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11), later, 0x96);
}

template <bool copies>
__m512i taken(std::uint8_t* to, const std::uint8_t* from) {
  const __m512i x = _mm512_loadu_si512(from);
  if constexpr (copies) _mm512_storeu_si512(to, x);
  return x;
}

std::uint64_t of_register(__m512i x) {
  std::uint64_t words[8], crc = 0;
  std::memcpy(words, &x, sizeof words);
  for (const std::uint64_t word : words) crc = _mm_crc32_u64(crc, word);
  return crc;
}

template <bool copies>
std::uint32_t fold(std::uint32_t crc, std::uint8_t* to, const std::uint8_t* from, std::size_t n) {
  const __m512i by_stride = factors<stride>(), by_register = factors<register_bytes>();
  if (n >= stride) {
    __m512i x[registers];
    for (int i = 0; i < registers; ++i) x[i] = taken<copies>(to + i * register_bytes, from + i * register_bytes);
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~crc))));
    std::size_t at = stride;
    for (; at + stride <= n; at += stride)
      for (int i = 0; i < registers; ++i)
        x[i] = folded(x[i], by_stride, taken<copies>(to + at + i * register_bytes, from + at + i * register_bytes));
    __m512i sum = x[0];
    for (int i = 1; i < registers; ++i) sum = folded(sum, by_register, x[i]);
    for (; at + register_bytes <= n; at += register_bytes) sum = folded(sum, by_register, taken<copies>(to + at, from + at));
    crc = ~static_cast<std::uint32_t>(of_register(sum));
    to += at, from += at, n -= at;
  }
  if constexpr (copies) std::memcpy(to, from, n);
  return crc32c_sse42(crc, from, n);
}

}  // namespace

std::uint32_t crc32c_vpclmul(std::uint32_t crc, const void* data, std::size_t n) {
  return fold<false>(crc, nullptr, static_cast<const std::uint8_t*>(data), n);
}

std::uint32_t crc32c_copy_vpclmul(std::uint32_t crc, void* to, const void* from, std::size_t n) {
  return fold<true>(crc, static_cast<std::uint8_t*>(to), static_cast<const std::uint8_t*>(from), n);
}

}  // namespace ff
#endif
