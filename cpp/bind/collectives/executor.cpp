// Python's view of the executor. Callers keep the arrays alive; every call that may block releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "codes.hpp"
#include "fireflyer/collectives/executor.hpp"
#include "fireflyer/collectives/transport/fabric.hpp"
#include "recorder.hpp"

namespace nb = nanobind;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;

// What the system refuses is an OSError with its errno, as everywhere in Python. To be called with the GIL.
template <typename Call>
auto with_os_errors(Call call) {
  try {
    return call();
  } catch (const std::system_error& error) {
    const nb::object value = nb::steal(PyObject_CallFunction(PyExc_OSError, "is", error.code().value(), error.what()));
    if (value.is_valid()) PyErr_SetObject(PyExc_OSError, value.ptr());
    throw nb::python_error();
  }
}

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

// Where a contiguous buffer lies; 0 for an object that has none. NumPy takes several times as long to say so.
std::uintptr_t address_of(nb::handle object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    return 0;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

ff::OpDescriptor describe(int kind, std::uint64_t count, int dtype, int root, int op) {
  return {0, count, kind_from(kind), dtype_from(dtype), root, reduce_op_from(op)};
}

ff::Fabric::Key key_from(const nb::bytes& given) {
  ff::Fabric::Key key;
  if (given.size() != key.size()) throw std::invalid_argument("a key has " + std::to_string(key.size()) + " bytes");
  std::copy_n(given.c_str(), key.size(), reinterpret_cast<char*>(key.data()));
  return key;
}

}  // namespace

