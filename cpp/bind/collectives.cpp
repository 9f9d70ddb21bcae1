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

using PythonStep = std::tuple<int, int, std::uint32_t, std::uint32_t, std::uint32_t, std::vector<std::uint32_t>>;
using PythonProgram = std::tuple<std::string, int, int, std::uint32_t, std::uint32_t, std::vector<PythonStep>>;
using PythonRoute = std::tuple<std::string, std::int64_t, int, std::size_t>;

ff::OpKind kind_from_name(const std::string& name) {
  for (int number = 1; number < ff::op_kind_count; ++number) {
    const auto kind = static_cast<ff::OpKind>(number);
    if (name == ff::kind_name(kind)) return kind;
  }
  throw std::invalid_argument("no such operation: " + name);
}

// An action that is none is left for `check` to refuse.
ff::Action action_from_number(int number) { return static_cast<ff::Action>(number < 0 || number > 255 ? 255 : number); }

ff::Program program_from(const PythonProgram& given) {
  const auto& [kind, lane, channel, blocks, rounds, steps] = given;
  ff::Program program{kind_from_name(kind), lane, channel, blocks, rounds, {}};
  for (const auto& [action, peer, block, span, round, after] : steps) program.steps.push_back({action_from_number(action), peer, block, span, round, after});
  return program;
}

ff::Route route_from(const PythonRoute& given) {
  const auto& [kind, up_to_bytes, algorithm, chunk_bytes] = given;
  if (algorithm < 0 || algorithm >= ff::algorithm_count) throw std::invalid_argument("no such algorithm");
  return {kind_from_name(kind), up_to_bytes < 0 ? ff::never : static_cast<std::uint64_t>(up_to_bytes), static_cast<ff::Algorithm>(algorithm), chunk_bytes};
}

PythonProgram to_python(const ff::Program& program) {
  std::vector<PythonStep> steps;
  for (const ff::Step& s : program.steps) steps.emplace_back(static_cast<int>(s.action), s.peer, s.block, s.span, s.round, s.after);
  return {ff::kind_name(program.kind), program.lane, program.channel, program.blocks, program.rounds, steps};
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
             const std::vector<std::tuple<int, int, int, int>>& connections, const std::vector<PythonRoute>& routes, const std::vector<PythonProgram>& programs) {
            ff::Config config;
            config.group = ff::Group{rank, std::move(node_of_rank), std::move(labels), std::move(trees), timeout_ns};
            for (const auto& route : routes) config.group.routes.push_back(route_from(route));
            for (const auto& program : programs) config.group.programs.push_back(program_from(program));
            config.window_fd = window_fd;
            config.doorbell_fd = doorbell_fd;
            config.leader_fd = leader_fd;
            config.local_fds = std::move(local_fds);
            for (const auto& [channel, node, socket, fd] : connections) config.connections.push_back({channel, node, socket, fd});
            nb::gil_scoped_release released;
            new (self) ff::Executor(std::move(config));
          },
          nb::kw_only(), nb::arg("rank"), nb::arg("node_of_rank"), nb::arg("labels"), nb::arg("trees"), nb::arg("timeout_ns"), nb::arg("window_fd"),
          nb::arg("doorbell_fd"), nb::arg("leader_fd"), nb::arg("local_fds"), nb::arg("connections"),
          nb::arg("routes"), nb::arg("programs"))
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
  m.def(
      "tree_program",
      [](const std::string& kind, const std::vector<int>& parents, int root, int node, int lane) {
        return to_python(ff::tree_program(kind_from_name(kind), ff::orient(parents, root, node), lane));
      },
      nb::arg("kind"), nb::arg("parents"), nb::arg("root"), nb::arg("node"), nb::arg("lane"));
}
