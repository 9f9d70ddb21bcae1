// The codecs of token rows as loops over the 128 values of a tile, which the compiler turns into the instructions of each
// translation unit that includes this. No loop carries a sum of floats and no product is fused with an addition, so all
// of them compute the same bits. See tokens.hpp for the formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fireflyer/collectives/kernels/tokens.hpp"

namespace ff {

struct TokenKernels {
  void (*encode[token_format_count])(std::uint8_t* payload, const std::uint16_t* values, std::size_t rows, std::size_t width);
  void (*decode_f32[token_format_count])(float* values, const std::uint8_t* payload, std::size_t rows, std::size_t width);
  void (*decode_bf16[token_format_count])(std::uint16_t* values, const std::uint8_t* payload, std::size_t rows, std::size_t width);
};

namespace {

inline constexpr int tile = static_cast<int>(token_tile);
inline constexpr std::uint32_t infinite_bf16 = 0x7f80u, nan_bits = 0x7fc00000u, least_normal_bf16 = 0x0080u;

// Without a branch: compilers vectorise loops only if nothing tempts them to jump.
inline std::uint32_t choose(bool first, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

inline std::int32_t number(std::uint32_t x) { return static_cast<std::int32_t>(x); }  // comparisons of these are faster

inline float value_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline std::uint32_t word_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }

template <class T>
T read(const std::uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <class T>
void write(std::uint8_t* p, T x) {
  std::memcpy(p, &x, sizeof x);
}

inline float canonical(float x) {
  const std::uint32_t bits = word_of(x);
  return value_of(choose(number(bits & 0x7fffffffu) > 0x7f800000, nan_bits, bits));
}

inline void put(float& out, float x) { out = x; }

// To nearest even; NaNs are made canonical before.
inline void put(std::uint16_t& out, float x) {
  const std::uint32_t bits = word_of(x);
  out = static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class Out>
void fill(Out* out, float x) {
  for (int i = 0; i < tile; ++i) put(out[i], x);
}

// The largest magnitude of a tile, as the bits of a bf16.
inline std::uint32_t largest_of(const std::uint16_t* in) {
  std::uint16_t largest = 0;
  for (int i = 0; i < tile; ++i) {
    const auto magnitude = static_cast<std::uint16_t>(in[i] & 0x7fffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Codes of more than 8 bits: the low 8 of all, then the others, `high` bits each, 8 / high of them to a byte.
template <int high>
void pack(std::uint8_t* codes, const std::uint16_t* wide) {
  constexpr int step = tile * high / 8;
  for (int i = 0; i < tile; ++i) codes[i] = static_cast<std::uint8_t>(wide[i]);
  for (int j = 0; j < step; ++j) {
    std::uint32_t byte = 0;
    for (int k = 0; k < 8 / high; ++k) byte |= static_cast<std::uint32_t>(wide[j + k * step] >> 8) << (high * k);
    codes[tile + j] = static_cast<std::uint8_t>(byte);
  }
}

template <int high>
void unpack(std::uint16_t* wide, const std::uint8_t* codes) {
  constexpr int step = tile * high / 8;
  for (int k = 0; k < 8 / high; ++k)
    for (int j = 0; j < step; ++j) {
      const std::uint32_t upper = (static_cast<std::uint32_t>(codes[tile + j]) >> (high * k)) & ((1u << high) - 1);
      wide[j + k * step] = static_cast<std::uint16_t>(codes[j + k * step] | (upper << 8));
    }
}

// A small float without infinity, of magnitudes up to its largest: exponent with this bias, mantissa, the sign above both.
template <int mantissa, int bias, int sign>
struct SmallFloat {
  static constexpr int shift = 23 - mantissa;
  static constexpr std::uint32_t least_normal = static_cast<std::uint32_t>(128 - bias) << 23;

  // Rounds to nearest even; `x` must not exceed the largest code's value by more than half a step. To the magnitude is
  // added the power of two whose last bit weighs a step of its exponent, so that the addition does the rounding.
  static std::uint32_t encode(float x) {
    constexpr std::uint32_t up = static_cast<std::uint32_t>(23 - mantissa) << 23;
    const std::uint32_t bits = word_of(x), magnitude = bits & 0x7fffffffu, own = bits & 0x7f800000u;
    const std::uint32_t exponent = choose(number(own) < number(least_normal), least_normal, own);
    const std::uint32_t steps = word_of(value_of(magnitude) + value_of(exponent + up)) - (exponent + up);
    const std::uint32_t code = steps + ((exponent - least_normal) >> shift);
    return code | ((bits >> (31 - sign)) & (1u << sign));
  }

  static float decode(std::uint32_t code) {
    const std::uint32_t magnitude = code & ((1u << sign) - 1), raised = magnitude << shift;
    const float normal = value_of(raised + (least_normal - (1u << 23)));
    const float subnormal = value_of(raised + least_normal) - value_of(least_normal);
    const std::uint32_t x = choose(number(magnitude) < (1 << mantissa), word_of(subnormal), word_of(normal));
    return value_of(x | ((code << (31 - sign)) & 0x80000000u));
  }
};

using E4M3Code = SmallFloat<3, 7, 7>;
using E5M6Code = SmallFloat<6, 15, 11>;

template <bool power_of_two>
struct Scale {
  static constexpr int bytes = power_of_two ? 1 : 4;

  // Writes the scale of a tile whose largest magnitude is `amax`; returns its reciprocal.
  static float put(std::uint8_t* header, float amax, float largest) {
    const float least = largest * 0x1p-126f;
    float scale = (amax < least ? least : amax) / largest;
    if constexpr (power_of_two) {
      const std::uint32_t exponent = (word_of(scale) + 0x7fffffu) >> 23;
      *header = static_cast<std::uint8_t>(exponent);
      scale = value_of(exponent << 23);
    } else {
      write(header, scale);
    }
    return 1.0f / scale;
  }
  static void put_nan(std::uint8_t* header) {
    if constexpr (power_of_two) {
      *header = 255;
    } else {
      write(header, nan_bits);
    }
  }
  // An exponent of 0 stands for 2^-127, as in the OCP specification.
  static float get(const std::uint8_t* header) {
    if constexpr (!power_of_two) return read<float>(header);
    const std::uint32_t exponent = *header;
    return value_of(exponent == 255 ? nan_bits : exponent == 0 ? 1u << 22
                                                               : exponent << 23);
  }
};

template <class Code, int code_bits, bool power_of_two>
struct Scaled {
  static constexpr int code_bytes = tile * code_bits / 8, header_bytes = Scale<power_of_two>::bytes;
  static constexpr float largest = code_bits == 8 ? 448.0f : 65024.0f;

  static void encode(std::uint8_t* codes, std::uint8_t* header, const std::uint16_t* in) {
    const std::uint32_t top = largest_of(in);
    if (top >= infinite_bf16) {
      std::memset(codes, 0, code_bytes);
      return Scale<power_of_two>::put_nan(header);
    }
    const float reciprocal = Scale<power_of_two>::put(header, value_of(top << 16), largest);
    if constexpr (code_bits == 8) {
      for (int i = 0; i < tile; ++i)
        codes[i] = static_cast<std::uint8_t>(Code::encode(value_of(static_cast<std::uint32_t>(in[i]) << 16) * reciprocal));
    } else {
      std::uint16_t wide[tile];
      for (int i = 0; i < tile; ++i)
        wide[i] = static_cast<std::uint16_t>(Code::encode(value_of(static_cast<std::uint32_t>(in[i]) << 16) * reciprocal));
      pack<code_bits - 8>(codes, wide);
    }
  }

  static bool has_nan(const std::uint8_t* codes) {
    std::uint8_t largest = 0;
    for (int i = 0; i < tile; ++i) {
      const auto magnitude = static_cast<std::uint8_t>(codes[i] & 0x7fu);
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest == 0x7fu;
  }

  template <class Out>
  static void decode(Out* out, const std::uint8_t* codes, const std::uint8_t* header) {
    const float scale = Scale<power_of_two>::get(header);
    if constexpr (code_bits == 8) {
      if ((word_of(scale) & 0x7f800000u) != 0x7f800000u && !has_nan(codes)) {  // a finite scale times numbers is no NaN
        for (int i = 0; i < tile; ++i) put(out[i], Code::decode(codes[i]) * scale);
        return;
      }
      for (int i = 0; i < tile; ++i) {
        const std::uint32_t code = codes[i];
        const std::uint32_t x = word_of(Code::decode(code));
        put(out[i], canonical(value_of(choose((code & 0x7fu) == 0x7fu, nan_bits, x)) * scale));
      }
    } else {
      std::uint16_t wide[tile];
      unpack<code_bits - 8>(wide, codes);
      for (int i = 0; i < tile; ++i) {
        put(out[i], canonical(Code::decode(wide[i]) * scale));
      }
    }
  }
};

// log2 of a positive normal number; wrong by at most 2.1e-6, and exact for powers of two.
inline float log2_of(std::uint32_t bits) {
  const float exponent = static_cast<float>(static_cast<std::int32_t>(bits >> 23) - 127);
  const float u = value_of((bits & 0x7fffffu) | 0x3f800000u) - 1.0f;
  float q = -0.02645741f;
  q = q * u + 0.12345138f;
  q = q * u + -0.27953802f;
  q = q * u + 0.45827075f;
  q = q * u + -0.71828191f;
  q = q * u + 1.44255314f;
  return exponent + u * q;
}

// 2^a for a in [-126, 128), with a relative error of at most 3e-6.
inline float exp2_of(float a) {
  constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  const float shifted = (a - 0.5f) + to_integer;
  const float f = a - (shifted - to_integer);
  float p = 0.01342668f;
  p = p * f + 0.05224247f;
  p = p * f + 0.24128021f;
  p = p * f + 0.69304484f;
  p = p * f + 1.0f;
  return value_of(word_of(p) + ((word_of(shifted) - word_of(to_integer)) << 23));
}

template <int bits>
struct LogFormat {
  static constexpr int code_bytes = tile * bits / 8, header_bytes = bits == 8 ? 8 : 4;
  static constexpr std::uint32_t sign_bit = 1u << (bits - 1);
  static constexpr std::int32_t last = (1 << (bits - 1)) - 1;

  // In log2: the least magnitude, and what each code adds to it.
  struct Range {
    float least, step;
    Range(std::uint32_t amin, std::uint32_t amax) {
      const float top = log2_of(amax), bottom = log2_of(amin), floor = top - 32.0f;
      least = bottom < floor ? floor : bottom;
      step = (top - least) / static_cast<float>(last - 1);
    }
  };

  static void put_header(std::uint8_t* header, std::uint32_t amin, std::uint32_t amax) {  // bits of bf16
    if constexpr (bits == 8) {
      write(header, amin << 16);
      write(header + 4, amax << 16);
    } else {
      write(header, static_cast<std::uint16_t>(amin));
      write(header + 2, static_cast<std::uint16_t>(amax));
    }
  }

  static void encode(std::uint8_t* codes, std::uint8_t* header, const std::uint16_t* in) {
    const std::uint32_t amax = largest_of(in);
    if (amax >= infinite_bf16) {
      std::memset(codes, 0, code_bytes);
      return put_header(header, nan_bits >> 16, nan_bits >> 16);
    }
    std::uint16_t above = 0xffff;  // the least normal number; what is below it wraps, and is the least no more
    for (int i = 0; i < tile; ++i) {
      const auto magnitude = static_cast<std::uint16_t>((in[i] & 0x7fffu) - least_normal_bf16);
      above = magnitude < above ? magnitude : above;
    }
    const bool empty = amax < least_normal_bf16;
    const std::uint32_t amin = empty ? 0u : above + least_normal_bf16;
    put_header(header, amin, empty ? 0u : amax);
    float bottom = 0.0f, inverse = 0.0f, rounding = 0.0f;
    if (!empty) {
      // log2((1 + 2^step) / 2) / step, as a series: a step is at most 32/126
      const Range range(amin << 16, amax << 16);
      const float y = range.step * 0.34657359f;
      bottom = range.least;
      inverse = range.step > 0.0f ? 1.0f / range.step : 0.0f;
      rounding = 1.5f - (y * 0.25f - (y * y) * (y * 0.041666668f));
    }
    std::uint16_t wide[tile];
    for (int i = 0; i < tile; ++i) {
      const std::uint32_t value = in[i], magnitude = value & 0x7fffu;
      auto k = static_cast<std::int32_t>((log2_of(magnitude << 16) - bottom) * inverse + rounding);
      k = k > 0 ? k : 0;
      k = k < last ? k : last;
      const std::uint32_t code = choose(number(magnitude) < number(least_normal_bf16), 0u, static_cast<std::uint32_t>(k));
      wide[i] = static_cast<std::uint16_t>(code | ((value >> (16 - bits)) & sign_bit));
    }
    if constexpr (bits == 8) {
      for (int i = 0; i < tile; ++i) codes[i] = static_cast<std::uint8_t>(wide[i]);
    } else {
      pack<bits - 8>(codes, wide);
    }
  }

  template <class Out>
  static void decode(Out* out, const std::uint8_t* codes, const std::uint8_t* header) {
    std::uint32_t amin, amax;
    if constexpr (bits == 8) {
      amin = read<std::uint32_t>(header) & 0x7fffffffu;
      amax = read<std::uint32_t>(header + 4) & 0x7fffffffu;
    } else {
      amin = (static_cast<std::uint32_t>(read<std::uint16_t>(header)) & 0x7fffu) << 16;
      amax = (static_cast<std::uint32_t>(read<std::uint16_t>(header + 2)) & 0x7fffu) << 16;
    }
    if (amin >= 0x7f800000u || amax >= 0x7f800000u) return fill(out, value_of(nan_bits));
    constexpr std::uint32_t least_normal = least_normal_bf16 << 16;
    const bool empty = amax < least_normal;
    const std::uint32_t kept = empty ? 0u : ~0u;
    // What a peer made up is decoded as something, too.
    const Range range(empty || amin < least_normal ? least_normal : amin, empty ? least_normal : amax);
    std::uint16_t wide[tile];
    if constexpr (bits == 8) {
      for (int i = 0; i < tile; ++i) wide[i] = codes[i];
    } else {
      unpack<bits - 8>(wide, codes);
    }
    for (int i = 0; i < tile; ++i) {
      const std::uint32_t code = wide[i], k = code & (sign_bit - 1);
      const float x = exp2_of(range.least + static_cast<float>(number(k) - 1) * range.step);
      const std::uint32_t magnitude = choose(k == 0, 0u, word_of(x)) & kept;
      put(out[i], value_of(magnitude | ((code << (32 - bits)) & 0x80000000u)));
    }
  }
};

template <class Format>
void encode_rows(std::uint8_t* payload, const std::uint16_t* values, std::size_t rows, std::size_t width) {
  const std::size_t tiles = width / token_tile;
  for (std::size_t row = 0; row < rows; ++row) {
    std::uint8_t* headers = payload + tiles * Format::code_bytes;
    for (std::size_t i = 0; i < tiles; ++i)
      Format::encode(payload + i * Format::code_bytes, headers + i * Format::header_bytes, values + i * token_tile);
    payload = headers + tiles * Format::header_bytes;
    values += width;
  }
}

template <class Format, class Out>
void decode_rows(Out* values, const std::uint8_t* payload, std::size_t rows, std::size_t width) {
  const std::size_t tiles = width / token_tile;
  for (std::size_t row = 0; row < rows; ++row) {
    const std::uint8_t* headers = payload + tiles * Format::code_bytes;
    for (std::size_t i = 0; i < tiles; ++i)
      Format::decode(values + i * token_tile, payload + i * Format::code_bytes, headers + i * Format::header_bytes);
    payload = headers + tiles * Format::header_bytes;
    values += width;
  }
}

template <class... Formats>
constexpr TokenKernels make_token_kernels() {
  static_assert(sizeof...(Formats) == token_format_count, "a TokenFormat has no codec");
  return {{encode_rows<Formats>...}, {decode_rows<Formats, float>...}, {decode_rows<Formats, std::uint16_t>...}};
}

constexpr TokenKernels token_kernels() {
  return make_token_kernels<Scaled<E4M3Code, 8, false>, Scaled<E4M3Code, 8, true>, Scaled<E5M6Code, 12, true>, LogFormat<8>, LogFormat<10>>();
}

}  // namespace
}  // namespace ff
