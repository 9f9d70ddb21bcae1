// Python's view of a client's ring. Buffers are held from `prepare` until the ring does not use them any more.
#include "fireflyer/storage/client/ring.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "errors.hpp"

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

// As Python packs reads that are prepared together, and as their completions come.
struct PackedRead {
  std::uint64_t file, at;  // `at`: where in the buffer
  std::uint32_t server, chain, chain_version, index, offset, length;
  std::uint64_t reserved;
};

struct PackedCompletion {
  std::uint64_t tag, version, where;
  std::uint32_t status, length, made_in, chunk_length, chain_version, reserved = 0;
  std::uint64_t reserved_too = 0;
};

static_assert(sizeof(PackedRead) == 48 && sizeof(PackedCompletion) == 56);

// What the reads of one call share: it lives as long as one of them is under way.
struct Batch {
  HeldBuffer into;
  std::vector<std::uint64_t> numbers;
};

constexpr std::uint64_t first_batched = std::uint64_t{1} << 63;  // numbers of single reads are below

struct PythonRing {
  std::unique_ptr<ff::ChunkRing> open = std::make_unique<ff::ChunkRing>();
  std::map<std::uint64_t, std::weak_ptr<Batch>> batches;  // by the number of their first read
  std::uint64_t next_batched = first_batched;
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
                          c.where, c.crc);
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
  if (memory.size() < length) throw std::invalid_argument("the buffer has " + std::to_string(memory.size()) + " bytes, " + std::to_string(length) + " are requested");
  return ring->prepare(server, {tag, file, index, chain, chain_version, offset, length, 0}, memory.first(length), std::move(held));
}

void check(const ff::ChunkRing& ring, const PackedRead& read, std::size_t room) {
  if (read.server > INT32_MAX || !ring.has(static_cast<int>(read.server))) throw std::invalid_argument("there is no server " + std::to_string(read.server));
  if (read.at > room || read.length > room - read.at)
    throw std::invalid_argument("a read of " + std::to_string(read.length) + " bytes does not fit at " + std::to_string(read.at) + " of a buffer of " + std::to_string(room));
}

std::uint64_t prepare_reads(PythonRing& self, nb::handle requests, nb::handle into, std::uint64_t tag) {
  const Use ring(self);
  const HeldBuffer packed(requests, PyBUF_SIMPLE);
  const ff::MutableBytes memory = packed.bytes();
  if (memory.size() % sizeof(PackedRead) != 0) throw std::invalid_argument("packed reads have " + std::to_string(sizeof(PackedRead)) + " bytes each");
  const std::shared_ptr<Batch> batch(new Batch{HeldBuffer(into, PyBUF_WRITABLE), {}});
  const ff::MutableBytes target = batch->into.bytes();
  std::vector<PackedRead> reads(memory.size() / sizeof(PackedRead));
  if (!reads.empty()) std::memcpy(reads.data(), memory.data(), memory.size());
  for (const PackedRead& read : reads) check(*ring.operator->(), read, target.size());
  for (const PackedRead& read : reads) {
    const ff::ReadRequest request{tag++, read.file, read.index, read.chain, read.chain_version, read.offset, read.length, 0};
    batch->numbers.push_back(ring->prepare(static_cast<int>(read.server), request, target.subspan(read.at, read.length), batch, true));
  }
  std::erase_if(self.batches, [](const auto& one) { return one.second.expired(); });
  const std::uint64_t first = self.next_batched;
  if (!reads.empty()) self.batches[first] = batch;
  self.next_batched += reads.size();
  return first;
}

bool cancel(PythonRing& self, std::uint64_t read) {
  const Use ring(self);
  if (read < first_batched) return ring->cancel(read);
  const auto behind = self.batches.upper_bound(read);
  const auto batch = behind == self.batches.begin() ? nullptr : std::prev(behind)->second.lock();
  const std::uint64_t place = batch ? read - std::prev(behind)->first : 0;
  return batch && place < batch->numbers.size() && ring->cancel(batch->numbers[place]);
}

