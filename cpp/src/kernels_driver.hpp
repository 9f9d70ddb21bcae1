// The one loop of all reductions, instantiated per instruction set.
//
// An instruction set provides codecs: types that load a block of elements into registers of the accumulation type and
// store such a block rounded. A translation unit compiled for newer CPUs must not leak code into older ones, so
// everything here has internal linkage and nothing from the standard library is instantiated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ff {

using ReduceFn = void (*)(void* out, const void* const* in, int n, std::size_t count);

struct KernelTable {
  const char* name;
  ReduceFn reduce[8];  // d -> d
  ReduceFn widen[8];   // d -> accum_dtype(d)
  ReduceFn narrow[8];  // accum_dtype(d) -> d
};

const KernelTable& portable_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
#endif

namespace {

// In and Out share the block type; In::size and Out::size are the bytes of one element.
template <class In, class Out>
void reduce_blocks(void* out, const void* const* in, int n, std::size_t count) {
  using Block = typename In::Block;
  constexpr std::size_t lanes = Block::lanes;
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    Block sum = In::load(static_cast<const std::uint8_t*>(in[0]) + i * In::size);
    for (int k = 1; k < n; ++k) sum.add(In::load(static_cast<const std::uint8_t*>(in[k]) + i * In::size));
    Out::store(static_cast<std::uint8_t*>(out) + i * Out::size, sum);
  }
  const std::size_t rest = count - i;
  if (rest == 0) return;
  // The tail goes through a padded copy, so that it takes the same instructions as the rest.
  std::uint8_t padded[lanes * 8] = {};
  std::memcpy(padded, static_cast<const std::uint8_t*>(in[0]) + i * In::size, rest * In::size);
  Block sum = In::load(padded);
  for (int k = 1; k < n; ++k) {
    std::memcpy(padded, static_cast<const std::uint8_t*>(in[k]) + i * In::size, rest * In::size);
    sum.add(In::load(padded));
  }
  Out::store(padded, sum);
  std::memcpy(static_cast<std::uint8_t*>(out) + i * Out::size, padded, rest * Out::size);
}

// Codecs is a struct with F64, F32, F16, BF16, E4M3, E5M2, I32 and I64.
template <class Codecs>
constexpr KernelTable make_table(const char* name) {
  using C = Codecs;
  return KernelTable{
      name,
      {reduce_blocks<typename C::F64, typename C::F64>, reduce_blocks<typename C::F32, typename C::F32>,
       reduce_blocks<typename C::F16, typename C::F16>, reduce_blocks<typename C::BF16, typename C::BF16>,
       reduce_blocks<typename C::E4M3, typename C::E4M3>, reduce_blocks<typename C::E5M2, typename C::E5M2>,
       reduce_blocks<typename C::I32, typename C::I32>, reduce_blocks<typename C::I64, typename C::I64>},
      {reduce_blocks<typename C::F64, typename C::F64>, reduce_blocks<typename C::F32, typename C::F32>,
       reduce_blocks<typename C::F16, typename C::F32>, reduce_blocks<typename C::BF16, typename C::F32>,
       reduce_blocks<typename C::E4M3, typename C::F32>, reduce_blocks<typename C::E5M2, typename C::F32>,
       reduce_blocks<typename C::I32, typename C::I32>, reduce_blocks<typename C::I64, typename C::I64>},
      {reduce_blocks<typename C::F64, typename C::F64>, reduce_blocks<typename C::F32, typename C::F32>,
       reduce_blocks<typename C::F32, typename C::F16>, reduce_blocks<typename C::F32, typename C::BF16>,
       reduce_blocks<typename C::F32, typename C::E4M3>, reduce_blocks<typename C::F32, typename C::E5M2>,
       reduce_blocks<typename C::I32, typename C::I32>, reduce_blocks<typename C::I64, typename C::I64>},
  };
}

}  // namespace
}  // namespace ff
