// Reductions with AVX-512 and its byte permutations (VBMI), which look fp8 up in tables of 128 entries held in registers.
#if defined(__x86_64__)
#include "avx512.hpp"

namespace ff {
namespace {

struct ByteTable {
  alignas(64) std::uint8_t high[128];
  alignas(64) std::uint8_t low[128];
};

// The bf16 bits of each magnitude, NaN included: every fp8 is a bf16.
template <int mantissa, int bias, int largest_finite, bool has_infinity>
constexpr ByteTable make_byte_table() {
  ByteTable table{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
    if (exponent == 0 && fraction != 0) {
      for (exponent = 1; fraction < (1 << mantissa); --exponent) fraction *= 2;
      fraction -= 1 << mantissa;
    }
    int bits = code == 0 ? 0 : (exponent - bias + 127) << 7 | fraction << (7 - mantissa);
    if (code > largest_finite) bits = has_infinity && code == largest_finite + 1 ? 0x7f80 : 0x7fc0;
    table.high[code] = static_cast<std::uint8_t>(bits >> 8);
    table.low[code] = static_cast<std::uint8_t>(bits & 0xff);
  }
  return table;
}

struct ByteOrder {
  alignas(64) std::uint8_t at[64];
};

// Where bytes must stand before high and low halves are interleaved and even and odd bf16 taken apart, so that the i-th
// register of floats then holds elements 16 i to 16 i + 15 in order.
constexpr ByteOrder make_decode_order() {
  ByteOrder order{};
  for (int lane = 0; lane < 4; ++lane)
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 4; ++i) order.at[16 * lane + 8 * (i / 2) + 2 * j + i % 2] = static_cast<std::uint8_t>(16 * i + 4 * lane + j);
  return order;
}

// Byte `of` of each of 32 words in two registers.
constexpr ByteOrder make_gather_order(int of) {
  ByteOrder order{};
  for (int i = 0; i < 64; ++i) order.at[i] = static_cast<std::uint8_t>((4 * i + of) & 127);
  return order;
}

constexpr ByteOrder decode_order = make_decode_order();
constexpr ByteOrder lowest_bytes = make_gather_order(0);
constexpr ByteOrder highest_bytes = make_gather_order(3);

__m512i gather(const __m512i* v, const ByteOrder& order) {
  const __m512i index = load512(order.at);
  const __m512i first = _mm512_permutex2var_epi8(v[0], index, v[1]), second = _mm512_permutex2var_epi8(v[2], index, v[3]);
  return _mm512_inserti64x4(first, _mm512_castsi512_si256(second), 1);
}

// `ceiling` is a magnitude that rounds to the largest code; `safe` is the largest magnitude that neither saturates nor is NaN.
template <int mantissa, int bias, int largest_finite, bool has_infinity, std::uint32_t ceiling, std::uint32_t safe>
struct Byte : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 1;
  static constexpr ByteTable table = make_byte_table<mantissa, bias, largest_finite, has_infinity>();

  static Block load(const std::uint8_t* p) {
    const __m512i raw = _mm512_permutexvar_epi8(load512(decode_order.at), load512(p));
    const __m512i low = _mm512_permutex2var_epi8(load512(table.low), raw, load512(table.low + 64));
    const __m512i magnitude = _mm512_permutex2var_epi8(load512(table.high), raw, load512(table.high + 64));
    const __m512i high = with_sign(magnitude, raw);
    const __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
    const __m512i upper = words(0xffff0000u);
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(first, 16)), _mm512_castsi512_ps(_mm512_and_si512(first, upper)),
             _mm512_castsi512_ps(_mm512_slli_epi32(second, 16)), _mm512_castsi512_ps(_mm512_and_si512(second, upper))}};
  }

  // A float 2^(23 - mantissa) times as large as the power of two below x has a last bit that weighs as much as that of x
  // in this format; added, it makes the FPU round, and its low bits then count the steps above that power.
  static Encoded<1> encode(const Block& b, std::uint64_t& saturated) {
    constexpr std::uint32_t smallest_exponent = 128 - bias, up = 23 - mantissa;
    constexpr std::uint32_t offset = (256u * 256u - (smallest_exponent << mantissa)) & 0xffu;
    __m512i bits[4], codes[4];
    __m512i worst = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) {
      bits[i] = _mm512_castps_si512(b.v[i]);
      const __m512i magnitude = _mm512_and_si512(bits[i], words(0x7fffffffu));
      worst = _mm512_max_epu32(worst, magnitude);
      const __m512i clamped = _mm512_min_epu32(magnitude, words(ceiling));
      const __m512i exponent = _mm512_max_epu32(_mm512_and_si512(clamped, words(0x7f800000u)), words(smallest_exponent << 23));
      const __m512i anchor = _mm512_add_epi32(exponent, words(up << 23));
      const __m512i steps = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(clamped), _mm512_castsi512_ps(anchor)));
      codes[i] = _mm512_add_epi32(steps, _mm512_srli_epi32(exponent, up));
    }
    const __m512i code = _mm512_add_epi8(gather(codes, lowest_bytes), _mm512_set1_epi8(static_cast<char>(offset)));
    Encoded<1> e{{with_sign(code, gather(bits, highest_bytes))}};
    if (__builtin_expect(_mm512_cmpgt_epu32_mask(worst, words(safe)) != 0, 0)) mend(e, bits, saturated);
    return e;
  }

 private:
  static __m512i with_sign(__m512i magnitude, __m512i signs) {  // magnitude | (signs & 0x80)
    return _mm512_ternarylogic_epi32(magnitude, signs, _mm512_set1_epi8(-128), 0xf8);
  }

  static void mend(Encoded<1>& e, const __m512i* bits, std::uint64_t& saturated) {
    __mmask64 nans = 0;
    for (int i = 0; i < 4; ++i) {
      const __m512i magnitude = _mm512_and_si512(bits[i], words(0x7fffffffu));
      const __mmask16 nan = _mm512_cmpgt_epu32_mask(magnitude, words(0x7f800000u));
      __mmask16 outside = _mm512_cmpgt_epu32_mask(magnitude, words(safe)) & static_cast<__mmask16>(~nan);
      if (has_infinity) outside &= _mm512_cmplt_epu32_mask(magnitude, words(0x7f800000u));
      saturated += static_cast<std::uint64_t>(__builtin_popcount(outside));
      nans |= static_cast<__mmask64>(nan) << (16 * i);
    }
    e.v[0] = _mm512_mask_mov_epi8(e.v[0], nans, _mm512_set1_epi8(0x7f));
  }
};

using E4M3 = Byte<3, 7, 0x7e, false, 0x43e00000u, 0x43e80000u>;   // 448, 464
using E5M2 = Byte<2, 15, 0x7b, true, 0x47700000u, 0x476fffffu>;  // 61440, the float below it

}  // namespace

const KernelTable& avx512vbmi_kernels() {
  static constexpr KernelTable table = make_table<WithBytes<E4M3, E5M2>>("avx512vbmi");
  return table;
}

}  // namespace ff
#endif
