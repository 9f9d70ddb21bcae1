// Rows of bf16 values (tokens) in fewer bytes, bit-identical on every instruction set.
//
// A row is taken in tiles of 128 values. A row's payload is the codes of all its tiles, then the headers of all its
// tiles:
//   fp8       f8e4m3 codes of value * (1 / scale); header: the scale, a float, max(amax, 448 * 2^-126) / 448
//   fp8_ue8m0 the same with the scale rounded up to a power of two; header: its exponent + 127, a byte; 255 is NaN
//   e5m6      codes of 12 bits (5 of exponent with bias 15, no infinity, no NaN), scale a power of two likewise, of which
//             the largest code is 65024; the low 8 bits of all codes, then the high 4 of code j and of code 64 + j
//   logfmt8   sign, and 7 bits that count equal steps of log2 from the least to the largest magnitude, 0 being zero;
//             header: both magnitudes as floats
//   logfmt10  the same with 9 bits; header: both magnitudes as bf16; the low 8 bits of all codes, then the high 2 of codes
//             j, 32 + j, 64 + j and 96 + j
// In LogFMT zeros, and what is less than 2^-126, count as zero and not for the least magnitude, and so does what is less
// than 2^-32 of the largest. A tile with a NaN or an infinity decodes to NaNs. Every NaN is the positive quiet one.
// The arithmetic, to the bit, is that of fireflyer.collectives.tokens.twins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ff {

inline constexpr std::size_t token_tile = 128;

// Part of the wire format: append, never renumber.
enum class TokenFormat : std::uint8_t {
  fp8 = 0,
  fp8_ue8m0 = 1,
  e5m6 = 2,
  logfmt8 = 3,
  logfmt10 = 4
};

inline constexpr int token_format_count = 5;

TokenFormat token_format_from_name(std::string_view);  // the enumerator's name; throws std::invalid_argument

std::size_t token_row_bytes(TokenFormat, std::size_t width);  // throws std::invalid_argument: width is no multiple of a tile

// `rows` rows of `width` values, one after the other, as are their payloads. No buffer may overlap another, and none needs
// an alignment. Throw as `token_row_bytes` does. May be called from any thread.
void encode_tokens(std::uint8_t* payload, const std::uint16_t* values, std::size_t rows, std::size_t width, TokenFormat);
void decode_tokens(float* values, const std::uint8_t* payload, std::size_t rows, std::size_t width, TokenFormat);
void decode_tokens(std::uint16_t* values, const std::uint8_t* payload, std::size_t rows, std::size_t width, TokenFormat);  // rounded to bf16

}  // namespace ff
