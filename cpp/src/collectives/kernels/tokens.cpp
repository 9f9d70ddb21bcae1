// Checks arguments and calls the codecs of the instruction set in use.
#include "fireflyer/collectives/kernels/tokens.hpp"

#include <stdexcept>
#include <string>

#include "active.hpp"

namespace ff {
namespace {

struct FormatInfo {
  const char* name;
  std::size_t tile_bytes;
};

constexpr FormatInfo formats[token_format_count] = {
    {"fp8", 128 + 4},
    {"fp8_ue8m0", 128 + 1},
    {"e5m6", 192 + 1},
    {"logfmt8", 128 + 8},
    {"logfmt10", 160 + 4},
};

int index_of(TokenFormat format) {
  const auto index = static_cast<int>(format);
  if (index >= token_format_count) throw std::invalid_argument("token format " + std::to_string(index) + " is not known");
  return index;
}

int checked(TokenFormat format, std::size_t width) {
  token_row_bytes(format, width);
  return index_of(format);
}

}  // namespace

TokenFormat token_format_from_name(std::string_view name) {
  std::string known;
  for (int i = 0; i < token_format_count; ++i) {
    if (name == formats[i].name) return static_cast<TokenFormat>(i);
    known += std::string(" ") + formats[i].name;
  }
  throw std::invalid_argument("token format '" + std::string(name) + "' is not one of" + known);
}

std::size_t token_row_bytes(TokenFormat format, std::size_t width) {
  const FormatInfo& info = formats[index_of(format)];
  if (width == 0 || width % token_tile != 0)
    throw std::invalid_argument("a row of " + std::to_string(width) + " values is not made of tiles of " + std::to_string(token_tile));
  return width / token_tile * info.tile_bytes;
}

void encode_tokens(std::uint8_t* payload, const std::uint16_t* values, std::size_t rows, std::size_t width, TokenFormat format) {
  active_kernels().tokens.encode[checked(format, width)](payload, values, rows, width);
}

void decode_tokens(float* values, const std::uint8_t* payload, std::size_t rows, std::size_t width, TokenFormat format) {
  active_kernels().tokens.decode_f32[checked(format, width)](values, payload, rows, width);
}

void decode_tokens(std::uint16_t* values, const std::uint8_t* payload, std::size_t rows, std::size_t width, TokenFormat format) {
  active_kernels().tokens.decode_bf16[checked(format, width)](values, payload, rows, width);
}

}  // namespace ff
