// Python's view of the kernels and of CRC-32C. Arguments are anything with the buffer protocol, contiguous; every size
// is checked here, and the GIL is released around the work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fireflyer/cpu.hpp"
#include "fireflyer/crc32c.hpp"
#include "fireflyer/kernels.hpp"

namespace nb = nanobind;

namespace {

// A borrowed, contiguous buffer; held until the work on it is done.
class Buffer {
 public:
  Buffer(nb::handle object, const std::string& name, bool writable) {
    if (PyObject_CheckBuffer(object.ptr()) == 0) throw nb::type_error((name + " must be a buffer").c_str());
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      PyErr_Clear();
      throw nb::value_error((name + (writable ? " must be contiguous and writable" : " must be contiguous")).c_str());
    }
  }
  Buffer(Buffer&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }

  void* data() const { return view_.buf; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

bool overlap_partly(const Buffer& a, const Buffer& b) {
  const auto x = reinterpret_cast<std::uintptr_t>(a.data()), y = reinterpret_cast<std::uintptr_t>(b.data());
  return (x != y || a.size() != b.size()) && x < y + b.size() && y < x + a.size();
}

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

using Sum = void (*)(void*, const void* const*, int, std::size_t, ff::DType);

void sum_into(const Buffer& out, ff::DType out_dtype, nb::sequence inputs, ff::DType dtype, Sum sum) {
  const std::size_t count = elements(out, "out", out_dtype);
  std::vector<Buffer> held;
  std::vector<const void*> pointers;
  for (nb::handle item : inputs) {
    const std::string name = "inputs[" + std::to_string(held.size()) + "]";
    const Buffer& input = held.emplace_back(item, name, false);
    expect_count(elements(input, name, dtype), count, name);
    if (overlap_partly(out, input)) throw nb::value_error((name + " overlaps out without being it").c_str());
    pointers.push_back(input.data());
  }
  if (pointers.empty()) throw nb::value_error("inputs must not be empty");
  nb::gil_scoped_release released;
  sum(out.data(), pointers.data(), static_cast<int>(pointers.size()), count, dtype);
}

void reduce(nb::handle out, nb::sequence inputs, const std::string& dtype) {
  const ff::DType d = ff::dtype_from_name(dtype);
  sum_into(Buffer(out, "out", true), d, inputs, d, ff::reduce_to);
}

void reduce_to_accum(nb::handle acc, nb::sequence inputs, const std::string& dtype) {
  const ff::DType d = ff::dtype_from_name(dtype);
  sum_into(Buffer(acc, "acc", true), ff::accum_dtype(d), inputs, d, ff::reduce_to_accum);
}

void round_from_accum(nb::handle out, nb::handle acc, const std::string& dtype) {
  const ff::DType d = ff::dtype_from_name(dtype);
  const Buffer to(out, "out", true), from(acc, "acc", false);
  const std::size_t count = elements(to, "out", d);
  expect_count(elements(from, "acc", ff::accum_dtype(d)), count, "acc");
  if (overlap_partly(to, from)) throw nb::value_error("acc overlaps out without being it");
  nb::gil_scoped_release released;
  ff::round_from_accum(to.data(), from.data(), count, d);
}

using Checksum = std::uint32_t (*)(std::uint32_t, const void*, std::size_t);

template <Checksum checksum>
std::uint32_t checksum_of(nb::handle data, std::uint32_t crc) {
  const Buffer buffer(data, "data", false);
  nb::gil_scoped_release released;
  return checksum(crc, buffer.data(), buffer.size());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("reduce", reduce, nb::arg("out"), nb::arg("inputs"), nb::arg("dtype"));
  m.def("reduce_to_accum", reduce_to_accum, nb::arg("acc"), nb::arg("inputs"), nb::arg("dtype"));
  m.def("round_from_accum", round_from_accum, nb::arg("out"), nb::arg("acc"), nb::arg("dtype"));
  m.def("crc32c", checksum_of<ff::crc32c>, nb::arg("data"), nb::arg("crc") = 0);
  m.def("crc32c_portable", checksum_of<ff::crc32c_portable>, nb::arg("data"), nb::arg("crc") = 0);
  m.def("cpu_features", ff::cpu_feature_names);
  m.def("active_isa", [] { return std::string(ff::active_isa()); });
  m.def("isa_names", [] {
    std::vector<std::string> names;
    for (const char* name : {"avx512", "avx2", "portable"})
      if (ff::isa_supported(name)) names.emplace_back(name);
    return names;
  });
  m.def("set_isa", [](const std::string& name) { ff::set_isa(name.c_str()); }, nb::arg("name"));
}
