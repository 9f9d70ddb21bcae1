#include "fireflyer/collectives/kernels/rows.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "fireflyer/collectives/kernels/kernels.hpp"

namespace ff {
namespace {

using Bytes = std::vector<std::uint8_t>;

template <class To, class From>
void cast(void* out, const void* in, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    From x;
    std::memcpy(&x, static_cast<const std::uint8_t*>(in) + i * sizeof x, sizeof x);
    const auto y = static_cast<To>(x);
    std::memcpy(static_cast<std::uint8_t*>(out) + i * sizeof y, &y, sizeof y);
  }
}

void floats_of(void* out, const void* in, std::size_t count, DType from) {
  if (from == DType::bf16) reduce_to_accum(out, &in, 1, count, DType::bf16);
  else if (from == DType::f64) cast<float, double>(out, in, count);
  else std::memcpy(out, in, count * sizeof(float));
}

// A row in the three types, and memory for what lies between.
class Converter {
 public:
  explicit Converter(std::size_t width) : width_(width) {}

  void values(void* out, DType to, const void* in, DType from) {
    if (to == from) {
      std::memcpy(out, in, width_ * dtype_size(to));
    } else if (to == DType::f32) {
      floats_of(out, in, width_, from);
    } else {
      const void* floats = in;
      if (from != DType::f32) {
        floats_of(room(floats_, sizeof(float)), in, width_, from);
        floats = floats_.data();
      }
      from_floats(out, to, floats);
    }
  }

  void encode(std::uint8_t* out, const RowFormat& to, const void* in, DType from) {
    if (!to.tiled) return values(out, to.type, in, from);
    values(room(words_, sizeof(std::uint16_t)), DType::bf16, in, from);
    encode_tokens(out, reinterpret_cast<const std::uint16_t*>(words_.data()), 1, width_, to.tokens);
  }

  void decode(void* out, DType to, const std::uint8_t* in, const RowFormat& from) {
    if (!from.tiled) return values(out, to, in, from.type);
    if (to == DType::bf16) return decode_tokens(static_cast<std::uint16_t*>(out), in, 1, width_, from.tokens);
    if (to == DType::f32) return decode_tokens(static_cast<float*>(out), in, 1, width_, from.tokens);
    decode_tokens(static_cast<float*>(room(floats_, sizeof(float))), in, 1, width_, from.tokens);
    from_floats(out, to, floats_.data());
  }

 private:
  void from_floats(void* out, DType to, const void* floats) const {
    if (to == DType::bf16) round_from_accum(out, floats, width_, DType::bf16);
    else cast<double, float>(out, floats, width_);
  }
  void* room(Bytes& bytes, std::size_t each) const {
    bytes.resize(width_ * each);
    return bytes.data();
  }

  std::size_t width_;
  Bytes floats_, words_;
};

bool copies(const RowFormat& format, DType type) { return !format.tiled && format.type == type; }

}  // namespace

RowFormat row_format_from_name(std::string_view name) {
  for (const DType type : {DType::bf16, DType::f32, DType::f64})
    if (name == dtype_name(type)) return {false, type, TokenFormat::fp8};
  return {true, DType::bf16, token_format_from_name(name)};
}

std::size_t row_bytes(const RowFormat& format, std::size_t width) {
  return format.tiled ? token_row_bytes(format.tokens, width) : width * dtype_size(format.type);
}

void gather_rows(std::uint8_t* out, const RowTable& table, const std::int64_t* index, std::size_t entries, std::size_t bytes) {
  for (std::size_t i = 0; i < entries; ++i) std::memcpy(out + i * bytes, table.rows[index[i]], bytes);
}

void encode_rows(std::uint8_t* out, const RowFormat& format, const RowTable& table, const std::int64_t* index, std::size_t entries,
                 std::size_t width, DType type) {
  const std::size_t bytes = row_bytes(format, width);
  if (copies(format, type)) return gather_rows(out, table, index, entries, bytes);
  Converter converter(width);
  for (std::size_t i = 0; i < entries; ++i) converter.encode(out + i * bytes, format, table.rows[index[i]], type);
}

void decode_rows(void* out, DType type, const RowTable& table, const std::int64_t* index, std::size_t entries, std::size_t width,
                 const RowFormat& format) {
  const std::size_t bytes = width * dtype_size(type);
  auto* to = static_cast<std::uint8_t*>(out);
  if (copies(format, type)) return gather_rows(to, table, index, entries, bytes);
  Converter converter(width);
  std::vector<const std::uint8_t*> decoded(table.count, nullptr);
  for (std::size_t i = 0; i < entries; ++i, to += bytes) {
    const std::uint8_t*& before = decoded[static_cast<std::size_t>(index[i])];
    if (before != nullptr) {
      std::memcpy(to, before, bytes);
      continue;
    }
    converter.decode(to, type, table.rows[index[i]], format);
    before = to;
  }
}

void sum_rows(std::uint8_t* out, const RowFormat& to, const RowTable& table, const std::int64_t* index, const std::int64_t* first, std::size_t sums,
              std::size_t width, const RowFormat& from, DType accum) {
  if (accum != DType::f32 && accum != DType::f64) throw std::invalid_argument("rows are added up in f32 or f64, not in " + std::string(dtype_name(accum)));
  const std::size_t out_bytes = row_bytes(to, width), wide_bytes = width * dtype_size(accum);
  std::int64_t most = 0;
  for (std::size_t i = 0; i < sums; ++i) most = std::max(most, first[i + 1] - first[i]);
  // Of bf16 into bf16, and of floats into floats, the kernel loads, adds and rounds in registers.
  const bool at_once = !from.tiled && !to.tiled && from.type == to.type && accum_dtype(from.type) == accum;
  const bool in_place = copies(from, accum);
  Converter converter(width);
  Bytes wide(at_once || in_place ? 0 : static_cast<std::size_t>(most) * wide_bytes), total(at_once ? 0 : wide_bytes);
  std::vector<const void*> parts(static_cast<std::size_t>(most));
  for (std::size_t i = 0; i < sums; ++i, out += out_bytes) {
    const auto n = static_cast<std::size_t>(first[i + 1] - first[i]);
    const std::int64_t* chosen = index + first[i];
    if (n == 0) {
      std::fill(total.begin(), total.end(), std::uint8_t{0});
      if (at_once) std::memset(out, 0, out_bytes);
      else converter.encode(out, to, total.data(), accum);
      continue;
    }
    for (std::size_t k = 0; k < n; ++k) {
      const std::uint8_t* row = table.rows[chosen[k]];
      parts[k] = row;
      if (at_once || in_place) continue;
      converter.decode(wide.data() + k * wide_bytes, accum, row, from);
      parts[k] = wide.data() + k * wide_bytes;
    }
    if (at_once) {
      reduce_to(out, parts.data(), static_cast<int>(n), width, from.type);
    } else {
      add_accum(total.data(), parts.data(), static_cast<int>(n), width, accum);
      converter.encode(out, to, total.data(), accum);
    }
  }
}

}  // namespace ff
