// Reductions with AVX2 and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include "driver.hpp"

namespace ff {
namespace {

constexpr int to_nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

__m256i words(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
__m256 as_floats(__m256i x) { return _mm256_castsi256_ps(x); }
__m256i as_words(__m256 x) { return _mm256_castps_si256(x); }
__m128i load128(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
__m256i load256(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
void store256(std::uint8_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
__m128i low(__m256i x) { return _mm256_castsi256_si128(x); }
__m128i high(__m256i x) { return _mm256_extracti128_si256(x, 1); }
const float* floats(const std::uint8_t* p) { return reinterpret_cast<const float*>(p); }
const double* doubles(const std::uint8_t* p) { return reinterpret_cast<const double*>(p); }

__m256 unordered(__m256 x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
__m256 canonical(__m256 x) { return _mm256_blendv_ps(x, as_floats(words(0x7fc00000u)), unordered(x)); }
__m256i select(__m256i no, __m256i yes, __m256i mask) { return _mm256_blendv_epi8(no, yes, mask); }

// Sixteen 32-bit values below 2^16 as 16-bit ones, in order: a pack works within 128-bit halves.
__m256i pack(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8); }

// Of equal numbers, which differ only if they are zeros, and of anything with a NaN, one order of the operands picks the
// one and the other order the other: their bits together have the sign of the zero that is wanted, or are a NaN.
template <ReduceOp op>
__m256 combined(__m256 a, __m256 b) {
  if constexpr (op == ReduceOp::sum) return _mm256_add_ps(a, b);
  if constexpr (op == ReduceOp::product) return _mm256_mul_ps(a, b);
  if constexpr (op == ReduceOp::min) return _mm256_or_ps(_mm256_min_ps(a, b), _mm256_min_ps(b, a));
  return _mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q), _mm256_and_ps(_mm256_max_ps(a, b), _mm256_max_ps(b, a)));
}

template <ReduceOp op>
__m256d combined(__m256d a, __m256d b) {
  if constexpr (op == ReduceOp::sum) return _mm256_add_pd(a, b);
  if constexpr (op == ReduceOp::product) return _mm256_mul_pd(a, b);
  if constexpr (op == ReduceOp::min) return _mm256_or_pd(_mm256_min_pd(a, b), _mm256_min_pd(b, a));
  return _mm256_or_pd(_mm256_cmp_pd(a, b, _CMP_UNORD_Q), _mm256_and_pd(_mm256_max_pd(a, b), _mm256_max_pd(b, a)));
}

struct Floats {
  static constexpr std::size_t lanes = 32;
  static constexpr bool floating = true;
  __m256 v[4];
  template <ReduceOp op>
  void combine(const Floats& o) {
    for (int i = 0; i < 4; ++i) v[i] = combined<op>(v[i], o.v[i]);
  }
  void divide(double by) {
    for (auto& x : v) x = _mm256_div_ps(x, _mm256_set1_ps(static_cast<float>(by)));
  }
  void scale(double by) {
    for (auto& x : v) x = _mm256_mul_ps(x, _mm256_set1_ps(static_cast<float>(by)));
  }
  std::uint32_t largest_magnitude() const {
    __m256i largest = _mm256_setzero_si256();
    for (const auto& x : v) largest = _mm256_max_epi32(largest, _mm256_and_si256(as_words(x), words(0x7fffffffu)));
    __m128i four = _mm_max_epi32(low(largest), high(largest));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
  }
};

struct Doubles {
  static constexpr std::size_t lanes = 16;
  static constexpr bool floating = true;
  __m256d v[4];
  template <ReduceOp op>
  void combine(const Doubles& o) {
    for (int i = 0; i < 4; ++i) v[i] = combined<op>(v[i], o.v[i]);
  }
  void divide(double by) {
    for (auto& x : v) x = _mm256_div_pd(x, _mm256_set1_pd(by));
  }
  void scale(double by) {
    for (auto& x : v) x = _mm256_mul_pd(x, _mm256_set1_pd(by));
  }
};

struct I32Arithmetic {
  using Element = std::int32_t;
  static __m256i sum(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static __m256i min(__m256i a, __m256i b) { return _mm256_min_epi32(a, b); }
  static __m256i max(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
  static __m256i product(__m256i a, __m256i b) { return _mm256_mullo_epi32(a, b); }
};

struct I64Arithmetic {
  using Element = std::int64_t;
  static __m256i sum(__m256i a, __m256i b) { return _mm256_add_epi64(a, b); }
  static __m256i min(__m256i a, __m256i b) { return select(a, b, _mm256_cmpgt_epi64(a, b)); }
  static __m256i max(__m256i a, __m256i b) { return select(b, a, _mm256_cmpgt_epi64(a, b)); }
  static __m256i product(__m256i a, __m256i b) {
    const __m256i crossed = _mm256_add_epi64(_mm256_mul_epu32(a, _mm256_srli_epi64(b, 32)), _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b));
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(crossed, 32));
  }
};

// The low byte of a product is the same for signed and unsigned factors; even and odd bytes go separately.
struct ByteArithmetic {
  static __m256i sum(__m256i a, __m256i b) { return _mm256_add_epi8(a, b); }
  static __m256i product(__m256i a, __m256i b) {
    const __m256i even = _mm256_and_si256(_mm256_mullo_epi16(a, b), _mm256_set1_epi16(0xff));
    return _mm256_or_si256(even, _mm256_slli_epi16(_mm256_mullo_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)), 8));
  }
};

struct I8Arithmetic : ByteArithmetic {
  using Element = std::int8_t;
  static __m256i min(__m256i a, __m256i b) { return _mm256_min_epi8(a, b); }
  static __m256i max(__m256i a, __m256i b) { return _mm256_max_epi8(a, b); }
};

struct U8Arithmetic : ByteArithmetic {
  using Element = std::uint8_t;
  static __m256i min(__m256i a, __m256i b) { return _mm256_min_epu8(a, b); }
  static __m256i max(__m256i a, __m256i b) { return _mm256_max_epu8(a, b); }
};

template <class Arithmetic, std::size_t bytes>
struct Integers {
  static constexpr std::size_t lanes = 128 / bytes;
  static constexpr bool floating = false;
  using Element = typename Arithmetic::Element;
  __m256i v[4];
  template <ReduceOp op>
  void combine(const Integers& o) {
    for (int i = 0; i < 4; ++i) {
      if constexpr (op == ReduceOp::sum) v[i] = Arithmetic::sum(v[i], o.v[i]);
      if constexpr (op == ReduceOp::min) v[i] = Arithmetic::min(v[i], o.v[i]);
      if constexpr (op == ReduceOp::max) v[i] = Arithmetic::max(v[i], o.v[i]);
      if constexpr (op == ReduceOp::product) v[i] = Arithmetic::product(v[i], o.v[i]);
      if constexpr (op == ReduceOp::band) v[i] = _mm256_and_si256(v[i], o.v[i]);
      if constexpr (op == ReduceOp::bor) v[i] = _mm256_or_si256(v[i], o.v[i]);
      if constexpr (op == ReduceOp::bxor) v[i] = _mm256_xor_si256(v[i], o.v[i]);
    }
  }
};

// What a codec encodes to: `registers` times 32 bytes.
template <int registers>
struct Encoded {
  __m256i v[registers];
  void store(std::uint8_t* p) const {
    for (int i = 0; i < registers; ++i) store256(p + 32 * i, v[i]);
  }
  void stream(std::uint8_t* p) const {
    for (int i = 0; i < registers; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(p + 32 * i), v[i]);
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
    for (int i = 0; i < 4; ++i) b.v[i] = _mm256_loadu_pd(doubles(p + 32 * i));
    return b;
  }
  static Encoded<4> encode(const Block& b, std::uint64_t&) {
    const __m256d nan = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7ff8LL << 48));
    Encoded<4> e;
    for (int i = 0; i < 4; ++i)
      e.v[i] = _mm256_castpd_si256(_mm256_blendv_pd(b.v[i], nan, _mm256_cmp_pd(b.v[i], b.v[i], _CMP_UNORD_Q)));
    return e;
  }
};