void prepare_message(PythonRing& self, int server, const nb::bytes& body, const nb::object& data) {
  const Use ring(self);
  if (body.size() > ff::max_body_bytes) throw std::invalid_argument("a body of " + std::to_string(body.size()) + " bytes exceeds the maximum of " + std::to_string(ff::max_body_bytes));
  auto held = data.is_none() ? nullptr : std::make_shared<HeldBuffer>(data, PyBUF_SIMPLE);
  const ff::Bytes memory = held ? ff::Bytes(held->bytes()) : ff::Bytes{};
  if (memory.size() > ff::max_payload_bytes) throw std::invalid_argument("data of " + std::to_string(memory.size()) + " bytes exceed the maximum of " + std::to_string(ff::max_payload_bytes));
  ring->prepare_message(server, {body.c_str(), body.size()}, memory, std::move(held));
}

nb::list wait_for(PythonRing& self, std::size_t least, std::int64_t timeout_ns) {
  std::vector<ff::RingEvent> events;
  bool raised = false;  // by the handler of a signal
  const auto interrupted = [&raised] {
    const nb::gil_scoped_acquire held;
    return raised = PyErr_CheckSignals() != 0;
  };
  {
    const Use ring(self);
    const nb::gil_scoped_release released;
    events = ring->wait(least, timeout_ns, interrupted);
  }
  if (raised) throw nb::python_error();
  std::vector<PackedCompletion> packed;
  nb::list taken;
  for (const ff::RingEvent& event : events) {
    const auto* const c = std::get_if<ff::Completion>(&event);
    if (c == nullptr || !c->batched) taken.append(std::visit(ToPython{}, event));
    else
      packed.push_back({c->tag, c->content.version, c->where, static_cast<std::uint32_t>(c->status), c->bytes, c->content.made_in, c->chunk_length,
                        c->chain_version});
  }
  // In front, so that what says that a server is lost stays behind its reads.
  if (!packed.empty()) taken.insert(0, nb::make_tuple("reads", nb::bytes(packed.data(), packed.size() * sizeof(PackedCompletion))));
  return taken;
}

void close_ring(PythonRing& self) {
  if (!self.open) return;
  { const Use only_one(self); }
  const auto closed = std::exchange(self.open, nullptr);
}

}  // namespace

// clang-format off
void bind_storage_ring(nb::module_& m) {
  nb::class_<PythonRing>(m, "ChunkRing")
      .def("__init__", [](PythonRing* self) { with_chunk_errors([&] { return new (self) PythonRing(); }); })
      .def_prop_ro("fd", [](PythonRing& self) { return Use(self)->descriptor(); })
      .def("add", [](PythonRing& self, int fd) { return Use(self)->add(fd); }, nb::arg("fd"))
      .def("remove", [](PythonRing& self, int server) { Use(self)->remove(server); }, nb::arg("server"))
      .def("prepare_read", &prepare_read, nb::arg("server"), nb::arg("tag"), nb::arg("chain"), nb::arg("chain_version"), nb::arg("file"), nb::arg("index"),
           nb::arg("offset"), nb::arg("length"), nb::arg("into"))
      .def("prepare_reads", &prepare_reads, nb::arg("requests"), nb::arg("into"), nb::arg("tag"))
      .def("prepare_message", &prepare_message, nb::arg("server"), nb::arg("body"), nb::arg("data") = nb::none())
      .def(
          "submit",
          [](PythonRing& self) {
            const Use ring(self);
            const nb::gil_scoped_release released;
            ring->submit();
          })
      .def("wait", &wait_for, nb::arg("least"), nb::arg("timeout_ns"))
      .def("cancel", &cancel, nb::arg("read"))
      .def_prop_ro("under_way", [](PythonRing& self) { return Use(self)->under_way(); })
      .def("close", &close_ring);
}
// clang-format on
