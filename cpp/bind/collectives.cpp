// Python's view of the executor. Callers keep the arrays alive; every call that may block releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fireflyer/executor.hpp"

namespace nb = nanobind;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;

ff::OpKind kind_from_name(const std::string& name) {
  for (const ff::OpKind kind : {ff::OpKind::allreduce, ff::OpKind::reduce, ff::OpKind::broadcast, ff::OpKind::barrier}) {
    if (name == ff::kind_name(kind)) return kind;
  }
  throw std::invalid_argument("no such operation: " + name);
}

}  // namespace

void bind_collectives(nb::module_& m) {
  nb::class_<ff::Work>(m, "NativeWork")
      .def("wait", &ff::Work::wait, nb::arg("timeout_ns"), Released())
      .def("done", &ff::Work::done, Released())
      .def(
          "failure",
          [](ff::Work& work) {
            const ff::Failure failure = work.failure();
            return std::make_tuple(static_cast<int>(failure.kind), failure.culprit, failure.seq, failure.text);
          },
          Released());

  nb::class_<ff::Executor>(m, "Executor")
      .def(
          "__init__",
          [](ff::Executor* self, int rank, std::vector<int> node_of_rank, std::vector<std::string> labels, std::vector<std::vector<int>> trees,
             std::int64_t timeout_ns, int window_fd, int doorbell_fd, int leader_fd, std::vector<std::pair<int, int>> local_fds,
             const std::vector<std::tuple<int, int, int>>& connections) {
            ff::Config config;
            config.group = ff::Group{rank, std::move(node_of_rank), std::move(labels), std::move(trees), timeout_ns};
            config.window_fd = window_fd;
            config.doorbell_fd = doorbell_fd;
            config.leader_fd = leader_fd;
            config.local_fds = std::move(local_fds);
            for (const auto& [tree, node, fd] : connections) config.connections.push_back({tree, node, fd});
            nb::gil_scoped_release released;
            new (self) ff::Executor(std::move(config));
          },
          nb::kw_only(), nb::arg("rank"), nb::arg("node_of_rank"), nb::arg("labels"), nb::arg("trees"), nb::arg("timeout_ns"), nb::arg("window_fd"),
          nb::arg("doorbell_fd"), nb::arg("leader_fd"), nb::arg("local_fds"), nb::arg("connections"))
      .def(
          "submit",
          [](ff::Executor& self, const std::string& kind, std::uintptr_t address, std::uint64_t count, const std::string& dtype, int root) {
            const ff::OpKind k = kind_from_name(kind);
            const ff::DType d = ff::dtype_from_name(dtype);
            nb::gil_scoped_release released;
            return self.submit(k, reinterpret_cast<void*>(address), count, d, root);
          },
          nb::arg("kind"), nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("root"))
      .def("abort", &ff::Executor::abort, nb::arg("reason"), Released())
      .def("close", &ff::Executor::close, Released())
      .def("abandon", &ff::Executor::abandon)
      .def(
          "stats",
          [](ff::Executor& self) {
            const ff::Stats s = self.stats();
            return std::make_tuple(s.bytes, s.in_flight_ns, std::vector<std::uint64_t>(s.operations.begin() + 1, s.operations.begin() + 5));
          },
          Released());

  m.def("create_window", &ff::Window::create, nb::arg("local_ranks"), nb::arg("slots"), nb::arg("chunk_bytes"));
  m.def(
      "orient",
      [](const std::vector<int>& parents, int root, int node) {
        const ff::Orientation view = ff::orient(parents, root, node);
        return std::make_tuple(view.parent, view.children);
      },
      nb::arg("parents"), nb::arg("root"), nb::arg("node"));
}