struct F32 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 4;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = _mm256_loadu_ps(floats(p + 32 * i));
    return b;
  }
  static Encoded<4> encode(const Block& b, std::uint64_t&) {
    return {{as_words(canonical(b.v[0])), as_words(canonical(b.v[1])), as_words(canonical(b.v[2])), as_words(canonical(b.v[3]))}};
  }
};

struct F16 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 2;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = _mm256_cvtph_ps(load128(p + 16 * i));
    return b;
  }
  static __m128i round(__m256 x) { return _mm256_cvtps_ph(canonical(x), to_nearest); }
  static Encoded<2> encode(const Block& b, std::uint64_t&) {
    return {{_mm256_set_m128i(round(b.v[1]), round(b.v[0])), _mm256_set_m128i(round(b.v[3]), round(b.v[2]))}};
  }
};

struct BF16 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 2;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i)
      b.v[i] = as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p + 16 * i)), 16));
    return b;
  }
  static __m256i round(__m256 x) {
    const __m256i bits = as_words(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), words(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, words(0x7fff))), 16);
    return select(rounded, words(0x7fc0), as_words(unordered(x)));
  }
  static Encoded<2> encode(const Block& b, std::uint64_t&) {
    return {{pack(round(b.v[0]), round(b.v[1])), pack(round(b.v[2]), round(b.v[3]))}};
  }
};

