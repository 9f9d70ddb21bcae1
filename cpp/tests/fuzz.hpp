// Hostile bytes from right ones, the same for the same seed: fields get numbers at which something may overflow, frames are
// changed, cut, repeated and swapped.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace fuzz {

using Bytes = std::vector<char>;

class Chance {
 public:
  explicit Chance(std::uint64_t seed) : engine_(seed * 2 + 1) {}

  std::uint64_t next() { return engine_(); }
  std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

  // A number that something may trip over, most often close to `right`.
  std::uint64_t telling(std::uint64_t right) {
    constexpr std::array<std::uint64_t, 16> numbers{0, 1, 2, 63, 64, 255, 4096, 65535, 65536, 262144, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff};
    switch (below(5)) {
      case 0: return right + below(9) - 4;
      case 1: return right ^ (std::uint64_t{1} << below(64));
      case 2: return right * 2;
      case 3: return numbers[below(numbers.size())];
      default: return next() >> below(64);
    }
  }

  template <class T>
  void alter(T& field) {
    std::uint64_t number = 0;
    static_assert(sizeof field <= sizeof number);
    std::memcpy(&number, &field, sizeof field);
    number = telling(number);
    std::memcpy(&field, &number, sizeof field);
  }

  // Without knowledge of what the bytes mean.
  void damage(Bytes& data) {
    if (data.empty()) return;
    const std::size_t at = below(data.size());
    switch (below(4)) {
      case 0: data[at] = static_cast<char>(data[at] ^ (1 << below(8))); break;
      case 1: data.resize(at); break;
      case 2: data.insert(data.begin() + static_cast<std::ptrdiff_t>(at), static_cast<char>(next())); break;
      default: std::fill_n(data.begin() + static_cast<std::ptrdiff_t>(at), std::min<std::size_t>(8, data.size() - at), static_cast<char>(one_in(2) ? 0xff : 0)); break;
    }
  }

 private:
  std::mt19937_64 engine_;
};

template <class T>
void append(Bytes& data, const T& value) {
  const auto* const from = reinterpret_cast<const char*>(&value);
  data.insert(data.end(), from, from + sizeof value);
}

// PROGRAM [FIRST COUNT]: which seeds to run.
struct Seeds {
  std::uint64_t first = 1, count;

  Seeds(int argc, char** argv, std::uint64_t usual) : count(usual) {
    if (argc > 2) first = std::strtoull(argv[1], nullptr, 10), count = std::strtoull(argv[2], nullptr, 10);
  }
};

}  // namespace fuzz
