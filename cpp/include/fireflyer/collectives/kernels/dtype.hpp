// Element types of buffers that are reduced. The numbers are part of the wire format: append, never renumber.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ff {

enum class DType : std::uint8_t {
  f64 = 0,
  f32 = 1,
  f16 = 2,
  bf16 = 3,
  f8e4m3 = 4,
  f8e5m2 = 5,
  i32 = 6,
  i64 = 7,
  i8 = 8,
  u8 = 9
};

inline constexpr int dtype_count = 10;

// How elements of all ranks become one. `mean` is a sum that is divided once, by the number of ranks, before rounding.
// The last three combine the bits of integers. The numbers are part of the wire format: append, never renumber.
enum class ReduceOp : std::uint8_t {
  sum = 0,
  min = 1,
  max = 2,
  product = 3,
  mean = 4,
  band = 5,
  bor = 6,
  bxor = 7
};

inline constexpr int reduce_op_count = 8;

constexpr bool bitwise(ReduceOp op) { return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor; }

const char* reduce_op_name(ReduceOp op);         // the enumerator's name; throws std::invalid_argument
ReduceOp reduce_op_from_name(std::string_view);  // throws std::invalid_argument

std::size_t dtype_size(DType d);          // bytes of one element
const char* dtype_name(DType d);          // the enumerator's name, e.g. "bf16"; throws std::invalid_argument
DType dtype_from_name(std::string_view);  // throws std::invalid_argument
DType accum_dtype(DType d);               // f32 for f16, bf16, f8e4m3 and f8e5m2; otherwise the type itself
void check_reduces(ReduceOp op, DType d);  // throws std::invalid_argument for bitwise operations on floats
bool integral(DType d);                   // an integer type: only these have bitwise operations

}  // namespace ff
