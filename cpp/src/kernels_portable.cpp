// Reductions in plain C++: the meaning that the vector versions must reproduce bit for bit, and the path of other CPUs.
#include <bit>

#include "kernels_driver.hpp"

namespace ff {
namespace {

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// A choice without a branch: compilers vectorise the loops over conversions only if nothing tempts them to jump.
std::uint32_t choose(bool first, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

// Magnitude of x rounded to a format with `mantissa` stored bits, whose smallest normal is 2^(1 - bias). Not for NaN.
// Below that, adding `unit` (a float whose last bit weighs one subnormal step) lets the addition do the rounding.
template <int mantissa, int bias>
std::uint32_t round_magnitude(std::uint32_t magnitude) {
  constexpr int shift = 23 - mantissa;
  constexpr std::uint32_t smallest_normal = static_cast<std::uint32_t>(128 - bias) << 23;
  constexpr std::uint32_t unit = static_cast<std::uint32_t>(127 + 24 - bias - mantissa) << 23;
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + float_of(unit)) - unit;
  const std::uint32_t odd = (magnitude >> shift) & 1u;
  const std::uint32_t rounded = (magnitude + (1u << (shift - 1)) - 1u + odd) >> shift;
  const std::uint32_t normal = rounded - (static_cast<std::uint32_t>(127 - bias) << mantissa);
  return choose(magnitude < smallest_normal, subnormal, normal);
}

template <int mantissa, int bias, std::uint32_t largest, std::uint32_t nan, int sign_shift>
std::uint32_t encode(float x) {
  const std::uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const std::uint32_t rounded = round_magnitude<mantissa, bias>(magnitude);
  const std::uint32_t code = choose(rounded < largest, rounded, largest) | (bits_of(x) >> 31) << sign_shift;
  return choose(magnitude > 0x7f800000u, nan, code);
}

float decode_f16(std::uint32_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  const std::uint32_t special = choose(magnitude >= 0x7c00u, 112u << 23, 0);  // infinities and NaNs go up twice as far
  const std::uint32_t normal = (magnitude << 13) + (112u << 23) + special;
  const std::uint32_t subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  return float_of(sign | choose(magnitude >= 0x400u, normal, subnormal));
}

// The bits of an e4m3 magnitude, seven places up, are the f16 of its value times 2^-8.
float decode_e4m3(std::uint32_t b) {
  const float value = decode_f16((b & 0x80u) << 8 | (b & 0x7fu) << 7) * 256.0f;
  return float_of(choose((b & 0x7fu) == 0x7fu, 0x7fc00000u, bits_of(value)));
}

template <class T, std::size_t n>
struct Lanes {
  static constexpr std::size_t lanes = n;
  T v[n];
  void add(const Lanes& other) {
    for (std::size_t i = 0; i < n; ++i) v[i] += other.v[i];
  }
};

using Floats = Lanes<float, 64>;

template <class T, std::size_t n>
struct Plain {  // integers unsigned: overflow wraps
  using Block = Lanes<T, n>;
  static constexpr std::size_t size = sizeof(T);
  static Block load(const std::uint8_t* p) {
    Block b;
    std::memcpy(b.v, p, sizeof b.v);
    return b;
  }
  static void store(std::uint8_t* p, const Block& b) { std::memcpy(p, b.v, sizeof b.v); }
};

struct CanonicalF64 : Plain<double, 32> {
  static void store(std::uint8_t* p, Block b) {
    for (auto& x : b.v) x = x == x ? x : std::bit_cast<double>(std::uint64_t{0x7ff8} << 48);
    std::memcpy(p, b.v, sizeof b.v);
  }
};

struct CanonicalF32 : Plain<float, 64> {
  static void store(std::uint8_t* p, Block b) {
    for (auto& x : b.v) x = x == x ? x : float_of(0x7fc00000u);
    std::memcpy(p, b.v, sizeof b.v);
  }
};

template <class Bits, float (*decode)(std::uint32_t), std::uint32_t (*encode)(float)>
struct Small {
  using Block = Floats;
  static constexpr std::size_t size = sizeof(Bits);
  static Block load(const std::uint8_t* p) {
    Bits raw[Block::lanes];
    std::memcpy(raw, p, sizeof raw);
    Block b;
    for (std::size_t i = 0; i < Block::lanes; ++i) b.v[i] = decode(raw[i]);
    return b;
  }
  static void store(std::uint8_t* p, const Block& b) {
    Bits raw[Block::lanes];
    for (std::size_t i = 0; i < Block::lanes; ++i) raw[i] = static_cast<Bits>(encode(b.v[i]));
    std::memcpy(p, raw, sizeof raw);
  }
};

float decode_bf16(std::uint32_t b) { return float_of(b << 16); }
float decode_e5m2(std::uint32_t b) { return decode_f16(b << 8); }

std::uint32_t encode_bf16(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return choose((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, rounded);
}

struct Codecs {
  using F64 = CanonicalF64;
  using F32 = CanonicalF32;
  using F16 = Small<std::uint16_t, decode_f16, encode<10, 15, 0x7c00, 0x7e00, 15>>;
  using BF16 = Small<std::uint16_t, decode_bf16, encode_bf16>;
  using E4M3 = Small<std::uint8_t, decode_e4m3, encode<3, 7, 0x7e, 0x7f, 7>>;
  using E5M2 = Small<std::uint8_t, decode_e5m2, encode<2, 15, 0x7c, 0x7f, 7>>;
  using I32 = Plain<std::uint32_t, 64>;
  using I64 = Plain<std::uint64_t, 32>;
};

}  // namespace

const KernelTable& portable_kernels() {
  static constexpr KernelTable table = make_table<Codecs>("portable");
  return table;
}

}  // namespace ff
