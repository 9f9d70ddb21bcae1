// Reductions in plain C++: the meaning that the vector versions must reproduce bit for bit, and the path of other CPUs.
#include <bit>
#include <type_traits>

#include "driver.hpp"

namespace ff {
namespace {

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

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

// Whether the magnitude of x, as bits, lies in [low, high].
template <std::uint32_t low, std::uint32_t high>
std::uint32_t within(float x) {
  return (bits_of(x) & 0x7fffffffu) - low <= high - low;
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

// Of equal numbers, which differ only if they are zeros, one comparison picks the first and the other the second; their
// bits together then have the sign wanted. Where one is NaN they pick different operands, and the result must be NaN.
template <ReduceOp op, class T, class Bits>
T float_combined(T a, T b) {
  if constexpr (op == ReduceOp::sum) return a + b;
  if constexpr (op == ReduceOp::product) return a * b;
  const Bits unordered = Bits{0} - static_cast<Bits>(!(a == a) | !(b == b));
  if constexpr (op == ReduceOp::min)
    return std::bit_cast<T>(unordered | std::bit_cast<Bits>(a < b ? a : b) | std::bit_cast<Bits>(b < a ? b : a));
  return std::bit_cast<T>(unordered | (std::bit_cast<Bits>(a > b ? a : b) & std::bit_cast<Bits>(b > a ? b : a)));
}

template <ReduceOp op, class T>
T combined(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
    return float_combined<op, float, std::uint32_t>(a, b);
  } else if constexpr (std::is_same_v<T, double>) {
    return float_combined<op, double, std::uint64_t>(a, b);
  } else {
    using U = std::make_unsigned_t<T>;  // so that overflow wraps
    if constexpr (op == ReduceOp::sum) return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    if constexpr (op == ReduceOp::product) return static_cast<T>(static_cast<U>(static_cast<U>(a) * static_cast<U>(b)));
    if constexpr (op == ReduceOp::min) return b < a ? b : a;
    if constexpr (op == ReduceOp::max) return b > a ? b : a;
    if constexpr (op == ReduceOp::band) return static_cast<T>(a & b);
    if constexpr (op == ReduceOp::bor) return static_cast<T>(a | b);
    if constexpr (op == ReduceOp::bxor) return static_cast<T>(a ^ b);
  }
}

template <class T>
struct Lanes {
  static constexpr std::size_t lanes = 256 / sizeof(T);
  static constexpr bool floating = std::is_floating_point_v<T>;
  using Element = T;
  T v[lanes];
  template <ReduceOp op>
  void combine(const Lanes& other) {
    for (std::size_t i = 0; i < lanes; ++i) v[i] = combined<op>(v[i], other.v[i]);
  }
  void divide(double by) {
    for (auto& x : v) x /= static_cast<T>(by);
  }
  void scale(double by) {
    for (auto& x : v) x *= static_cast<T>(by);
  }
  std::uint32_t largest_magnitude() const {
    std::uint32_t largest = 0;
    for (const auto& x : v) largest = (bits_of(x) & 0x7fffffffu) > largest ? bits_of(x) & 0x7fffffffu : largest;
    return largest;
  }
};

using Floats = Lanes<float>;

template <class T>
struct Integer {
  using Block = Lanes<T>;
  static constexpr std::size_t size = sizeof(T);
  static Block load(const std::uint8_t* p) {
    Block b;
    std::memcpy(b.v, p, sizeof b.v);
    return b;
  }
  struct Stored : Block {
    void store(std::uint8_t* p) const { std::memcpy(p, this->v, sizeof this->v); }
    void stream(std::uint8_t* p) const { store(p); }
  };
  static void drain() {}
  static Stored encode(const Block& b, std::uint64_t&) { return Stored{b}; }
};

template <class T, class Bits, Bits nan>
struct Float : Integer<T> {
  static typename Integer<T>::Stored encode(const Lanes<T>& b, std::uint64_t&) {
    typename Integer<T>::Stored stored{b};
    for (auto& x : stored.v) x = x == x ? x : std::bit_cast<T>(nan);
    return stored;
  }
};

struct NothingSaturates {
  static constexpr std::uint32_t of(float) { return 0; }
};

template <std::uint32_t low, std::uint32_t high>
struct SaturatesWithin {
  static std::uint32_t of(float x) { return within<low, high>(x); }
};

template <class Bits, float (*decode)(std::uint32_t), std::uint32_t (*round)(float), class Saturates = NothingSaturates>
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
  struct Stored {
    Bits v[Block::lanes];
    void store(std::uint8_t* p) const { std::memcpy(p, v, sizeof v); }
    void stream(std::uint8_t* p) const { store(p); }
  };
  static void drain() {}
  static Stored encode(const Block& b, std::uint64_t& saturated) {
    Stored stored;
    std::uint32_t count = 0;
    for (std::size_t i = 0; i < Block::lanes; ++i) stored.v[i] = static_cast<Bits>(round(b.v[i]));
    for (std::size_t i = 0; i < Block::lanes; ++i) count += Saturates::of(b.v[i]);
    saturated += count;
    return stored;
  }
};

float decode_bf16(std::uint32_t b) { return float_of(b << 16); }
float decode_e5m2(std::uint32_t b) { return decode_f16(b << 8); }

std::uint32_t encode_bf16(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return choose((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, rounded);
}

// From half-way between 448 and the 480 that would follow, excluded, to infinity; from half-way between 57344 and the
// 65536 that would follow, which rounds up, to the largest float.
using E4M3Saturates = SaturatesWithin<0x43e80001u, 0x7f800000u>;
using E5M2Saturates = SaturatesWithin<0x47700000u, 0x7f7fffffu>;

struct Codecs {
  using F64 = Float<double, std::uint64_t, std::uint64_t{0x7ff8} << 48>;
  using F32 = Float<float, std::uint32_t, 0x7fc00000u>;
  using F16 = Small<std::uint16_t, decode_f16, encode<10, 15, 0x7c00, 0x7e00, 15>>;
  using BF16 = Small<std::uint16_t, decode_bf16, encode_bf16>;
  using E4M3 = Small<std::uint8_t, decode_e4m3, encode<3, 7, 0x7e, 0x7f, 7>, E4M3Saturates>;
  using E5M2 = Small<std::uint8_t, decode_e5m2, encode<2, 15, 0x7c, 0x7f, 7>, E5M2Saturates>;
  using I32 = Integer<std::int32_t>;
  using I64 = Integer<std::int64_t>;
  using I8 = Integer<std::int8_t>;
  using U8 = Integer<std::uint8_t>;
};

}  // namespace

const KernelTable& portable_kernels() {
  static constexpr KernelTable table = make_table<Codecs>("portable");
  return table;
}

}  // namespace ff
