// Python's view of a storage process's native half. Everything crosses as plain tuples of ints; what may wait for a lock or
// the disk releases the GIL.
#include "fireflyer/storage/server/node.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "errors.hpp"

namespace nb = nanobind;

namespace {

using Released = nb::call_guard<nb::gil_scoped_release>;
using ChunkTuple = std::tuple<std::uint64_t, std::uint32_t>;
using ContentTuple = std::tuple<std::uint32_t, std::uint64_t>;
using CompletionTuple = std::tuple<std::uint64_t, std::uint32_t, std::uint64_t, std::uint64_t, std::uint32_t, std::uint32_t, std::uint64_t>;
using RequestTuple = std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>;
using TableTuple = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, bool, std::int64_t, std::uint64_t, bool>;

constexpr std::size_t of_file_step = 256;

ff::ChunkId chunk_of(const ChunkTuple& chunk) { return {std::get<0>(chunk), std::get<1>(chunk)}; }
ff::ContentId content_of(const ContentTuple& content) { return {std::get<0>(content), std::get<1>(content)}; }

ff::CompletionRecord completion_of(const CompletionTuple& completion) {
  const auto& [client, channel, sequence, file, index, made_in, version] = completion;
  return {{client, sequence, channel}, {file, index}, {made_in, version}};
}

CompletionTuple to_tuple(const ff::CompletionRecord& completion) {
  return {completion.request.client, completion.request.channel, completion.request.sequence, completion.chunk.file, completion.chunk.index, completion.content.made_in, completion.content.version};
}

ChunkTuple to_tuple(const ff::ChunkId& chunk) { return {chunk.file, chunk.index}; }

// None: there is nothing. A removal has length -1.
nb::object held(const ff::Content& content) {
  if (content.state == ff::ContentState::none) return nb::none();
  const std::int64_t length = content.state == ff::ContentState::removed ? std::int64_t{-1} : std::int64_t{content.length};
  return nb::make_tuple(content.made_in, content.version, length, content.crc);
}

ff::UpdateKind kind_of(const std::string& operation) {
  if (operation == "write") return ff::UpdateKind::write;
  if (operation == "truncate") return ff::UpdateKind::truncate;
  if (operation == "remove") return ff::UpdateKind::remove;
  if (operation == "replace") return ff::UpdateKind::replace;
  throw std::invalid_argument("no such operation: " + operation + "; there are write, truncate, remove and replace");
}

// A target together with the node that has its data. `close` gives it up.
struct NodeTarget {
  std::shared_ptr<ff::ChunkNode> node;
  std::shared_ptr<ff::ChunkTarget> open;

  ff::ChunkTarget& target() const {
    if (!open || open->closed()) throw std::invalid_argument("the target is closed");
    return *open;
  }
  ff::ChunkEngine& engine() const { return target().engine(); }
};

// ---------------------------------------------------------------------------------------------- events

struct ToPython {
  ff::ChunkNode& node;