void widen_halves(Floats& b, __m256i first, __m256i second) {
  b.v[0] = _mm256_cvtph_ps(low(first));
  b.v[1] = _mm256_cvtph_ps(high(first));
  b.v[2] = _mm256_cvtph_ps(low(second));
  b.v[3] = _mm256_cvtph_ps(high(second));
}

// See round_magnitude in portable.cpp. Magnitudes are below 2^31, so signed comparisons serve.
template <int mantissa, int bias, std::uint32_t largest>
__m256i round_to_byte(__m256 x) {
  constexpr int shift = 23 - mantissa;
  const __m256i unit = words(static_cast<std::uint32_t>(127 + 24 - bias - mantissa) << 23);
  const __m256i bits = as_words(x);
  const __m256i magnitude = _mm256_and_si256(bits, words(0x7fffffffu));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, shift), words(1));
  const __m256i up = _mm256_add_epi32(magnitude, _mm256_add_epi32(odd, words((1u << (shift - 1)) - 1)));
  const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(up, shift), words(std::uint32_t(127 - bias) << mantissa));
  const __m256i subnormal = _mm256_sub_epi32(as_words(_mm256_add_ps(as_floats(magnitude), as_floats(unit))), unit);
  const __m256i tiny = _mm256_cmpgt_epi32(words(std::uint32_t(128 - bias) << 23), magnitude);
  const __m256i bad = _mm256_cmpgt_epi32(magnitude, words(0x7f800000u));
  const __m256i clamped = _mm256_min_epi32(select(normal, subnormal, tiny), words(largest));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), words(0x80));
  return select(_mm256_or_si256(clamped, sign), words(0x7f), bad);
}

// low and high bound the magnitudes that leave the range, as in portable.cpp.
template <int mantissa, int bias, std::uint32_t largest, std::uint32_t low_bits, std::uint32_t high_bits>
Encoded<1> encode_bytes(const Floats& b, std::uint64_t& saturated) {
  for (const __m256& x : b.v) {
    const __m256i magnitude = _mm256_and_si256(as_words(x), words(0x7fffffffu));
    const __m256i above = _mm256_cmpgt_epi32(magnitude, words(low_bits - 1));
    const __m256i outside = _mm256_andnot_si256(_mm256_cmpgt_epi32(magnitude, words(high_bits)), above);
    saturated += static_cast<std::uint64_t>(__builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(as_floats(outside)))));
  }
  const __m256i first = pack(round_to_byte<mantissa, bias, largest>(b.v[0]), round_to_byte<mantissa, bias, largest>(b.v[1]));
  const __m256i second = pack(round_to_byte<mantissa, bias, largest>(b.v[2]), round_to_byte<mantissa, bias, largest>(b.v[3]));
  return {{_mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8)}};
}

