#include "fireflyer/base/ranges.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "fireflyer/base/crc32c.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ff {

namespace {

constexpr std::size_t long_bytes = 1 << 16;     // shorter ranges stay in the caches
constexpr std::size_t thread_bytes = 1 << 20;   // fewer bytes than that are not worth another thread

#if defined(__x86_64__)
void stream(std::uint8_t* to, const std::uint8_t* from, std::size_t n) {
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) & 63;
  std::memcpy(to, from, head);
  to += head, from += head, n -= head;
  for (; n >= 64; to += 64, from += 64, n -= 64) {
    __m128i line[4];
    for (int i = 0; i < 4; ++i) line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
  }
  _mm_sfence();
  std::memcpy(to, from, n);
}
#else
void stream(std::uint8_t* to, const std::uint8_t* from, std::size_t n) { std::memcpy(to, from, n); }
#endif

// Bytes [begin, end) of all ranges, counted one after the other.
void copy_part(void* const* targets, const void* const* sources, const std::uint64_t* sizes, std::size_t n, std::uint64_t begin, std::uint64_t end) {
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < n && at < end; at += sizes[i++]) {
    if (at + sizes[i] <= begin) continue;
    const std::uint64_t skip = begin > at ? begin - at : 0, stop = std::min(sizes[i], end - at);
    if (skip >= stop) continue;
    auto* to = static_cast<std::uint8_t*>(targets[i]) + skip;
    const auto* from = static_cast<const std::uint8_t*>(sources[i]) + skip;
    if (stop - skip >= long_bytes)
      stream(to, from, stop - skip);
    else
      std::memcpy(to, from, stop - skip);
  }
}

}  // namespace

void copy_ranges(void* const* targets, const void* const* sources, const std::uint64_t* sizes, std::size_t n, int threads) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < n; ++i) total += sizes[i];
  const std::uint64_t parts = std::clamp<std::uint64_t>(total / thread_bytes, 1, static_cast<std::uint64_t>(std::max(threads, 1)));
  const std::uint64_t each = (total / parts + 63) & ~std::uint64_t{63};
  std::vector<std::jthread> others;
  std::uint64_t done = 0;
  for (; others.size() + 1 < parts; done += each)
    others.emplace_back([=] { copy_part(targets, sources, sizes, n, done, std::min(done + each, total)); });
  copy_part(targets, sources, sizes, n, done, total);
}

void crc32c_ranges(std::uint32_t* sums, const std::uint8_t* data, const std::uint64_t* begins, const std::uint64_t* sizes,
                   void* const* targets, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    void* to = targets == nullptr ? nullptr : targets[i];
    sums[i] = to == nullptr ? crc32c(sums[i], data + begins[i], sizes[i]) : crc32c_copy(sums[i], to, data + begins[i], sizes[i]);
  }
}

}  // namespace ff