  nb::object operator()(ff::MessageEvent& e) const {
    return nb::make_tuple("message", e.link, nb::bytes(e.body.data(), e.body.size()), node.hold(std::move(e.data)));
  }
  nb::object operator()(const ff::LostEvent& e) const { return nb::make_tuple("lost", e.link, e.reason); }
  nb::object operator()(const ff::StagedEvent& e) const {
    return nb::make_tuple("staged", e.target, e.job, e.content.made_in, e.content.version, e.content.length, e.content.crc);
  }
  nb::object operator()(const ff::StageFailedEvent& e) const { return nb::make_tuple("stage_failed", e.target, e.job, e.kind, e.message); }
  nb::object operator()(const ff::DroppedEvent& e) const { return nb::make_tuple("dropped", e.target, e.job); }
  nb::object operator()(const ff::AdoptedEvent& e) const { return nb::make_tuple("adopted", e.target, e.job); }
  nb::object operator()(const ff::DamageEvent& e) const { return nb::make_tuple("damage", e.target, e.chunk.file, e.chunk.index); }
  nb::object operator()(const ff::DiskFailedEvent& e) const { return nb::make_tuple("disk_failed", e.target, e.message); }
  nb::object operator()(const ff::VerifiedEvent& e) const {
    const nb::object last = e.last ? nb::object(nb::make_tuple(e.last->file, e.last->index)) : nb::none();
    return nb::make_tuple("verified", e.target, e.job, last, e.bytes);
  }
};

nb::list take(ff::ChunkNode& node, std::size_t limit) {
  auto events = [&] {
    nb::gil_scoped_release released;
    return node.events().take(limit);
  }();
  nb::list taken;
  for (ff::NodeEvent& event : events) taken.append(std::visit(ToPython{node}, event));
  return taken;
}

// ---------------------------------------------------------------------------------------------- the node

NodeTarget open_target(const std::shared_ptr<ff::ChunkNode>& node, std::uint64_t number, const std::string& directory, std::uint64_t capacity_bytes,
                       double reserve, std::uint64_t reserve_at_most_bytes, bool durable) {
  return with_chunk_errors([&] {
    ff::EngineOptions options;
    options.capacity_bytes = capacity_bytes;
    options.reserve = reserve;
    options.reserve_at_most_bytes = reserve_at_most_bytes;
    options.durable = durable;
    nb::gil_scoped_release released;
    return NodeTarget{node, node->open_target(number, directory, options)};
  });
}

void publish(ff::ChunkNode& node, const std::vector<TableTuple>& entries) {
  std::vector<ff::PublishedChain> chains;
  for (const auto& [target, chain, chain_version, serving, fence_until_ns, tail, answers_committed] : entries)
    chains.push_back({chain, chain_version, serving, answers_committed, fence_until_ns, tail, node.target(target)});
  nb::gil_scoped_release released;
  node.server().publish(chains);
}

std::string body_of(const nb::bytes& body) {
  if (body.size() > ff::max_body_bytes) throw std::invalid_argument("a body of " + std::to_string(body.size()) + " bytes exceeds the maximum of " + std::to_string(ff::max_body_bytes));
  return {body.c_str(), body.size()};
}

nb::dict node_stats(const ff::ChunkNode& node) {
  const ff::NodeStats s = node.stats();
  nb::dict made;
  made["links"] = s.server.links, made["reads"] = s.server.reads, made["fetched"] = s.server.fetched, made["read_bytes"] = s.server.read_bytes, made["refused"] = s.server.refused;
  made["messages"] = s.server.messages, made["dropped"] = s.server.dropped, made["held_back"] = s.server.held_back, made["stalled"] = s.server.stalled;
  made["buffer_bytes"] = s.buffer_bytes, made["handles"] = s.handles, made["events"] = s.events;
  return made;
}

constexpr const char* by_kernel = "kernel";
constexpr const char* by_threads = "threads";

std::shared_ptr<ff::ChunkNode> make_node(int io_threads, int job_threads, std::size_t buffer_bytes, const std::string& cold_reads, std::int64_t unread_ns) {
  if (cold_reads != by_kernel && cold_reads != by_threads) throw std::invalid_argument("cold_reads must be \"kernel\" or \"threads\"");
  const auto cold_by = cold_reads == by_kernel ? ff::ColdBy::kernel : ff::ColdBy::threads;
  if (io_threads < 1 || job_threads < 1 || buffer_bytes < 2) throw std::invalid_argument("io_threads and job_threads must be at least 1, buffer_bytes at least 2");
  if (unread_ns < 1) throw std::invalid_argument("unread_ns must be at least 1");
  ff::LinkPatience patience;
  patience.unread_ns = unread_ns;
  return with_chunk_errors([&] { return std::make_shared<ff::ChunkNode>(io_threads, job_threads, buffer_bytes, cold_by, patience); });
}

// clang-format off
void bind_node(nb::module_& m) {
  nb::class_<ff::ChunkNode>(m, "ChunkNode")
      .def(nb::new_(&make_node), nb::kw_only(), nb::arg("io_threads"), nb::arg("job_threads"), nb::arg("buffer_bytes"),
           nb::arg("cold_reads") = "kernel", nb::arg("unread_ns") = ff::LinkPatience{}.unread_ns)
      .def_prop_ro("cold_reads", [](ff::ChunkNode& self) { return std::string(self.server().cold_by() == ff::ColdBy::kernel ? by_kernel : by_threads); })
      .def_prop_ro("event_fd", [](ff::ChunkNode& self) { return self.events().descriptor(); })
      .def("take", &take, nb::arg("limit"))
      .def("open_target", &open_target, nb::arg("target"), nb::arg("directory"), nb::kw_only(), nb::arg("capacity_bytes") = 0, nb::arg("reserve") = 0.05,
           nb::arg("reserve_at_most_bytes") = UINT64_MAX, nb::arg("durable") = true)
      .def("connect", [](ff::ChunkNode& self, int fd, bool reads, bool trusted, const std::string& owner) { return self.server().connect(fd, reads, trusted, owner); },
           nb::arg("fd"), nb::kw_only(), nb::arg("reads"), nb::arg("trusted") = false, nb::arg("owner") = "", Released())
      .def(
          "grant",
          [](ff::ChunkNode& self, std::uint64_t link, std::uint64_t from, std::uint64_t to, std::int64_t until) { self.server().grant(link, from, to, until); },
          nb::arg("link"), nb::arg("file_from"), nb::arg("file_to"), nb::arg("until_ns"), Released())
      .def("trust", [](ff::ChunkNode& self, std::uint64_t link) { self.server().trust(link); }, nb::arg("link"), Released())
      .def("disconnect", [](ff::ChunkNode& self, std::uint64_t link) { self.server().disconnect(link); }, nb::arg("link"), Released())
      .def(
          "send",
          [](ff::ChunkNode& self, std::uint64_t link, const nb::bytes& body, std::uint64_t handle) {
            const std::string text = body_of(body);
            nb::gil_scoped_release released;
            self.server().send(link, text, self.data(handle));
          },
          nb::arg("link"), nb::arg("body"), nb::arg("handle") = 0)
      .def(
          "send_content",
          [](ff::ChunkNode& self, std::uint64_t link, const nb::bytes& body, std::uint64_t target, std::uint64_t file, std::uint32_t index,
             std::uint32_t made_in, std::uint64_t version) {
            std::string text = body_of(body);
            nb::gil_scoped_release released;
            self.send_content(link, std::move(text), *self.target(target), {file, index}, {made_in, version});
          },
          nb::arg("link"), nb::arg("body"), nb::arg("target"), nb::arg("file"), nb::arg("index"), nb::arg("made_in"), nb::arg("version"))
      .def(
          "length",
          [](ff::ChunkNode& self, std::uint64_t handle) {
            const ff::SharedBuffer data = self.data(handle);
            return data ? data->bytes().size() : 0;
          },
          nb::arg("handle"), Released())
      .def("release", &ff::ChunkNode::release, nb::arg("handle"), Released())
      .def("publish", &publish, nb::arg("entries"))
      .def("stats", &node_stats)
      .def("close", &ff::ChunkNode::close, Released());
}
// clang-format on

// ---------------------------------------------------------------------------------------------- targets

void stage(const NodeTarget& self, std::uint64_t job, const ChunkTuple& chunk, const ContentTuple& next, const std::optional<ContentTuple>& base,
           const std::string& operation, std::uint32_t offset, std::uint32_t length, std::uint32_t crc, std::uint64_t handle,
           const std::optional<RequestTuple>& completion) {
  ff::StageJob made;
  made.job = job;
  made.chunk = chunk_of(chunk);
  made.update.kind = kind_of(operation);
  made.update.offset = offset;
  made.update.length = length;
  made.update.next = content_of(next);
  if (base) made.update.base = content_of(*base);
  if (completion) made.update.request = ff::Request{std::get<0>(*completion), std::get<2>(*completion), std::get<1>(*completion)};
  const bool carries_data = made.update.kind == ff::UpdateKind::write || made.update.kind == ff::UpdateKind::replace;
  nb::gil_scoped_release released;
  if (carries_data) {
    made.bytes = length;
    made.crc = crc;
    made.data = self.node->data(handle);
  }
  self.target().stage(std::move(made));
}

nb::object find(const NodeTarget& self, const ChunkTuple& chunk) {
  const ff::ChunkId id = chunk_of(chunk);
  const auto stat = self.engine().stat(id);
  if (!stat) return nb::none();
  return nb::make_tuple(held(stat->committed), held(stat->pending), self.target().damaged(id, *stat));
}

std::optional<ff::ChunkId> behind(const std::optional<ChunkTuple>& after) {
  if (!after) return ff::ChunkId{};
  const auto [file, index] = *after;
  if (index != UINT32_MAX) return ff::ChunkId{file, index + 1};
  if (file != UINT64_MAX) return ff::ChunkId{file + 1, 0};
  return std::nullopt;
}

nb::list chunks(const NodeTarget& self, const std::optional<ChunkTuple>& after, std::size_t limit) {
  nb::list found;
  const auto from = behind(after);
  if (!from) return found;
  for (const auto& [chunk, stat] : self.engine().list(*from, {UINT64_MAX, UINT32_MAX}, limit)) {
    const bool settled = stat.pending.state == ff::ContentState::none && !self.target().damaged(chunk, stat);
    found.append(nb::make_tuple(to_tuple(chunk), settled ? held(stat.committed) : nb::none()));
  }
  return found;
}

std::vector<std::uint32_t> of_file(const NodeTarget& self, std::uint64_t file, std::uint32_t index, std::size_t limit, bool backwards) {
  limit = std::min(limit, of_file_step);
  std::vector<std::uint32_t> indices;
  if (!backwards) {
    const ff::ChunkId end = file == UINT64_MAX ? ff::ChunkId{UINT64_MAX, UINT32_MAX} : ff::ChunkId{file + 1, 0};
    for (const auto& [chunk, stat] : self.engine().list({file, index}, end, limit)) indices.push_back(chunk.index);
    return indices;
  }
  ff::ChunkId before = index == UINT32_MAX ? ff::ChunkId{file + 1, 0} : ff::ChunkId{file, index + 1};
  while (indices.size() < limit) {
    const auto found = self.engine().last_before(before);
    if (!found || found->first.file != file) break;
    before = found->first;
    indices.push_back(before.index);
  }
  return indices;
}

std::vector<CompletionTuple> completions(const NodeTarget& self, const std::optional<std::tuple<std::uint64_t, std::uint32_t>>& after, std::size_t limit) {
  std::uint64_t client = 0;
  std::uint32_t channel = 0;
  if (after) {
    std::tie(client, channel) = *after;
    if (channel == UINT32_MAX && client == UINT64_MAX) return {};
    client += channel == UINT32_MAX ? 1 : 0;
    ++channel;
  }
  std::vector<CompletionTuple> found;
  for (const ff::CompletionRecord& completion : self.engine().requests(client, channel, limit)) found.push_back(to_tuple(completion));
  return found;
}

nb::dict target_stats(const NodeTarget& self) {
  const ff::EngineStats s = self.engine().stats();
  const ff::DiskSpace space = self.target().space();
  nb::dict made;
  made["chunks"] = s.chunks, made["pending"] = s.pending, made["rows"] = s.requests, made["file_bytes"] = s.file_bytes;
  made["taken_bytes"] = s.taken_bytes, made["journal_bytes"] = s.journal_bytes, made["memory_bytes"] = s.memory_bytes;
  made["jobs"] = self.target().jobs(), made["free_bytes"] = space.free_bytes, made["total_bytes"] = space.total_bytes;
  return made;
}

// clang-format off
void bind_updates(nb::class_<NodeTarget>& target) {
  target.def("stage", &stage, nb::arg("job"), nb::arg("chunk"), nb::arg("next"), nb::arg("base").none(), nb::arg("operation"), nb::arg("offset"), nb::arg("length"),
             nb::arg("crc"), nb::arg("handle"), nb::arg("completion").none());
  target.def(
      "commit", [](const NodeTarget& self, const ChunkTuple& chunk, const ContentTuple& content) { self.target().commit(chunk_of(chunk), content_of(content)); },
      nb::arg("chunk"), nb::arg("content"), Released());
  target.def(
      "drop",
      [](const NodeTarget& self, std::uint64_t job, const ChunkTuple& chunk, const ContentTuple& content, const std::optional<CompletionTuple>& completion) {
        self.target().drop(job, chunk_of(chunk), content_of(content), completion ? std::optional(completion_of(*completion)) : std::nullopt);
      },
      nb::arg("job"), nb::arg("chunk"), nb::arg("content"), nb::arg("completion").none(), Released());
  target.def(
      "adopt",
      [](const NodeTarget& self, std::uint64_t job, const std::vector<CompletionTuple>& given, bool reset) {
        std::vector<ff::CompletionRecord> made;
        for (const CompletionTuple& completion : given) made.push_back(completion_of(completion));
        self.target().adopt(job, made, reset);
      },
      nb::arg("job"), nb::arg("completions"), nb::arg("reset"), Released());
  target.def("forget", [](const NodeTarget& self, std::uint64_t client) { self.target().forget(client); }, nb::arg("client"), Released());
  target.def(
      "verify",
      [](const NodeTarget& self, std::uint64_t job, const std::optional<ChunkTuple>& after, std::uint64_t limit_bytes) {
        if (limit_bytes < 1) throw std::invalid_argument("limit_bytes must be at least 1");
        self.target().verify(job, after ? std::optional(chunk_of(*after)) : std::nullopt, limit_bytes);
      },
      nb::arg("job"), nb::arg("after").none(), nb::arg("limit_bytes"), Released());
}
// clang-format on

// clang-format off
void bind_target(nb::module_& m) {
  nb::class_<NodeTarget> target(m, "ChunkTarget");
  target.def_prop_ro("number", [](const NodeTarget& self) { return self.target().number(); });
  bind_updates(target);
  target.def_prop_ro("completion_count", [](const NodeTarget& self) { return self.engine().stats().requests; });
  target.def("find", &find, nb::arg("chunk"));
  target.def(
      "completion",
      [](const NodeTarget& self, std::uint64_t client, std::uint32_t channel) {
        const auto found = self.engine().request(client, channel);
        return found ? std::optional(to_tuple(*found)) : std::nullopt;
      },
      nb::arg("client"), nb::arg("channel"));
  target.def("completions", &completions, nb::arg("after").none(), nb::arg("limit"));
  target.def("chunks", &chunks, nb::arg("after").none(), nb::arg("limit"));
  target.def("of_file", &of_file, nb::arg("file"), nb::arg("index"), nb::arg("limit"), nb::kw_only(), nb::arg("backwards") = false);
  target.def("pending", [](const NodeTarget& self) {
    std::vector<ChunkTuple> found;
    for (const ff::ChunkId& chunk : self.engine().pending()) found.push_back(to_tuple(chunk));
    return found;
  });
  target.def("stats", &target_stats);
  target.def("close", [](NodeTarget& self) {
    if (const auto open = std::exchange(self.open, nullptr)) open->close();
  }, Released());
}
// clang-format on

}  // namespace

void bind_storage_node(nb::module_& m) {
  bind_storage_errors(m);
  bind_target(m);
  bind_node(m);
}
