// Python's view of a client's ring. Buffers are held from `prepare` until the ring does not use them any more.
#include "fireflyer/chunk_ring.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "chunk_errors.hpp"

namespace nb = nanobind;

namespace {

class HeldBuffer {
 public:
  HeldBuffer(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~HeldBuffer() {
    const nb::gil_scoped_acquire held;
    PyBuffer_Release(&view_);
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;
  ff::MutableBytes bytes() const { return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

struct PythonRing {
  std::unique_ptr<ff::ChunkRing> open = std::make_unique<ff::ChunkRing>();
  std::atomic<bool> busy = false;
};

// While it lives no other thread is in the ring.
class Use {
 public:
  explicit Use(PythonRing& ring) : ring_(ring) {
    if (ring.busy.exchange(true)) throw std::runtime_error("another thread is using this ring; give each thread its own");
    if (ring.open) return;
    ring.busy = false;
    throw std::invalid_argument("the ring is closed");
  }
  ~Use() { ring_.busy = false; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ff::ChunkRing* operator->() const { return ring_.open.get(); }

 private:
  PythonRing& ring_;
};

struct ToPython {
  nb::object operator()(const ff::Completion& c) const {
    return nb::make_tuple("read", c.tag, static_cast<std::uint32_t>(c.status), c.bytes, c.content.made_in, c.content.version, c.chunk_length, c.chain_version,
                          c.where);
  }
  nb::object operator()(const ff::ReceivedMessage& m) const {
    const nb::object data = m.data.empty() ? nb::none() : nb::object(nb::bytes(m.data.data(), m.data.size()));
    return nb::make_tuple("message", m.server, nb::bytes(m.body.data(), m.body.size()), data);
  }
  nb::object operator()(const ff::LostServer& l) const { return nb::make_tuple("lost", l.server, l.reason); }
};

std::uint64_t prepare_read(PythonRing& self, int server, std::uint64_t tag, std::uint32_t chain, std::uint32_t chain_version, std::uint64_t file,
                           std::uint32_t index, std::uint32_t offset, std::uint32_t length, nb::handle into) {
  const Use ring(self);
  auto held = std::make_shared<HeldBuffer>(into, PyBUF_WRITABLE);
  const ff::MutableBytes memory = held->bytes();
  if (memory.size() < length) throw std::invalid_argument("the buffer has " + std::to_string(memory.size()) + " bytes, " + std::to_string(length) + " are asked for");
  return ring->prepare(server, {tag, file, index, chain, chain_version, offset, length, 0}, memory.first(length), std::move(held));
}

void prepare_message(PythonRing& self, int server, const nb::bytes& body, const nb::object& data) {
  const Use ring(self);
  if (body.size() > ff::max_body_bytes) throw std::invalid_argument("a body of " + std::to_string(body.size()) + " bytes is above " + std::to_string(ff::max_body_bytes));
  auto held = data.is_none() ? nullptr : std::make_shared<HeldBuffer>(data, PyBUF_SIMPLE);
  const ff::Bytes memory = held ? ff::Bytes(held->bytes()) : ff::Bytes{};
  if (memory.size() > ff::max_payload_bytes) throw std::invalid_argument("data of " + std::to_string(memory.size()) + " bytes are above " + std::to_string(ff::max_payload_bytes));
  ring->prepare(server, {body.c_str(), body.size()}, memory, std::move(held));
}

nb::list wait_for(PythonRing& self, std::size_t least, std::int64_t timeout_ns) {
  std::vector<ff::RingEvent> events;
  {
    const Use ring(self);
    const nb::gil_scoped_release released;
    events = ring->wait(least, timeout_ns);
  }
  if (events.empty() && PyErr_CheckSignals() != 0) throw nb::python_error();
  nb::list taken;
  for (const ff::RingEvent& event : events) taken.append(std::visit(ToPython{}, event));
  return taken;
}

void close_ring(PythonRing& self) {
  if (!self.open) return;
  { const Use only_one(self); }
  const auto closed = std::exchange(self.open, nullptr);
}

}  // namespace

void bind_chunk_ring(nb::module_& m) {
  nb::class_<PythonRing>(m, "ChunkRing")
      .def("__init__", [](PythonRing* self) { with_chunk_errors([&] { return new (self) PythonRing(); }); })
      .def_prop_ro("fd", [](PythonRing& self) { return Use(self)->descriptor(); })
      .def("add", [](PythonRing& self, int fd) { return Use(self)->add(fd); }, nb::arg("fd"))
      .def("remove", [](PythonRing& self, int server) { Use(self)->remove(server); }, nb::arg("server"))
      .def("prepare_read", &prepare_read, nb::arg("server"), nb::arg("tag"), nb::arg("chain"), nb::arg("chain_version"), nb::arg("file"), nb::arg("index"),
           nb::arg("offset"), nb::arg("length"), nb::arg("into"))
      .def("prepare_message", &prepare_message, nb::arg("server"), nb::arg("body"), nb::arg("data") = nb::none())
      .def(
          "submit",
          [](PythonRing& self) {
            const Use ring(self);
            const nb::gil_scoped_release released;
            ring->submit();
          })
      .def("wait", &wait_for, nb::arg("least"), nb::arg("timeout_ns"))
      .def("cancel", [](PythonRing& self, std::uint64_t read) { return Use(self)->cancel(read); }, nb::arg("read"))
      .def_prop_ro("under_way", [](PythonRing& self) { return Use(self)->under_way(); })
      .def("close", &close_ring);
}
