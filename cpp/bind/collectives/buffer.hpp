// Arguments of kernels: anything with the buffer protocol, contiguous.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace nb = nanobind;

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

inline bool overlap(const Buffer& a, const Buffer& b) {
  const auto x = reinterpret_cast<std::uintptr_t>(a.data()), y = reinterpret_cast<std::uintptr_t>(b.data());
  return x < y + b.size() && y < x + a.size();
}
