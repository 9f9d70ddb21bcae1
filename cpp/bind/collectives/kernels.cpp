// Python's view of the kernels and of CRC-32C. Arguments are anything with the buffer protocol, contiguous; every size
// is checked here, and the GIL is released around the work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "buffer.hpp"
#include "fireflyer/base/cpu.hpp"
#include "fireflyer/base/crc32c.hpp"
#include "fireflyer/collectives/kernels/kernels.hpp"
#include "fireflyer/collectives/kernels/tokens.hpp"

namespace nb = nanobind;

namespace {

bool overlap_partly(const Buffer& a, const Buffer& b) { return (a.data() != b.data() || a.size() != b.size()) && overlap(a, b); }

std::size_t elements(const Buffer& buffer, const std::string& name, ff::DType d) {
  if (buffer.size() % ff::dtype_size(d) != 0)
    throw nb::value_error((name + " holds " + std::to_string(buffer.size()) + " bytes, not a multiple of the " +
                           std::to_string(ff::dtype_size(d)) + " of " + ff::dtype_name(d))
                              .c_str());
  return buffer.size() / ff::dtype_size(d);
}

void expect_count(std::size_t got, std::size_t expected, const std::string& name) {
  if (got != expected)
    throw nb::value_error((name + " holds " + std::to_string(got) + " elements, not the " + std::to_string(expected) +
                           " of the output")
                              .c_str());
}

// Inputs of a reduction, each as long as the output and apart from it, or the output itself.
class Inputs {
 public:
  Inputs(nb::sequence inputs, ff::DType dtype, std::size_t count, const std::vector<const Buffer*>& outs) {
    for (nb::handle item : inputs) {
      const std::string name = "inputs[" + std::to_string(held_.size()) + "]";
      const Buffer& input = held_.emplace_back(item, name, false);
      expect_count(elements(input, name, dtype), count, name);
      for (const Buffer* out : outs)
        if (overlap_partly(*out, input)) throw nb::value_error((name + " overlaps out without being it").c_str());
      pointers_.push_back(input.data());
    }
    if (pointers_.empty()) throw nb::value_error("inputs must not be empty");
  }
  const void* const* data() const { return pointers_.data(); }
  int size() const { return static_cast<int>(pointers_.size()); }

