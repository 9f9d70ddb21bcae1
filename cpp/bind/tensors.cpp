// Where tensors lie. Their framework is asked by the table of functions of DLPack (`__dlpack_c_exchange_api__`): no Python
// runs for each of ten thousand tensors.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "collectives/buffer.hpp"

namespace nb = nanobind;

namespace {

using Tensor = nb::dlpack::dltensor;

// As DLPack 1.3 lays it out ("DLPackExchangeAPI").
struct ExchangeApi {
  struct {
    std::uint32_t major, minor;
  } version;
  void* older;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // null where a framework has none; else 0, or an exception is set
  void* current_stream;
};

const ExchangeApi& api_of(nb::handle capsule) {
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw nb::python_error();
  if (api->version.major != 1 || api->tensor_from_object == nullptr)
    throw nb::value_error("the framework's table of DLPack is of another version, or cannot describe a tensor");
  return *api;
}

template <class Element>
Element* elements(const Buffer& buffer, const std::string& name, std::size_t count) {
  if (buffer.size() != count * sizeof(Element)) throw nb::value_error((name + " has not one element for each tensor").c_str());
  return static_cast<Element*>(buffer.data());
}

bool is_one_of(PyTypeObject* type, nb::handle types) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types.ptr()); ++i)
    if (reinterpret_cast<PyObject*>(type) == PyTuple_GET_ITEM(types.ptr(), i)) return true;
  return false;
}

// Whether the elements lie back to back, row by row, in host memory, and the shape is `shape`, a tuple.
bool is_dense(const Tensor& tensor, PyObject* shape) {
  if (tensor.device.device_type != nb::device::cpu::value || !PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != tensor.ndim)
    return false;
  bool dense = true;
  std::int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    if (size == -1 && PyErr_Occurred()) PyErr_Clear();
    if (size < 0 || size != tensor.shape[i]) return false;
    dense = dense && (size == 1 || tensor.strides == nullptr || tensor.strides[i] == stride);
    stride *= size;
  }
  return stride == 0 || (dense && tensor.data != nullptr);  // one without elements may have any strides, and no memory
}

bool is_empty(const Tensor& tensor) {
  return std::find(tensor.shape, tensor.shape + tensor.ndim, 0) != tensor.shape + tensor.ndim;
}

void describe(nb::handle capsule, nb::list tensors, nb::tuple types, nb::list shapes, nb::handle dtypes, nb::handle addresses) {
  const auto& api = api_of(capsule);
  const std::size_t n = nb::len(tensors);
  if (nb::len(shapes) != n) throw nb::value_error("there is not one shape for each tensor");
  const Buffer kinds(dtypes, "dtypes", true), places(addresses, "addresses", true);
  auto* kind = elements<std::uint32_t>(kinds, "dtypes", n);
  auto* place = elements<std::uint64_t>(places, "addresses", n);
  for (std::size_t i = 0; i < n; ++i) {
    kind[i] = 0;
    place[i] = 0;
    nb::handle tensor = tensors[i];
    if (!is_one_of(Py_TYPE(tensor.ptr()), types)) continue;
    Tensor found;
    if (api.tensor_from_object(tensor.ptr(), &found) != 0) {
      PyErr_Clear();  // sparse, or of another kind that has no elements in memory
      continue;
    }
    if (!is_dense(found, nb::handle(shapes[i]).ptr())) continue;
    kind[i] = std::uint32_t{found.dtype.lanes} << 16 | std::uint32_t{found.dtype.code} << 8 | found.dtype.bits;
    place[i] = is_empty(found) ? 0 : reinterpret_cast<std::uint64_t>(found.data) + found.byte_offset;
  }
}

}  // namespace

void bind_tensors(nb::module_& m) {
  m.def("tensors_in_memory", describe, nb::arg("api"), nb::arg("tensors"), nb::arg("types"), nb::arg("shapes"), nb::arg("dtypes"),
        nb::arg("addresses"));
}
