// Python's view of the exchange between ranks. Callers keep the memory alive; calls that may block release the GIL.
#include "fireflyer/collectives/p2p/exchange.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "codes.hpp"
#include "fireflyer/collectives/executor.hpp"

namespace nb = nanobind;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;
using Parts = std::vector<std::tuple<int, std::uintptr_t, std::uint64_t>>;
using Sum = std::tuple<int, std::uintptr_t, std::uint64_t, std::vector<std::uintptr_t>>;

std::vector<ff::Part> parts_of(const Parts& parts) {
  std::vector<ff::Part> made;
  made.reserve(parts.size());
  for (const auto& [rank, address, bytes] : parts) made.push_back({rank, reinterpret_cast<char*>(address), bytes});
  return made;
}

std::optional<ff::RowSum> sum_of(const std::optional<Sum>& sum) {
  if (!sum) return std::nullopt;
  const auto& [op, out, count, rows] = *sum;
  ff::RowSum made{reduce_op_from(op), reinterpret_cast<char*>(out), count, {}};
  for (const std::uintptr_t row : rows) made.rows.push_back(reinterpret_cast<const void*>(row));
  return made;
}

}  // namespace

void bind_exchange(nb::module_& m) {
  m.attr("ANY_RANK") = ff::any_rank;
  nb::class_<ff::Exchange>(m, "Exchange")
      .def("link", &ff::Exchange::link, nb::arg("rank"), nb::arg("fd"), Released())
      .def("linked", &ff::Exchange::linked, nb::arg("rank"), Released())
      .def(
          "send",
          [](ff::Exchange& self, int to, std::uintptr_t address, std::uint64_t bytes, int dtype, int tag) {
            const ff::DType d = dtype_from(dtype);
            nb::gil_scoped_release released;
            return self.send(to, reinterpret_cast<const void*>(address), bytes, d, tag);
          },
          nb::arg("to"), nb::arg("address"), nb::arg("size_bytes"), nb::arg("dtype"), nb::arg("tag"))
      .def(
          "receive",
          [](ff::Exchange& self, int from, std::uintptr_t address, std::uint64_t bytes, int dtype, int tag) {
            const ff::DType d = dtype_from(dtype);
            nb::gil_scoped_release released;
            return self.receive(from, reinterpret_cast<void*>(address), bytes, d, tag);
          },
          nb::arg("source"), nb::arg("address"), nb::arg("size_bytes"), nb::arg("dtype"), nb::arg("tag"))
      .def("fail", &ff::Exchange::fail, nb::arg("culprit"), nb::arg("text"), Released());

  m.def("exchange_of", [](ff::Executor& executor) -> ff::Exchange& { return executor.exchange(); }, nb::arg("executor"), nb::rv_policy::reference, nb::keep_alive<0, 1>());
  m.def(
      "submit_parts",
      [](ff::Executor& executor, int kind, std::uint64_t count, int dtype, int root, const Parts& out, const Parts& in,
         const std::optional<Sum>& sum) {
        const ff::OpKind k = kind_from(kind);
        const ff::DType d = dtype_from(dtype);
        auto outgoing = parts_of(out), incoming = parts_of(in);
        auto added = sum_of(sum);
        nb::gil_scoped_release released;
        return executor.submit_parts(k, count, d, root, std::move(outgoing), std::move(incoming), std::move(added));
      },
      nb::arg("executor"), nb::arg("kind"), nb::arg("count"), nb::arg("dtype"), nb::arg("root"), nb::arg("out"), nb::arg("in_"),
      nb::arg("sum").none() = nb::none());
}
