#include "errors.hpp"

#include <exception>

#include "fireflyer/storage/server/target.hpp"

namespace nb = nanobind;

namespace {

void translate(const std::exception_ptr& thrown, void* type) {
  try {
    std::rethrow_exception(thrown);
  } catch (const ff::EngineError& error) {
    const nb::object args = nb::make_tuple(ff::name_of(error.kind()), error.what());
    PyErr_SetObject(static_cast<PyObject*>(type), args.ptr());
  }
}

}  // namespace

void bind_storage_errors(nb::module_& m) {
  PyObject* const type = PyErr_NewException("fireflyer.native._core.ChunkError", PyExc_RuntimeError, nullptr);
  if (type == nullptr) throw nb::python_error();
  m.attr("ChunkError") = nb::steal(type);
  nb::register_exception_translator(translate, m.attr("ChunkError").ptr());
}
