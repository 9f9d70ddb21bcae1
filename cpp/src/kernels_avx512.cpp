// Reductions with AVX-512 (F, BW, VL, DQ). The AVX512_BF16 conversions are not used: they flush subnormals.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // the intrinsics' own undefined operands, in GCC 12's header
#endif
#include <immintrin.h>

#include "kernels_driver.hpp"

namespace ff {
namespace {

constexpr int to_nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

__m512i words(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
__m512i load512(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
__m256i load256(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
void store256(std::uint8_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
__m256i low(__m512i x) { return _mm512_castsi512_si256(x); }
__m256i high(__m512i x) { return _mm512_extracti64x4_epi64(x, 1); }

__m512 canonical(__m512 x) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(words(0x7fc00000u)));
}

struct Floats {
  static constexpr std::size_t lanes = 64;
  __m512 v[4];
  void add(const Floats& o) {
    for (int i = 0; i < 4; ++i) v[i] = _mm512_add_ps(v[i], o.v[i]);
  }
};

struct Doubles {
  static constexpr std::size_t lanes = 32;
  __m512d v[4];
  void add(const Doubles& o) {
    for (int i = 0; i < 4; ++i) v[i] = _mm512_add_pd(v[i], o.v[i]);
  }
};

template <bool wide>
struct Integers {
  static constexpr std::size_t lanes = wide ? 32 : 64;
  __m512i v[4];
  void add(const Integers& o) {
    for (int i = 0; i < 4; ++i) v[i] = wide ? _mm512_add_epi64(v[i], o.v[i]) : _mm512_add_epi32(v[i], o.v[i]);
  }
};

struct F64 {
  using Block = Doubles;
  static constexpr std::size_t size = 8;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = _mm512_loadu_pd(p + 64 * i);
    return b;
  }
  static void store(std::uint8_t* p, const Block& b) {
    const __m512d nan = _mm512_castsi512_pd(_mm512_set1_epi64(0x7ff8LL << 48));
    for (int i = 0; i < 4; ++i) {
      const __mmask8 bad = _mm512_cmp_pd_mask(b.v[i], b.v[i], _CMP_UNORD_Q);
      _mm512_storeu_pd(p + 64 * i, _mm512_mask_mov_pd(b.v[i], bad, nan));
    }
  }
};

struct F32 {
  using Block = Floats;
  static constexpr std::size_t size = 4;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = _mm512_loadu_ps(p + 64 * i);
    return b;
  }
  static void store(std::uint8_t* p, const Block& b) {
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(p + 64 * i, canonical(b.v[i]));
  }
};

struct F16 {
  using Block = Floats;
  static constexpr std::size_t size = 2;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = _mm512_cvtph_ps(load256(p + 32 * i));
    return b;
  }
  static void store(std::uint8_t* p, const Block& b) {
    for (int i = 0; i < 4; ++i) store256(p + 32 * i, _mm512_cvtps_ph(canonical(b.v[i]), to_nearest));
  }
};

struct BF16 {
  using Block = Floats;
  static constexpr std::size_t size = 2;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i)
      b.v[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p + 32 * i)), 16));
    return b;
  }
  static void store(std::uint8_t* p, const Block& b) {
    for (int i = 0; i < 4; ++i) {
      const __m512i bits = _mm512_castps_si512(b.v[i]);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), words(1));
      const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, words(0x7fff))), 16);
      const __mmask16 bad = _mm512_cmp_ps_mask(b.v[i], b.v[i], _CMP_UNORD_Q);
      store256(p + 32 * i, _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, bad, words(0x7fc0))));
    }
  }
};

void widen_halves(Floats& b, __m512i first, __m512i second) {
  b.v[0] = _mm512_cvtph_ps(low(first));
  b.v[1] = _mm512_cvtph_ps(high(first));
  b.v[2] = _mm512_cvtph_ps(low(second));
  b.v[3] = _mm512_cvtph_ps(high(second));
}

// See round_magnitude in kernels_portable.cpp.
template <int mantissa, int bias, std::uint32_t largest>
void store_bytes(std::uint8_t* p, const Floats& b) {
  constexpr int shift = 23 - mantissa;
  const __m512i unit = words(static_cast<std::uint32_t>(127 + 24 - bias - mantissa) << 23);
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
    const __m512i clamped = _mm512_min_epu32(_mm512_mask_mov_epi32(normal, tiny, subnormal), words(largest));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), words(0x80));
    const __m512i code = _mm512_mask_mov_epi32(_mm512_or_si512(clamped, sign), bad, words(0x7f));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 * i), _mm512_cvtepi32_epi8(code));
  }
}

struct E4M3 {
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
  static void store(std::uint8_t* p, const Block& b) { store_bytes<3, 7, 0x7e>(p, b); }
};

struct E5M2 {
  using Block = Floats;
  static constexpr std::size_t size = 1;
  static Block load(const std::uint8_t* p) {
    const __m512i raw = load512(p);
    Block b;
    widen_halves(b, _mm512_slli_epi16(_mm512_cvtepu8_epi16(low(raw)), 8),
                 _mm512_slli_epi16(_mm512_cvtepu8_epi16(high(raw)), 8));
    return b;
  }
  static void store(std::uint8_t* p, const Block& b) { store_bytes<2, 15, 0x7c>(p, b); }
};

template <bool wide>
struct Int {
  using Block = Integers<wide>;
  static constexpr std::size_t size = wide ? 8 : 4;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = load512(p + 64 * i);
    return b;
  }
  static void store(std::uint8_t* p, const Block& b) {
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(p + 64 * i, b.v[i]);
  }
};

struct Codecs {
  using F64 = ff::F64;
  using F32 = ff::F32;
  using F16 = ff::F16;
  using BF16 = ff::BF16;
  using E4M3 = ff::E4M3;
  using E5M2 = ff::E5M2;
  using I32 = Int<false>;
  using I64 = Int<true>;
};

}  // namespace

const KernelTable& avx512_kernels() {
  static constexpr KernelTable table = make_table<Codecs>("avx512");
  return table;
}

}  // namespace ff
#endif
