// The codecs that every CPU with AVX-512 (F, BW, VL, DQ) runs: all types but the two fp8. The AVX512_BF16 conversions are
// not used: they flush subnormals.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// The intrinsics' own undefined operands, in GCC 12's header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "driver.hpp"

namespace ff {
namespace {

constexpr int to_nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

__m512i words(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
__m512i load512(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
__m256i load256(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

__m512i joined(__m256i first, __m256i second) { return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1); }

__m512 canonical(__m512 x) {
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(words(0x7fc00000u)));
}

template <ReduceOp op>
__m512 combined(__m512 a, __m512 b) {
  if constexpr (op == ReduceOp::sum) return _mm512_add_ps(a, b);
  if constexpr (op == ReduceOp::product) return _mm512_mul_ps(a, b);
  // vrange knows that -0 is less than +0, but prefers a number to a NaN
  const __m512 chosen = op == ReduceOp::min ? _mm512_range_ps(a, b, 4) : _mm512_range_ps(a, b, 5);
  return _mm512_mask_mov_ps(chosen, _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), _mm512_castsi512_ps(words(0x7fc00000u)));
}

__m512i nan_of_doubles() { return _mm512_set1_epi64(0x7ff8LL << 48); }

template <ReduceOp op>
__m512d combined(__m512d a, __m512d b) {
  if constexpr (op == ReduceOp::sum) return _mm512_add_pd(a, b);
  if constexpr (op == ReduceOp::product) return _mm512_mul_pd(a, b);
  const __m512d chosen = op == ReduceOp::min ? _mm512_range_pd(a, b, 4) : _mm512_range_pd(a, b, 5);
  return _mm512_mask_mov_pd(chosen, _mm512_cmp_pd_mask(a, b, _CMP_UNORD_Q), _mm512_castsi512_pd(nan_of_doubles()));
}

struct Floats {
  static constexpr std::size_t lanes = 64;
  static constexpr bool floating = true;
  __m512 v[4];
  template <ReduceOp op>
  void combine(const Floats& o) {
    for (int i = 0; i < 4; ++i) v[i] = combined<op>(v[i], o.v[i]);
  }
  void divide(double by) {
    for (auto& x : v) x = _mm512_div_ps(x, _mm512_set1_ps(static_cast<float>(by)));
  }
  void scale(double by) {
    for (auto& x : v) x = _mm512_mul_ps(x, _mm512_set1_ps(static_cast<float>(by)));
  }
  std::uint32_t largest_magnitude() const {
    __m512i largest = _mm512_setzero_si512();
    for (const auto& x : v) largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(x), words(0x7fffffffu)));
    return _mm512_reduce_max_epu32(largest);
  }
};

struct Doubles {
  static constexpr std::size_t lanes = 32;
  static constexpr bool floating = true;
  __m512d v[4];
  template <ReduceOp op>
  void combine(const Doubles& o) {
    for (int i = 0; i < 4; ++i) v[i] = combined<op>(v[i], o.v[i]);
  }
  void divide(double by) {
    for (auto& x : v) x = _mm512_div_pd(x, _mm512_set1_pd(by));
  }
  void scale(double by) {
    for (auto& x : v) x = _mm512_mul_pd(x, _mm512_set1_pd(by));
  }
};

struct I32Arithmetic {
  using Element = std::int32_t;
  static __m512i sum(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static __m512i min(__m512i a, __m512i b) { return _mm512_min_epi32(a, b); }
  static __m512i max(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
  static __m512i product(__m512i a, __m512i b) { return _mm512_mullo_epi32(a, b); }
};

struct I64Arithmetic {
  using Element = std::int64_t;
  static __m512i sum(__m512i a, __m512i b) { return _mm512_add_epi64(a, b); }
  static __m512i min(__m512i a, __m512i b) { return _mm512_min_epi64(a, b); }
  static __m512i max(__m512i a, __m512i b) { return _mm512_max_epi64(a, b); }
  static __m512i product(__m512i a, __m512i b) { return _mm512_mullo_epi64(a, b); }
};

// The low byte of a product is the same for signed and unsigned factors; even and odd bytes go separately.
struct ByteArithmetic {
  static __m512i sum(__m512i a, __m512i b) { return _mm512_add_epi8(a, b); }
  static __m512i product(__m512i a, __m512i b) {
    const __m512i even = _mm512_and_si512(_mm512_mullo_epi16(a, b), _mm512_set1_epi16(0xff));
    return _mm512_or_si512(even, _mm512_slli_epi16(_mm512_mullo_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)), 8));
  }
};

struct I8Arithmetic : ByteArithmetic {
  using Element = std::int8_t;
  static __m512i min(__m512i a, __m512i b) { return _mm512_min_epi8(a, b); }
  static __m512i max(__m512i a, __m512i b) { return _mm512_max_epi8(a, b); }
};

