// Element-wise sums of n buffers, bit-identical on every instruction set.
//
// Integers wrap (two's complement). Floats are summed strictly from left to right in accum_dtype(d) and rounded once,
// to nearest even. Every NaN result is the positive quiet NaN of its type (f64 0x7ff8<<48, f32 0x7fc00000, bf16 0x7fc0,
// f16 0x7e00, f8e4m3 and f8e5m2 0x7f), because which payload an addition keeps differs between compilers. f8e4m3 has
// no infinity: what overflows, infinities included, saturates to 448. The other types overflow to infinity.
//
// Buffers need no alignment. `out` may be one of the inputs; a partial overlap is not allowed. n < 1 throws
// std::invalid_argument. All functions may be called from any thread.
#pragma once

#include <cstddef>

#include "fireflyer/dtype.hpp"

namespace ff {

// acc[i] = in[0][i] + in[1][i] + ... in accum_dtype(d), not rounded to d
void reduce_to_accum(void* acc, const void* const* in, int n, std::size_t count, DType d);

// out[i] = the same sum rounded to d
void reduce_to(void* out, const void* const* in, int n, std::size_t count, DType d);

// out[i] = parts[0][i] + parts[1][i] + ..., everything of type `accum` (f32, f64, i32 or i64)
void add_accum(void* out, const void* const* parts, int n, std::size_t count, DType accum);

// out[i] = acc[i], an accum_dtype(d), rounded to d
void round_from_accum(void* out, const void* acc, std::size_t count, DType d);

const char* active_isa();          // "avx512", "avx2" or "portable"
void set_isa(const char* name);    // throws std::invalid_argument when this CPU cannot run it
bool isa_supported(const char* name);

}  // namespace ff
