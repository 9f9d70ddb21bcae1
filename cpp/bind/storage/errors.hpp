// What the engine and the system refuse, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

#include "fireflyer/storage/engine/disk.hpp"

void bind_storage_errors(nanobind::module_& m);  // ChunkError, with args (kind, message)

// What the system says is an OSError with its errno. To be called with the GIL.
template <typename Call>
auto with_chunk_errors(Call call) {
  try {
    return call();
  } catch (const ff::DiskError& error) {
    const nanobind::object value = nanobind::steal(PyObject_CallFunction(PyExc_OSError, "is", error.error(), error.what()));
    if (value.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
    throw nanobind::python_error();
  }
}
