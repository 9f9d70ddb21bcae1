// Element-wise reductions of n buffers, bit-identical on every instruction set.
//
// Integers wrap (two's complement). Floats are combined strictly from left to right in accum_dtype(d) and rounded once,
// to nearest even. Every NaN result is the positive quiet NaN of its type (f64 0x7ff8<<48, f32 0x7fc00000, bf16 0x7fc0,
// f16 0x7e00, f8e4m3 and f8e5m2 0x7f), because which payload an addition keeps differs between compilers. f8e4m3 has
// no infinity: what overflows, infinities included, saturates to 448. The other types overflow to infinity.
//
// A NaN among the inputs of min and max makes the result NaN, and -0 is less than +0, so the order does not matter.
// A mean is a sum whose divisor, the number of ranks, is given to the function that rounds; it divides once, in
// accum_dtype(d), before the rounding. ReduceOp::mean itself means the same as ReduceOp::sum here. An integer, which may
// have wrapped, is divided towards zero, as C and NCCL divide. band, bor and bxor combine the bits of integers.
//
// What is returned is the number of elements that left the range of an fp8 type when they were rounded: to f8e4m3, what
// was clipped to 448 (infinities included); to f8e5m2, finite values that became infinity. For other types it is 0.
//
// Buffers need no alignment. An output may be one of the inputs; a partial overlap is not allowed. n < 1, a bitwise
// operation on floats and a divisor of 0 throw std::invalid_argument. All functions may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fireflyer/collectives/kernels/dtype.hpp"

namespace ff {

// acc[i] = in[0][i] op in[1][i] op ... in accum_dtype(d), not rounded to d
std::uint64_t reduce_to_accum(void* acc, const void* const* in, int n, std::size_t count, DType d, ReduceOp op = ReduceOp::sum);

// out[i] = the same, divided and rounded to d
std::uint64_t reduce_to(void* out, const void* const* in, int n, std::size_t count, DType d, ReduceOp op = ReduceOp::sum,
                        std::uint32_t divisor = 1);

// The same into each of n_outs buffers in one pass: every input is read once and every output written once, which is
// the least memory traffic that an allreduce within a node can have. With `stream`, outputs that are no inputs are
// written around the caches, so that they need not be read first: faster where all buffers together exceed the last
// cache, slower where the results would have been found in it. Two streamed outputs profit together only if they lie
// alike within 64 bytes.
std::uint64_t reduce_to_many(void* const* outs, int n_outs, const void* const* in, int n, std::size_t count, DType d,
                             ReduceOp op = ReduceOp::sum, std::uint32_t divisor = 1, bool stream = false);

// out[i] = parts[0][i] op parts[1][i] op ..., everything of type `accum` (f32, f64 or an integer)
std::uint64_t add_accum(void* out, const void* const* parts, int n, std::size_t count, DType accum, ReduceOp op = ReduceOp::sum);

// out[i] = acc[i], an accum_dtype(d), divided and rounded to d
std::uint64_t round_from_accum(void* out, const void* acc, std::size_t count, DType d, std::uint32_t divisor = 1);

// Blocks of `block` floats (the last may be shorter) as f8e4m3 with a scale each: scale = max(amax, 448 * 2^-126) / 448
// where amax is the largest magnitude of the block, and out[i] = in[i] / scale, rounded. So nothing saturates, and no
// scale is subnormal. A block with a NaN or an infinity gets a scale that is none, and decodes to NaN throughout.
// `scales` has ceil(count / block) elements. No buffer may overlap another.
void quantize_fp8_blocks(std::uint8_t* out, float* scales, const float* in, std::size_t count, std::size_t block = 128);

// out[i] = the value of in[i] times the scale of its block
void dequantize_fp8_blocks(float* out, const std::uint8_t* in, const float* scales, std::size_t count, std::size_t block = 128);

const char* active_isa();          // "avx512vbmi", "avx512", "avx2" or "portable"
void set_isa(const char* name);    // throws std::invalid_argument when this CPU cannot run it
bool isa_supported(const char* name);

}  // namespace ff
