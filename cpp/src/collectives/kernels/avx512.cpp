// Reductions with AVX-512 (F, BW, VL, DQ) where the CPU lacks the byte permutations of VBMI.
#if defined(__x86_64__)
#include "avx512.hpp"

namespace ff {
namespace {

__m256i low(__m512i x) { return _mm512_castsi512_si256(x); }
__m256i high(__m512i x) { return _mm512_extracti64x4_epi64(x, 1); }

void widen_halves(Floats& b, __m512i first, __m512i second) {
  b.v[0] = _mm512_cvtph_ps(low(first));
  b.v[1] = _mm512_cvtph_ps(high(first));
  b.v[2] = _mm512_cvtph_ps(low(second));
  b.v[3] = _mm512_cvtph_ps(high(second));
}

// See round_magnitude in portable.cpp; low_bits and high_bits bound the magnitudes that leave the range.
template <int mantissa, int bias, std::uint32_t largest, std::uint32_t low_bits, std::uint32_t high_bits>
Encoded<1> encode_bytes(const Floats& b, std::uint64_t& saturated) {
  constexpr int shift = 23 - mantissa;
  const __m512i unit = words(static_cast<std::uint32_t>(127 + 24 - bias - mantissa) << 23);
  __m128i codes[4];
  for (int i = 0; i < 4; ++i) {
    const __m512i bits = _mm512_castps_si512(b.v[i]);
    const __m512i magnitude = _mm512_and_si512(bits, words(0x7fffffffu));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, shift), words(1));
    const __m512i up = _mm512_add_epi32(magnitude, _mm512_add_epi32(odd, words((1u << (shift - 1)) - 1)));
    const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(up, shift), words(std::uint32_t(127 - bias) << mantissa));
    const __m512 shifted = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(unit));
    const __m512i subnormal = _mm512_sub_epi32(_mm512_castps_si512(shifted), unit);
    const __mmask16 tiny = _mm512_cmplt_epu32_mask(magnitude, words(std::uint32_t(128 - bias) << 23));
    const __mmask16 bad = _mm512_cmpgt_epu32_mask(magnitude, words(0x7f800000u));
    const __mmask16 outside = _mm512_cmple_epu32_mask(_mm512_sub_epi32(magnitude, words(low_bits)), words(high_bits - low_bits));
    saturated += static_cast<std::uint64_t>(__builtin_popcount(outside));
    const __m512i clamped = _mm512_min_epu32(_mm512_mask_mov_epi32(normal, tiny, subnormal), words(largest));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), words(0x80));
    codes[i] = _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(_mm512_or_si512(clamped, sign), bad, words(0x7f)));
  }
  return {{joined(_mm256_set_m128i(codes[1], codes[0]), _mm256_set_m128i(codes[3], codes[2]))}};
}

struct E4M3 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 1;
  // Seven places up, the bits are the f16 of the value times 2^-8; only the NaN must be put in by hand.
  static Block load(const std::uint8_t* p) {
    const __m512i raw = load512(p);
    const __m512i keep = _mm512_set1_epi16(static_cast<short>(0xbfff));
    const __m512i first = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(low(raw)), 7), keep);
    const __m512i second = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(high(raw)), 7), keep);
    Block b;
    widen_halves(b, first, second);
    for (int i = 0; i < 4; ++i) b.v[i] = _mm512_mul_ps(b.v[i], _mm512_set1_ps(256.0f));
    const __m512i ones = _mm512_set1_epi8(-1);
    const __mmask64 bad = _mm512_cmpeq_epi8_mask(_mm512_or_si512(raw, _mm512_set1_epi8(-128)), ones);
    if (__builtin_expect(bad != 0, 0)) {
      const __m512 nan = _mm512_castsi512_ps(words(0x7fc00000u));
      for (int i = 0; i < 4; ++i) b.v[i] = _mm512_mask_mov_ps(b.v[i], static_cast<__mmask16>(bad >> (16 * i)), nan);
    }
    return b;
  }
  static Encoded<1> encode(const Block& b, std::uint64_t& saturated) { return encode_bytes<3, 7, 0x7e, 0x43e80001u, 0x7f800000u>(b, saturated); }
};

struct E5M2 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 1;
  static Block load(const std::uint8_t* p) {
    const __m512i raw = load512(p);
    Block b;
    widen_halves(b, _mm512_slli_epi16(_mm512_cvtepu8_epi16(low(raw)), 8),
                 _mm512_slli_epi16(_mm512_cvtepu8_epi16(high(raw)), 8));
    return b;
  }
  static Encoded<1> encode(const Block& b, std::uint64_t& saturated) { return encode_bytes<2, 15, 0x7c, 0x47700000u, 0x7f7fffffu>(b, saturated); }
};

}  // namespace

const KernelTable& avx512_kernels() {
  static constexpr KernelTable table = make_table<WithBytes<E4M3, E5M2>>("avx512");
  return table;
}

}  // namespace ff
#endif
