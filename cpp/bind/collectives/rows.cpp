// Python's view of the kernels of rows. Every size and every number of a row is checked here; the GIL is released around
// the work.
#include "fireflyer/collectives/kernels/rows.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "buffer.hpp"

namespace nb = nanobind;

namespace {

// No row in memory has as many values; sizes of rows with fewer do not overflow.
constexpr std::size_t kMaxWidth = std::size_t{1} << 48;

std::size_t product(std::size_t a, std::size_t b) {
  std::size_t result = 0;
  if (__builtin_mul_overflow(a, b, &result))
    throw nb::value_error((std::to_string(a) + " rows of " + std::to_string(b) + " bytes are more than memory can hold").c_str());
  return result;
}

std::size_t checked_width(std::size_t width) {
  if (width > kMaxWidth) throw nb::value_error(("width is " + std::to_string(width) + "; allowed: up to " + std::to_string(kMaxWidth)).c_str());
  return width;
}

// Rows of all buffers, counted one buffer after the other.
class Rows {
 public:
  Rows(nb::sequence buffers, std::size_t row_bytes) {
    for (nb::handle item : buffers) {
      const std::string name = "rows[" + std::to_string(held_.size()) + "]";
      const Buffer& buffer = held_.emplace_back(item, name, false);
      if (row_bytes == 0 || buffer.size() % row_bytes != 0)
        throw nb::value_error((name + " holds " + std::to_string(buffer.size()) + " bytes, not rows of " + std::to_string(row_bytes)).c_str());
      const auto* at = static_cast<const std::uint8_t*>(buffer.data());
      for (std::size_t i = 0; i < buffer.size() / row_bytes; ++i) rows_.push_back(at + i * row_bytes);
    }
  }
  ff::RowTable table() const { return {rows_.data(), rows_.size()}; }
  void apart_from(const Buffer& out) const {
    for (const Buffer& buffer : held_)
      if (overlap(out, buffer)) throw nb::value_error("out overlaps rows");
  }

 private:
  std::vector<Buffer> held_;
  std::vector<const std::uint8_t*> rows_;
};

// Numbers of rows, each of which there is. A copy: `out` may lie over them, and other threads run meanwhile.
class Index {
 public:
  Index(nb::handle numbers, std::size_t rows, const std::string& name = "index") {
    const Buffer held(numbers, name, false);
    if (held.size() % sizeof(std::int64_t) != 0) throw nb::value_error((name + " must hold int64").c_str());
    numbers_.resize(held.size() / sizeof(std::int64_t));
    if (!numbers_.empty()) std::memcpy(numbers_.data(), held.data(), held.size());
    for (const std::int64_t number : numbers_)
      if (number < 0 || static_cast<std::uint64_t>(number) >= rows)
        throw nb::value_error((name + " names row " + std::to_string(number) + " of " + std::to_string(rows)).c_str());
  }
  const std::int64_t* data() const { return numbers_.data(); }
  std::size_t size() const { return numbers_.size(); }

 private:
  std::vector<std::int64_t> numbers_;
};

void expect_bytes(const Buffer& out, std::size_t rows, std::size_t row_bytes) {
  if (out.size() != product(rows, row_bytes))
    throw nb::value_error(("out holds " + std::to_string(out.size()) + " bytes, not the " + std::to_string(rows * row_bytes) + " of " +
                           std::to_string(rows) + " rows")
                              .c_str());
}

ff::DType values_of(const std::string& name) {
  const ff::DType type = ff::dtype_from_name(name);
  if (type != ff::DType::bf16 && type != ff::DType::f32 && type != ff::DType::f64)
    throw nb::value_error(("tokens are bf16, f32 or f64, not " + name).c_str());
  return type;
}

void gather(nb::handle out, nb::sequence rows, nb::handle index, std::size_t row_bytes) {
  const Buffer to(out, "out", true);
  const Rows from(rows, row_bytes);
  const Index chosen(index, from.table().count);
  expect_bytes(to, chosen.size(), row_bytes);
  from.apart_from(to);
  nb::gil_scoped_release released;
  ff::gather_rows(static_cast<std::uint8_t*>(to.data()), from.table(), chosen.data(), chosen.size(), row_bytes);
}

void encode(nb::handle out, nb::sequence rows, nb::handle index, std::size_t width, const std::string& codec, const std::string& dtype) {
  const ff::RowFormat format = ff::row_format_from_name(codec);
  const ff::DType type = values_of(dtype);
  const Buffer to(out, "out", true);
  const Rows from(rows, checked_width(width) * ff::dtype_size(type));
  const Index chosen(index, from.table().count);
  expect_bytes(to, chosen.size(), ff::row_bytes(format, width));
  from.apart_from(to);
  nb::gil_scoped_release released;
  ff::encode_rows(static_cast<std::uint8_t*>(to.data()), format, from.table(), chosen.data(), chosen.size(), width, type);
}

void decode(nb::handle out, nb::sequence rows, nb::handle index, std::size_t width, const std::string& codec, const std::string& dtype) {
  const ff::RowFormat format = ff::row_format_from_name(codec);
  const ff::DType type = values_of(dtype);
  const Buffer to(out, "out", true);
  const Rows from(rows, ff::row_bytes(format, checked_width(width)));
  const Index chosen(index, from.table().count);
  expect_bytes(to, chosen.size(), width * ff::dtype_size(type));
  from.apart_from(to);
  nb::gil_scoped_release released;
  ff::decode_rows(to.data(), type, from.table(), chosen.data(), chosen.size(), width, format);
}

void sum(nb::handle out, nb::sequence rows, nb::handle index, nb::handle first, std::size_t width, const std::string& codec,
         const std::string& out_codec, const std::string& accum) {
  const ff::RowFormat format = ff::row_format_from_name(codec), to_format = ff::row_format_from_name(out_codec);
  const ff::DType wide = values_of(accum);
  const Buffer to(out, "out", true);
  const Rows from(rows, ff::row_bytes(format, checked_width(width)));
  const Index chosen(index, from.table().count);
  const Index begin(first, chosen.size() + 1, "first");
  if (begin.size() == 0 || begin.data()[0] != 0 || static_cast<std::size_t>(begin.data()[begin.size() - 1]) != chosen.size())
    throw nb::value_error("first must go from 0 to the end of index");
  for (std::size_t i = 1; i < begin.size(); ++i)
    if (begin.data()[i] < begin.data()[i - 1]) throw nb::value_error("first must not descend");
  expect_bytes(to, begin.size() - 1, ff::row_bytes(to_format, width));
  product(chosen.size(), width * ff::dtype_size(wide));  // of the kernel's memory for rows in `accum`
  from.apart_from(to);
  nb::gil_scoped_release released;
  ff::sum_rows(static_cast<std::uint8_t*>(to.data()), to_format, from.table(), chosen.data(), begin.data(), begin.size() - 1, width, format, wide);
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("gather_rows", gather, nb::arg("out"), nb::arg("rows"), nb::arg("index"), nb::arg("row_bytes"));
  m.def("encode_rows", encode, nb::arg("out"), nb::arg("rows"), nb::arg("index"), nb::arg("width"), nb::arg("codec"), nb::arg("dtype"));
  m.def("decode_rows", decode, nb::arg("out"), nb::arg("rows"), nb::arg("index"), nb::arg("width"), nb::arg("codec"), nb::arg("dtype"));
  m.def("sum_rows", sum, nb::arg("out"), nb::arg("rows"), nb::arg("index"), nb::arg("first"), nb::arg("width"), nb::arg("codec"), nb::arg("out_codec"),
        nb::arg("accum"));
}