struct U8Arithmetic : ByteArithmetic {
  using Element = std::uint8_t;
  static __m512i min(__m512i a, __m512i b) { return _mm512_min_epu8(a, b); }
  static __m512i max(__m512i a, __m512i b) { return _mm512_max_epu8(a, b); }
};

template <class Arithmetic, std::size_t bytes>
struct Integers {
  static constexpr std::size_t lanes = 256 / bytes;
  static constexpr bool floating = false;
  using Element = typename Arithmetic::Element;
  __m512i v[4];
  template <ReduceOp op>
  void combine(const Integers& o) {
    for (int i = 0; i < 4; ++i) {
      if constexpr (op == ReduceOp::sum) v[i] = Arithmetic::sum(v[i], o.v[i]);
      if constexpr (op == ReduceOp::min) v[i] = Arithmetic::min(v[i], o.v[i]);
      if constexpr (op == ReduceOp::max) v[i] = Arithmetic::max(v[i], o.v[i]);
      if constexpr (op == ReduceOp::product) v[i] = Arithmetic::product(v[i], o.v[i]);
      if constexpr (op == ReduceOp::band) v[i] = _mm512_and_si512(v[i], o.v[i]);
      if constexpr (op == ReduceOp::bor) v[i] = _mm512_or_si512(v[i], o.v[i]);
      if constexpr (op == ReduceOp::bxor) v[i] = _mm512_xor_si512(v[i], o.v[i]);
    }
  }
};

// What a codec encodes to: `registers` times 64 bytes.
template <int registers>
struct Encoded {
  __m512i v[registers];
  void store(std::uint8_t* p) const {
    for (int i = 0; i < registers; ++i) _mm512_storeu_si512(p + 64 * i, v[i]);
  }
  void stream(std::uint8_t* p) const {
    for (int i = 0; i < registers; ++i) _mm512_stream_si512(reinterpret_cast<__m512i*>(p + 64 * i), v[i]);
  }
};

struct Codec {
  static void drain() { _mm_sfence(); }
};

struct F64 : Codec {
  using Block = Doubles;
  static constexpr std::size_t size = 8;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = _mm512_loadu_pd(p + 64 * i);
    return b;
  }
  static Encoded<4> encode(const Block& b, std::uint64_t&) {
    Encoded<4> e;
    for (int i = 0; i < 4; ++i) {
      const __mmask8 bad = _mm512_cmp_pd_mask(b.v[i], b.v[i], _CMP_UNORD_Q);
      e.v[i] = _mm512_mask_mov_epi64(_mm512_castpd_si512(b.v[i]), bad, nan_of_doubles());
    }
    return e;
  }
};

struct F32 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 4;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = _mm512_loadu_ps(p + 64 * i);
    return b;
  }
  static Encoded<4> encode(const Block& b, std::uint64_t&) {
    Encoded<4> e;
    for (int i = 0; i < 4; ++i) e.v[i] = _mm512_castps_si512(canonical(b.v[i]));
    return e;
  }
};

struct F16 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 2;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = _mm512_cvtph_ps(load256(p + 32 * i));
    return b;
  }
  static __m256i round(__m512 x) { return _mm512_cvtps_ph(canonical(x), to_nearest); }
  static Encoded<2> encode(const Block& b, std::uint64_t&) {
    return {{joined(round(b.v[0]), round(b.v[1])), joined(round(b.v[2]), round(b.v[3]))}};
  }
};

struct BF16 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 2;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i)
      b.v[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p + 32 * i)), 16));
    return b;
  }
  static __m256i round(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), words(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, words(0x7fff))), 16);
    const __mmask16 bad = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, bad, words(0x7fc0)));
  }
  static Encoded<2> encode(const Block& b, std::uint64_t&) {
    return {{joined(round(b.v[0]), round(b.v[1])), joined(round(b.v[2]), round(b.v[3]))}};
  }
};

template <class Arithmetic, std::size_t bytes>
struct Int : Codec {
  using Block = Integers<Arithmetic, bytes>;
  static constexpr std::size_t size = bytes;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = load512(p + 64 * i);
    return b;
  }
  static Encoded<4> encode(const Block& b, std::uint64_t&) { return {{b.v[0], b.v[1], b.v[2], b.v[3]}}; }
};

// A table's codecs, given those of the fp8 types.
template <class OfE4M3, class OfE5M2>
struct WithBytes {
  using F64 = ff::F64;
  using F32 = ff::F32;
  using F16 = ff::F16;
  using BF16 = ff::BF16;
  using E4M3 = OfE4M3;
  using E5M2 = OfE5M2;
  using I32 = Int<I32Arithmetic, 4>;
  using I64 = Int<I64Arithmetic, 8>;
  using I8 = Int<I8Arithmetic, 1>;
  using U8 = Int<U8Arithmetic, 1>;
};

}  // namespace
}  // namespace ff