struct E4M3 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 1;
  // Seven places up, the bits are the f16 of the value times 2^-8; only the NaN must be put in by hand.
  static Block load(const std::uint8_t* p) {
    const __m256i raw = load256(p);
    const __m256i keep = _mm256_set1_epi16(static_cast<short>(0xbfff));
    const __m256i first = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(low(raw)), 7), keep);
    const __m256i second = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(high(raw)), 7), keep);
    Block b;
    widen_halves(b, first, second);
    for (int i = 0; i < 4; ++i) b.v[i] = _mm256_mul_ps(b.v[i], _mm256_set1_ps(256.0f));
    const __m256i bad = _mm256_cmpeq_epi8(_mm256_or_si256(raw, _mm256_set1_epi8(-128)), _mm256_set1_epi8(-1));
    if (__builtin_expect(_mm256_movemask_epi8(bad) != 0, 0)) put_nans(b, bad);
    return b;
  }
  static void put_nans(Block& b, __m256i bad) {
    const __m128i eights[4] = {low(bad), _mm_srli_si128(low(bad), 8), high(bad), _mm_srli_si128(high(bad), 8)};
    for (int i = 0; i < 4; ++i)
      b.v[i] = _mm256_blendv_ps(b.v[i], as_floats(words(0x7fc00000u)), as_floats(_mm256_cvtepi8_epi32(eights[i])));
  }
  static Encoded<1> encode(const Block& b, std::uint64_t& saturated) {
    return encode_bytes<3, 7, 0x7e, 0x43e80001u, 0x7f800000u>(b, saturated);
  }
};

struct E5M2 : Codec {
  using Block = Floats;
  static constexpr std::size_t size = 1;
  static Block load(const std::uint8_t* p) {
    const __m256i raw = load256(p);
    Block b;
    widen_halves(b, _mm256_slli_epi16(_mm256_cvtepu8_epi16(low(raw)), 8),
                 _mm256_slli_epi16(_mm256_cvtepu8_epi16(high(raw)), 8));
    return b;
  }
  static Encoded<1> encode(const Block& b, std::uint64_t& saturated) {
    return encode_bytes<2, 15, 0x7c, 0x47700000u, 0x7f7fffffu>(b, saturated);
  }
};

template <class Arithmetic, std::size_t bytes>
struct Int : Codec {
  using Block = Integers<Arithmetic, bytes>;
  static constexpr std::size_t size = bytes;
  static Block load(const std::uint8_t* p) {
    Block b;
    for (int i = 0; i < 4; ++i) b.v[i] = load256(p + 32 * i);
    return b;
  }
  static Encoded<4> encode(const Block& b, std::uint64_t&) { return {{b.v[0], b.v[1], b.v[2], b.v[3]}}; }
};

struct Codecs {
  using F64 = ff::F64;
  using F32 = ff::F32;
  using F16 = ff::F16;
  using BF16 = ff::BF16;
  using E4M3 = ff::E4M3;
  using E5M2 = ff::E5M2;
  using I32 = Int<I32Arithmetic, 4>;
  using I64 = Int<I64Arithmetic, 8>;
  using I8 = Int<I8Arithmetic, 1>;
  using U8 = Int<U8Arithmetic, 1>;
};

}  // namespace

const KernelTable& avx2_kernels() {
  static constexpr KernelTable table = make_table<Codecs>("avx2");
  return table;
}

}  // namespace ff
#endif
