// Rows of tokens as they travel between ranks: gathered and encoded, decoded and repeated, added up, each in one pass.
//
// A row has the format of a type (bf16, f32 or f64), or of tokens.hpp, which takes bf16 and gives floats. Values of another
// type are converted as `round_from_accum` and `reduce_to_accum` do, a double by way of float. Rows are named by their
// number in `rows`, a table of where they lie; `index` names them in the order of the result. Nothing needs an alignment,
// and no output may overlap anything. The arithmetic, to the bit, is that of fireflyer.collectives.dispatch.row_twins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "fireflyer/collectives/kernels/dtype.hpp"
#include "fireflyer/collectives/kernels/tokens.hpp"

namespace ff {

struct RowFormat {
  bool tiled;
  DType type;          // of what is not tiled
  TokenFormat tokens;  // of what is
};

RowFormat row_format_from_name(std::string_view);           // throws std::invalid_argument
std::size_t row_bytes(const RowFormat&, std::size_t width);  // throws as `token_row_bytes` does

// Rows of a table, of which there are `count`.
struct RowTable {
  const std::uint8_t* const* rows;
  std::size_t count;
};

// out[i] = rows[index[i]], `bytes` each.
void gather_rows(std::uint8_t* out, const RowTable&, const std::int64_t* index, std::size_t entries, std::size_t bytes);

// out[i] = the encoded rows[index[i]], `width` values of `type`.
void encode_rows(std::uint8_t* out, const RowFormat&, const RowTable&, const std::int64_t* index, std::size_t entries, std::size_t width, DType type);

// out[i] = the values of rows[index[i]]. What is named twice is decoded once.
void decode_rows(void* out, DType type, const RowTable&, const std::int64_t* index, std::size_t entries, std::size_t width, const RowFormat&);

// out[i], in `to`: the sum of the rows that index[first[i]], ..., index[first[i + 1] - 1] name, from left to right in `accum`
// (f32 or f64), rounded once; zeros where these are none. Every NaN is the positive quiet one.
void sum_rows(std::uint8_t* out, const RowFormat& to, const RowTable&, const std::int64_t* index, const std::int64_t* first, std::size_t sums,
              std::size_t width, const RowFormat& from, DType accum);

}  // namespace ff