// clang-format off
void bind_executor(nb::module_& m) {
  m.def("address_of", &address_of, nb::arg("buffer"));

  nb::class_<ff::Work>(m, "NativeWork")
      .def("wait", &ff::Work::wait, nb::arg("timeout_ns"), Released())
      .def("done", &ff::Work::done, Released())
      .def("source", &ff::Work::source)
      .def(
          "failure",
          [](ff::Work& work) {
            const ff::Failure failure = work.failure();
            return std::make_tuple(static_cast<int>(failure.kind), failure.culprit, failure.seq, failure.text);
          },
          Released());

  nb::class_<ff::Arena>(m, "Arena")
      .def(nb::new_([](int fd) { return with_os_errors([&] { return std::make_shared<ff::Arena>(fd); }); }), nb::arg("fd"))
      .def_static("create", [](std::size_t bytes) { return with_os_errors([&] { return ff::Arena::create(bytes); }); }, nb::arg("size_bytes"))
      .def_prop_ro("bytes", &ff::Arena::bytes)
      .def_prop_ro("used", &ff::Arena::used)
      .def("prefer_node", &ff::Arena::prefer_node, nb::arg("node"))
      .def("holds", [](const ff::Arena& self, std::uintptr_t address, std::size_t bytes) { return self.holds(reinterpret_cast<void*>(address), bytes); },
           nb::arg("address"), nb::arg("size_bytes"))
      .def(
          "allocate",
          [](const std::shared_ptr<ff::Arena>& self, std::size_t bytes) {
            struct Piece {
              std::shared_ptr<ff::Arena> arena;
              char* at;
              ~Piece() { arena->release(at); }
            };
            char* at = self->allocate(bytes);
            const nb::capsule owner(new Piece{self, at}, [](void* p) noexcept { delete static_cast<Piece*>(p); });
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(at, {bytes}, owner);
          },
          nb::arg("size_bytes"));

  nb::class_<ff::Fabric>(m, "Fabric")
      .def(nb::new_([](const std::string& module_path) {
             nb::gil_scoped_release released;
             return ff::load_fabric(module_path);
           }),
           nb::arg("module_path"))
      .def("address", [](const ff::Fabric& self) { const std::string a = self.address(); return nb::bytes(a.data(), a.size()); })
      .def(
          "meet",
          [](ff::Fabric& self, int node, const nb::bytes& address, const nb::bytes& outgoing, const nb::bytes& incoming) {
            return self.meet(node, {address.c_str(), address.size()}, key_from(outgoing), key_from(incoming));
          },
          nb::arg("node"), nb::arg("address"), nb::arg("outgoing"), nb::arg("incoming"));

  nb::class_<ff::Executor>(m, "Executor")
      .def(
          "__init__",
          [](ff::Executor* self, int rank, std::vector<int> node_of_rank, std::vector<std::string> labels, std::vector<std::vector<int>> trees,
             std::int64_t timeout_ns, int window_fd, int doorbell_fd, int leader_fd, std::vector<std::pair<int, int>> local_fds,
             const std::vector<std::tuple<int, int, int, int>>& connections, const std::vector<PythonRoute>& routes, const std::vector<PythonProgram>& programs,
             std::shared_ptr<ff::Arena> arena, const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, int>>& local_peers, std::vector<int> cpus, std::vector<int> network_cpus,
             std::shared_ptr<ff::Fabric> fabric) {
            ff::Config config;
            config.group = ff::Group{rank, std::move(node_of_rank), std::move(labels), std::move(trees), timeout_ns};
            for (const auto& route : routes) config.group.routes.push_back(route_from(route));
            for (const auto& program : programs) config.group.programs.push_back(program_from(program));
            config.window_fd = window_fd;
            config.doorbell_fd = doorbell_fd;
            config.leader_fd = leader_fd;
            config.local_fds = std::move(local_fds);
            for (const auto& [channel, node, socket, fd] : connections) config.connections.push_back({channel, node, socket, fd});
            config.arena = std::move(arena);
            config.fabric = std::move(fabric);
            for (const auto& [pid, address, number, fd] : local_peers) config.local_peers.push_back({{pid, address, number}, fd});
            config.cpus = std::move(cpus);
            config.network_cpus = std::move(network_cpus);
            with_os_errors([&] {
              nb::gil_scoped_release released;
              new (self) ff::Executor(std::move(config));
            });
          },
          nb::kw_only(), nb::arg("rank"), nb::arg("node_of_rank"), nb::arg("labels"), nb::arg("trees"), nb::arg("timeout_ns"), nb::arg("window_fd"),
          nb::arg("doorbell_fd"), nb::arg("leader_fd"), nb::arg("local_fds"), nb::arg("connections"),
          nb::arg("routes"), nb::arg("programs"), nb::arg("arena").none(), nb::arg("local_peers"),
          nb::arg("cpus") = std::vector<int>(), nb::arg("network_cpus") = std::vector<int>(), nb::arg("fabric").none() = nb::none())
      .def(
          "submit",
          [](ff::Executor& self, int kind, std::uintptr_t in, std::uintptr_t out, std::uint64_t count, int dtype, int root,
             int op) {
            const ff::OpDescriptor what = describe(kind, count, dtype, root, op);
            nb::gil_scoped_release released;
            return self.submit(what, reinterpret_cast<void*>(in), reinterpret_cast<void*>(out));
          },
          nb::arg("kind"), nb::arg("source"), nb::arg("target"), nb::arg("count"), nb::arg("dtype"), nb::arg("root"), nb::arg("op"))
      .def(
          "call",
          [](ff::Executor& self, int kind, std::uintptr_t in, std::uintptr_t out, std::uint64_t count, int dtype, int root,
             int op, std::int64_t patience_ns) {
            const ff::OpDescriptor what = describe(kind, count, dtype, root, op);
            nb::gil_scoped_release released;
            return self.call(what, reinterpret_cast<void*>(in), reinterpret_cast<void*>(out), patience_ns);
          },
          nb::arg("kind"), nb::arg("source"), nb::arg("target"), nb::arg("count"), nb::arg("dtype"), nb::arg("root"), nb::arg("op"), nb::arg("patience_ns"))
      .def("abort", &ff::Executor::abort, nb::arg("reason"), Released())
      .def("close", &ff::Executor::close, Released())
      .def("abandon", &ff::Executor::abandon)
      .def("placement_warnings", &ff::Executor::placement_warnings)
      .def("flight", [](ff::Executor& self) { return snapshot_to_dict(self.flight()); })
      .def(
          "stats",
          [](ff::Executor& self) {
            const ff::Stats s = self.stats();
            return std::make_tuple(s.bytes, s.in_flight_ns, s.saturated, std::vector<std::uint64_t>(s.operations.begin(), s.operations.end()));
          },
          Released());

  m.def(
      "create_window",
      [](int local_ranks, std::uint32_t slots, std::size_t chunk_bytes) { return with_os_errors([&] { return ff::Window::create(local_ranks, slots, chunk_bytes); }); },
      nb::arg("local_ranks"), nb::arg("slots"), nb::arg("chunk_bytes"));
  m.def("interleave_window", &ff::Window::interleave, nb::arg("fd"), nb::arg("nodes"));
  nb::class_<ff::OpenMemory>(m, "OpenMemory").def(nb::init<>()).def("close", &ff::OpenMemory::close);
  m.def("memory_probe", [] {
    const ff::MemoryProbe b = ff::memory_probe();
    return std::make_tuple(b.pid, b.address, b.number);
  });
  m.def("can_access", [](std::uint64_t pid, std::uint64_t address, std::uint64_t number) { return ff::can_access({pid, address, number}); },
        nb::arg("pid"), nb::arg("address"), nb::arg("number"));
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
// clang-format on
