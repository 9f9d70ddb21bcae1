// Codecs of tokens: every instruction set gives the bytes of the portable one, within its buffers. What the bytes are is
// the business of the twin's tests.
#include "fireflyer/collectives/kernels/tokens.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "fireflyer/collectives/kernels/kernels.hpp"

namespace {

using ff::TokenFormat;

const std::vector<std::string> formats = {"fp8", "fp8_ue8m0", "e5m6", "logfmt8", "logfmt10"};

struct Coded {
  std::vector<std::uint8_t> payload;
  std::vector<std::uint32_t> wide;  // the floats' bits, since NaNs equal nothing
  std::vector<std::uint16_t> small;
  bool operator==(const Coded&) const = default;
};

Coded coded(const std::vector<std::uint16_t>& values, std::size_t width, TokenFormat format, const std::vector<std::uint8_t>* received) {
  const std::size_t rows = values.size() / width;
  Coded found{std::vector<std::uint8_t>(rows * ff::token_row_bytes(format, width)), std::vector<std::uint32_t>(values.size()),
              std::vector<std::uint16_t>(values.size())};
  ff::encode_tokens(found.payload.data(), values.data(), rows, width, format);
  const std::uint8_t* bytes = received == nullptr ? found.payload.data() : received->data();
  ff::decode_tokens(reinterpret_cast<float*>(found.wide.data()), bytes, rows, width, format);
  ff::decode_tokens(found.small.data(), bytes, rows, width, format);
  return found;
}

template <class T>
std::vector<T> random_bits(std::size_t count, std::uint64_t& state) {
  std::vector<T> bits(count);
  for (T& one : bits) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    one = static_cast<T>(state >> 40);
  }
  return bits;
}

void instruction_sets_agree() {
  std::uint64_t state = 1;
  for (const auto& name : formats) {
    const TokenFormat format = ff::token_format_from_name(name);
    for (const std::size_t width : {128u, 384u}) {
      std::vector<std::uint16_t> values = random_bits<std::uint16_t>(width * 40, state);
      for (std::size_t i = 0; i < values.size(); ++i)  // most rows without infinities and NaNs, and of near magnitudes
        if (i / width % 4 != 0) values[i] = static_cast<std::uint16_t>((values[i] & 0x83ffu) | (0x400u * (i / width % 30)));
      const auto received = random_bits<std::uint8_t>(40 * ff::token_row_bytes(format, width), state);
      ff::set_isa("portable");
      const Coded own = coded(values, width, format, nullptr), other = coded(values, width, format, &received);
      for (const char* isa : {"avx2", "avx512", "avx512vbmi"}) {
        if (!ff::isa_supported(isa)) continue;
        ff::set_isa(isa);
        CHECK(coded(values, width, format, nullptr) == own);
        CHECK(coded(values, width, format, &received) == other);
      }
    }
  }
}

template <class Call>
bool refused(Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void wrong_widths_and_formats_are_refused() {
  std::uint16_t value = 0;
  std::uint8_t byte = 0;
  for (const std::size_t width : {0u, 100u, 129u}) {
    CHECK(refused([&] { ff::token_row_bytes(TokenFormat::fp8, width); }));
    CHECK(refused([&] { ff::encode_tokens(&byte, &value, 0, width, TokenFormat::fp8); }));
    CHECK(refused([&] { ff::decode_tokens(&value, &byte, 0, width, TokenFormat::logfmt10); }));
  }
  CHECK(refused([] { ff::token_row_bytes(static_cast<TokenFormat>(5), 128); }));
  CHECK(refused([] { ff::token_format_from_name("fp4"); }));
  CHECK(ff::token_row_bytes(TokenFormat::logfmt10, 7168) == 9184);
}

}  // namespace

int main() {
  instruction_sets_agree();
  wrong_widths_and_formats_are_refused();
  return 0;
}