 private:
  std::vector<Buffer> held_;
  std::vector<const void*> pointers_;
};

std::uint64_t reduce(nb::handle out, nb::sequence inputs, const std::string& dtype, const std::string& op, std::uint32_t divisor) {
  const ff::DType d = ff::dtype_from_name(dtype);
  const ff::ReduceOp o = ff::reduce_op_from_name(op);
  const Buffer to(out, "out", true);
  const std::size_t count = elements(to, "out", d);
  const Inputs in(inputs, d, count, {&to});
  nb::gil_scoped_release released;
  return ff::reduce_to(to.data(), in.data(), in.size(), count, d, o, divisor);
}

std::uint64_t reduce_many(nb::sequence outs, nb::sequence inputs, const std::string& dtype, const std::string& op, std::uint32_t divisor) {
  const ff::DType d = ff::dtype_from_name(dtype);
  const ff::ReduceOp o = ff::reduce_op_from_name(op);
  std::vector<Buffer> held;
  for (nb::handle item : outs) held.emplace_back(item, "outs[" + std::to_string(held.size()) + "]", true);
  if (held.empty()) throw nb::value_error("outs must not be empty");
  const std::size_t count = elements(held[0], "outs[0]", d);
  std::vector<const Buffer*> buffers;
  std::vector<void*> pointers;
  for (const Buffer& to : held) {
    const std::string name = "outs[" + std::to_string(buffers.size()) + "]";
    expect_count(elements(to, name, d), count, name);
    for (const Buffer* other : buffers)
      if (overlap_partly(*other, to)) throw nb::value_error((name + " overlaps another output").c_str());
    buffers.push_back(&to);
    pointers.push_back(to.data());
  }
  const Inputs in(inputs, d, count, buffers);
  nb::gil_scoped_release released;
  return ff::reduce_to_many(pointers.data(), static_cast<int>(pointers.size()), in.data(), in.size(), count, d, o, divisor);
}

std::uint64_t reduce_to_accum(nb::handle acc, nb::sequence inputs, const std::string& dtype, const std::string& op) {
  const ff::DType d = ff::dtype_from_name(dtype);
  const ff::ReduceOp o = ff::reduce_op_from_name(op);
  const Buffer to(acc, "acc", true);
  const std::size_t count = elements(to, "acc", ff::accum_dtype(d));
  const Inputs in(inputs, d, count, {&to});
  nb::gil_scoped_release released;
  return ff::reduce_to_accum(to.data(), in.data(), in.size(), count, d, o);
}

std::uint64_t round_from_accum(nb::handle out, nb::handle acc, const std::string& dtype, std::uint32_t divisor) {
  const ff::DType d = ff::dtype_from_name(dtype);
  const Buffer to(out, "out", true), from(acc, "acc", false);
  const std::size_t count = elements(to, "out", d);
  expect_count(elements(from, "acc", ff::accum_dtype(d)), count, "acc");
  if (overlap_partly(to, from)) throw nb::value_error("acc overlaps out without being it");
  nb::gil_scoped_release released;
  return ff::round_from_accum(to.data(), from.data(), count, d, divisor);
}

// Sizes of the three buffers of fp8 in blocks; returns the number of elements.
std::size_t check_blocks(const Buffer& codes, const Buffer& scales, const Buffer& values, std::size_t block) {
  if (block == 0) throw nb::value_error("a block needs at least one element");
  const std::size_t count = elements(values, "values", ff::DType::f32), blocks = count / block + (count % block != 0);
  if (codes.size() != count) throw nb::value_error(("codes holds " + std::to_string(codes.size()) + " bytes, not the " + std::to_string(count) + " of the values").c_str());
  if (scales.size() != blocks * 4)
    throw nb::value_error(("scales holds " + std::to_string(scales.size()) + " bytes, not the " + std::to_string(blocks * 4) + " of as many blocks").c_str());
  if (overlap(codes, scales) || overlap(codes, values) || overlap(scales, values)) throw nb::value_error("the buffers overlap");
  return count;
}

void quantize(nb::handle codes, nb::handle scales, nb::handle values, std::size_t block) {
  const Buffer to(codes, "codes", true), per_block(scales, "scales", true), from(values, "values", false);
  const std::size_t count = check_blocks(to, per_block, from, block);
  nb::gil_scoped_release released;
  ff::quantize_fp8_blocks(static_cast<std::uint8_t*>(to.data()), static_cast<float*>(per_block.data()), static_cast<const float*>(from.data()), count, block);
}

void dequantize(nb::handle values, nb::handle codes, nb::handle scales, std::size_t block) {
  const Buffer to(values, "values", true), from(codes, "codes", false), per_block(scales, "scales", false);
  const std::size_t count = check_blocks(from, per_block, to, block);
  nb::gil_scoped_release released;
  ff::dequantize_fp8_blocks(static_cast<float*>(to.data()), static_cast<const std::uint8_t*>(from.data()), static_cast<const float*>(per_block.data()), count, block);
}

// Rows of `width` values in `values` and their payloads; returns how many.
std::size_t check_rows(const Buffer& values, ff::DType type, const Buffer& payload, std::size_t width, ff::TokenFormat format) {
  const std::size_t row_bytes = ff::token_row_bytes(format, width), count = elements(values, "values", type);
  if (count % width != 0)
    throw nb::value_error(("values holds " + std::to_string(count) + " elements, not rows of " + std::to_string(width)).c_str());
  if (payload.size() != count / width * row_bytes)
    throw nb::value_error(("payload holds " + std::to_string(payload.size()) + " bytes, not the " + std::to_string(count / width * row_bytes) + " of " +
                           std::to_string(count / width) + " rows")
                              .c_str());
  if (overlap(values, payload)) throw nb::value_error("values overlaps payload");
  return count / width;
}

void encode_token_rows(nb::handle payload, nb::handle values, std::size_t width, const std::string& format) {
  const ff::TokenFormat f = ff::token_format_from_name(format);
  const Buffer to(payload, "payload", true), from(values, "values", false);
  const std::size_t rows = check_rows(from, ff::DType::bf16, to, width, f);
  nb::gil_scoped_release released;
  ff::encode_tokens(static_cast<std::uint8_t*>(to.data()), static_cast<const std::uint16_t*>(from.data()), rows, width, f);
}

void decode_token_rows(nb::handle values, nb::handle payload, std::size_t width, const std::string& format, const std::string& dtype) {
  const ff::TokenFormat f = ff::token_format_from_name(format);
  const ff::DType d = ff::dtype_from_name(dtype);
  if (d != ff::DType::f32 && d != ff::DType::bf16) throw nb::value_error(("tokens are decoded as f32 or bf16, not as " + dtype).c_str());
  const Buffer to(values, "values", true), from(payload, "payload", false);
  const std::size_t rows = check_rows(to, d, from, width, f);
  nb::gil_scoped_release released;
  const auto* bytes = static_cast<const std::uint8_t*>(from.data());
  if (d == ff::DType::f32) return ff::decode_tokens(static_cast<float*>(to.data()), bytes, rows, width, f);
  ff::decode_tokens(static_cast<std::uint16_t*>(to.data()), bytes, rows, width, f);
}

using Checksum = std::uint32_t (*)(std::uint32_t, const void*, std::size_t);

template <Checksum checksum>
std::uint32_t checksum_of(nb::handle data, std::uint32_t crc) {
  const Buffer buffer(data, "data", false);
  nb::gil_scoped_release released;
  return checksum(crc, buffer.data(), buffer.size());
}

std::uint32_t checksum_and_copy(nb::handle out, nb::handle data, std::uint32_t crc) {
  const Buffer to(out, "out", true), from(data, "data", false);
  if (to.size() != from.size())
    throw nb::value_error(("out holds " + std::to_string(to.size()) + " bytes, not the " + std::to_string(from.size()) + " of data").c_str());
  if (overlap(to, from)) throw nb::value_error("data overlaps out");
  nb::gil_scoped_release released;
  return ff::crc32c_copy(crc, to.data(), from.data(), from.size());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("reduce", reduce, nb::arg("out"), nb::arg("inputs"), nb::arg("dtype"), nb::arg("op") = "sum", nb::arg("divisor") = 1);
  m.def("reduce_many", reduce_many, nb::arg("outs"), nb::arg("inputs"), nb::arg("dtype"), nb::arg("op") = "sum", nb::arg("divisor") = 1);
  m.def("reduce_to_accum", reduce_to_accum, nb::arg("acc"), nb::arg("inputs"), nb::arg("dtype"), nb::arg("op") = "sum");
  m.def("round_from_accum", round_from_accum, nb::arg("out"), nb::arg("acc"), nb::arg("dtype"), nb::arg("divisor") = 1);
  m.def("quantize_fp8_blocks", quantize, nb::arg("codes"), nb::arg("scales"), nb::arg("values"), nb::arg("block") = 128);
  m.def("dequantize_fp8_blocks", dequantize, nb::arg("values"), nb::arg("codes"), nb::arg("scales"), nb::arg("block") = 128);
  m.def("encode_token_rows", encode_token_rows, nb::arg("payload"), nb::arg("values"), nb::arg("width"), nb::arg("codec"));
  m.def("decode_token_rows", decode_token_rows, nb::arg("values"), nb::arg("payload"), nb::arg("width"), nb::arg("codec"), nb::arg("dtype"));
  m.def("crc32c", checksum_of<ff::crc32c>, nb::arg("data"), nb::arg("crc") = 0);
  m.def("crc32c_copy", checksum_and_copy, nb::arg("out"), nb::arg("data"), nb::arg("crc") = 0);
  m.def("crc32c_joined", ff::crc32c_joined, nb::arg("first"), nb::arg("second"), nb::arg("second_bytes"));
  m.def("crc32c_portable", checksum_of<ff::crc32c_portable>, nb::arg("data"), nb::arg("crc") = 0);
  m.def("cpu_features", ff::cpu_feature_names);
  m.def("active_isa", [] { return std::string(ff::active_isa()); });
  m.def("isa_names", [] {
    std::vector<std::string> names;
    for (const char* name : {"avx512vbmi", "avx512", "avx2", "portable"})
      if (ff::isa_supported(name)) names.emplace_back(name);
    return names;
  });
  m.def("set_isa", [](const std::string& name) { ff::set_isa(name.c_str()); }, nb::arg("name"));
}
