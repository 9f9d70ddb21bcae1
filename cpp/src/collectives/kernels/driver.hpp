// The loops of all reductions, instantiated per instruction set.
//
// An instruction set provides codecs. A codec loads a block of elements into registers of the accumulation type, and
// encodes such a block: rounds it into registers that know how to store themselves, once or into several places. Blocks
// combine with others of their kind. A translation unit compiled for newer CPUs must not leak code into older ones, so
// everything here has internal linkage and nothing from the standard library is instantiated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fireflyer/collectives/kernels/dtype.hpp"
#include "token_tiles.hpp"

namespace ff {

struct Reduction {
  void* const* outs;
  int n_outs;
  int n_streamed;  // so many of the last outputs are written around the caches; these are aligned to 64 bytes
  const void* const* in;
  int n;
  std::size_t count;
  std::uint32_t divisor;
};

using ReduceFn = std::uint64_t (*)(const Reduction&);  // returns how many elements saturated

inline constexpr int row_count = reduce_op_count - 1;  // a mean is a sum here

// Of a table of operations.
constexpr int row_of(ReduceOp op) {
  if (op == ReduceOp::mean) return static_cast<int>(ReduceOp::sum);
  return static_cast<int>(op) - (op > ReduceOp::mean ? 1 : 0);
}

struct KernelTable {
  const char* name;
  ReduceFn reduce[row_count][dtype_count];  // d -> d; null where bits of floats were to be combined
  ReduceFn widen[row_count][dtype_count];   // d -> accum_dtype(d); the same
  ReduceFn narrow[dtype_count];             // accum_dtype(d) -> d
  void (*quantize)(std::uint8_t* out, float* scales, const float* in, std::size_t count, std::size_t block);
  void (*dequantize)(float* out, const std::uint8_t* in, const float* scales, std::size_t count, std::size_t block);
  TokenKernels tokens;
};

const KernelTable& portable_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512vbmi_kernels();
#endif

namespace {

inline constexpr float largest_e4m3 = 448.0f;
inline constexpr float smallest_amax = 448.0f * 0x1p-126f;

// Integers, towards zero, one by one: no instruction divides a register of them.
template <class T, class Registers>
void divide_each(Registers& v, std::uint32_t divisor) {
  T x[sizeof v / sizeof(T)];
  std::memcpy(x, &v, sizeof v);
  for (T& one : x) one = static_cast<T>(static_cast<std::int64_t>(one) / std::int64_t{divisor});
  std::memcpy(&v, x, sizeof v);
}

// A divisor of floats that is a power of two multiplies by its reciprocal: the same bits, and faster.
template <class Block>
void divide(Block& b, std::uint32_t divisor) {
  if (divisor == 1) return;
  if constexpr (!Block::floating)
    divide_each<typename Block::Element>(b.v, divisor);
  else if ((divisor & (divisor - 1)) == 0)
    b.scale(1.0 / divisor);
  else
    b.divide(divisor);
}

// In and Out share the block type; In::size and Out::size are the bytes of one element.
template <class In, class Out, ReduceOp op>
std::uint64_t reduce_blocks(const Reduction& r) {
  using Block = typename In::Block;
  constexpr std::size_t lanes = Block::lanes;
  const auto input = [&](int k, std::size_t i) { return static_cast<const std::uint8_t*>(r.in[k]) + i * In::size; };
  const auto output = [&](int k, std::size_t i) { return static_cast<std::uint8_t*>(r.outs[k]) + i * Out::size; };
  std::uint64_t saturated = 0;
  std::size_t i = 0;
  for (; i + lanes <= r.count; i += lanes) {
    Block sum = In::load(input(0, i));
    for (int k = 1; k < r.n; ++k) sum.template combine<op>(In::load(input(k, i)));
    divide(sum, r.divisor);
    const auto encoded = Out::encode(sum, saturated);
    int k = 0;
    for (; k < r.n_outs - r.n_streamed; ++k) encoded.store(output(k, i));
    for (; k < r.n_outs; ++k) encoded.stream(output(k, i));
  }
  if (r.n_streamed > 0) Out::drain();  // as if all had been stored by now
  const std::size_t rest = r.count - i;
  if (rest == 0) return saturated;
  // The tail goes through a padded copy, so that it takes the same instructions as the rest. No zero saturates.
  std::uint8_t padded[lanes * (In::size > Out::size ? In::size : Out::size)] = {};
  std::memcpy(padded, input(0, i), rest * In::size);
  Block sum = In::load(padded);
  for (int k = 1; k < r.n; ++k) {
    std::memcpy(padded, input(k, i), rest * In::size);
    sum.template combine<op>(In::load(padded));
  }
  divide(sum, r.divisor);
  Out::encode(sum, saturated).store(padded);
  for (int k = 0; k < r.n_outs; ++k) std::memcpy(output(k, i), padded, rest * Out::size);
  return saturated;
}

float float_from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <class F32, class E4M3>
void quantize_blocks(std::uint8_t* out, float* scales, const float* in, std::size_t count, std::size_t block) {
  using Block = typename F32::Block;
  constexpr std::size_t lanes = Block::lanes;
  std::uint64_t saturated = 0;  // stays 0: a block's largest magnitude becomes 448
  std::uint8_t padded[lanes * 4];
  const auto load = [&](std::size_t i, std::size_t n) {
    const auto* p = reinterpret_cast<const std::uint8_t*>(in + i);
    if (n == lanes) return F32::load(p);
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, p, n * 4);
    return F32::load(padded);
  };
  for (std::size_t first = 0; first < count; first += block, ++scales) {
    const std::size_t last = count - first < block ? count : first + block;
    std::uint32_t amax_bits = 0;
    for (std::size_t i = first; i < last; i += lanes) {
      const std::uint32_t bits = load(i, last - i < lanes ? last - i : lanes).largest_magnitude();
      amax_bits = bits > amax_bits ? bits : amax_bits;
    }
    const float amax = float_from_bits(amax_bits > 0x7f800000u ? 0x7fc00000u : amax_bits);
    *scales = (amax < smallest_amax ? smallest_amax : amax) / largest_e4m3;
    for (std::size_t i = first; i < last; i += lanes) {
      const std::size_t n = last - i < lanes ? last - i : lanes;
      Block b = load(i, n);
      b.divide(*scales);
      const auto encoded = E4M3::encode(b, saturated);
      if (n == lanes) {
        encoded.store(out + i);
      } else {
        encoded.store(padded);
        std::memcpy(out + i, padded, n);
      }
    }
  }
}

template <class F32, class E4M3>
void dequantize_blocks(float* out, const std::uint8_t* in, const float* scales, std::size_t count, std::size_t block) {
  using Block = typename F32::Block;
  constexpr std::size_t lanes = Block::lanes;
  std::uint64_t saturated = 0;
  for (std::size_t first = 0; first < count; first += block, ++scales) {
    const std::size_t last = count - first < block ? count : first + block;
    for (std::size_t i = first; i < last; i += lanes) {
      const std::size_t n = last - i < lanes ? last - i : lanes;
      std::uint8_t padded[lanes * 4] = {};
      if (n < lanes) std::memcpy(padded, in + i, n);
      Block b = E4M3::load(n == lanes ? in + i : padded);
      b.scale(*scales);
      const auto encoded = F32::encode(b, saturated);
      auto* p = reinterpret_cast<std::uint8_t*>(out + i);
      if (n == lanes) {
        encoded.store(p);
      } else {
        encoded.store(padded);
        std::memcpy(p, padded, n * 4);
      }
    }
  }
}

// Returns the types that it has filled, a bit for each: sanitizers do not let a compiler compare pointers to functions.
template <class C, ReduceOp op>
constexpr unsigned fill(KernelTable& table) {
  unsigned filled = 0;
  const auto put = [&]<class Codec, class Wide>(DType d) {
    filled |= 1u << static_cast<int>(d);
    if constexpr (!bitwise(op) || !Codec::Block::floating) {
      table.reduce[row_of(op)][static_cast<int>(d)] = reduce_blocks<Codec, Codec, op>;
      table.widen[row_of(op)][static_cast<int>(d)] = reduce_blocks<Codec, Wide, op>;
    }
    if constexpr (op == ReduceOp::sum) table.narrow[static_cast<int>(d)] = reduce_blocks<Wide, Codec, ReduceOp::sum>;
  };
  put.template operator()<typename C::F64, typename C::F64>(DType::f64);
  put.template operator()<typename C::F32, typename C::F32>(DType::f32);
  put.template operator()<typename C::F16, typename C::F32>(DType::f16);
  put.template operator()<typename C::BF16, typename C::F32>(DType::bf16);
  put.template operator()<typename C::E4M3, typename C::F32>(DType::f8e4m3);
  put.template operator()<typename C::E5M2, typename C::F32>(DType::f8e5m2);
  put.template operator()<typename C::I32, typename C::I32>(DType::i32);
  put.template operator()<typename C::I64, typename C::I64>(DType::i64);
  put.template operator()<typename C::I8, typename C::I8>(DType::i8);
  put.template operator()<typename C::U8, typename C::U8>(DType::u8);
  return filled;
}

// Codecs is a struct with F64, F32, F16, BF16, E4M3, E5M2, I32, I64, I8 and U8.
template <class Codecs>
constexpr KernelTable make_table(const char* name) {
  KernelTable table{};
  table.name = name;
  const unsigned filled = fill<Codecs, ReduceOp::sum>(table) & fill<Codecs, ReduceOp::min>(table) & fill<Codecs, ReduceOp::max>(table) &
                          fill<Codecs, ReduceOp::product>(table) & fill<Codecs, ReduceOp::band>(table) & fill<Codecs, ReduceOp::bor>(table) &
                          fill<Codecs, ReduceOp::bxor>(table);
  if (filled != (1u << dtype_count) - 1) throw "a DType has no line in fill()";  // an error of the compiler: tables are constants
  table.quantize = quantize_blocks<typename Codecs::F32, typename Codecs::E4M3>;
  table.dequantize = dequantize_blocks<typename Codecs::F32, typename Codecs::E4M3>;
  table.tokens = token_kernels();
  return table;
}

}  // namespace
}  // namespace ff
