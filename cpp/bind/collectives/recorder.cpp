// Python's view of the flight recorder: snapshots as plain dictionaries, and a recorder of one's own for what is performed
// outside of the executor.
#include "recorder.hpp"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace {

bool reduces(ff::OpKind kind) { return kind == ff::OpKind::allreduce || kind == ff::OpKind::reduce || kind == ff::OpKind::reduce_scatter; }

nb::dict record_to_dict(const ff::RecordView& view) {
  nb::dict record;
  const bool message = view.direction != ff::Direction::none;
  record["id"] = view.id;
  record["seq"] = view.op.seq;
  record["kind"] = message ? ff::direction_name(view.direction) : ff::kind_name(view.op.kind);
  record["dtype"] = ff::dtype_name(view.op.dtype);
  record["op"] = message || !reduces(view.op.kind) ? "" : ff::reduce_op_name(view.op.reduce);
  record["count"] = view.op.count;
  record["root"] = view.op.root;
  record["peer"] = view.peer;
  record["tag"] = view.tag;
  record["bytes"] = view.bytes;
  record["path"] = ff::path_name(view.path);
  record["algorithm"] = view.algorithm;
  record["state"] = ff::record_state_name(view.state);
  record["failure"] = view.failure == ff::FailureKind::none ? "" : ff::failure_name(view.failure);
  record["submitted_ns"] = view.submitted_ns;
  record["started_ns"] = view.started_ns;
  record["finished_ns"] = view.finished_ns;
  record["progress_ns"] = view.progress_ns;
  record["chunks"] = view.chunks;
  record["chunks_done"] = view.chunks_done;
  record["chunk_bytes"] = view.chunk_bytes;
  record["saturated"] = view.saturated;
  nb::list samples;
  for (const auto& [chunk, ns] : view.samples) samples.append(nb::make_tuple(chunk, ns));
  record["samples"] = samples;
  return record;
}

template <class Enum, class Name>
Enum from_name(const std::string& name, int count, Name name_of, const char* what) {
  for (int i = 0; i < count; ++i) {
    if (name == name_of(static_cast<Enum>(i))) return static_cast<Enum>(i);
  }
  throw std::invalid_argument(std::string("no such ") + what + ": " + name);
}

ff::FailureKind failure_from_name(const std::string& name) {
  return name.empty() ? ff::FailureKind::none : from_name<ff::FailureKind>(name, ff::failure_kind_count, ff::failure_name, "failure");
}
ff::Path path_from_name(const std::string& name) { return from_name<ff::Path>(name, 7, ff::path_name, "path"); }

nb::dict link_to_dict(const ff::LinkEnd& end) {
  nb::dict link;
  link["rank"] = end.rank;
  link["channel"] = end.channel;
  link["socket"] = end.socket;
  link["at_ns"] = end.at_ns;
  link["sent"] = end.sent;
  link["sent_ns"] = end.sent_ns;
  link["blocked_since_ns"] = end.blocked_since_ns;
  link["unacknowledged"] = end.unacknowledged;
  link["retransmits"] = end.retransmits;
  link["received"] = end.received;
  link["awaiting_since_ns"] = end.awaiting_since_ns;
  link["unread"] = end.unread;
  link["frames_sent"] = end.frames_sent;
  link["frames_received"] = end.frames_received;
  link["frames_announced"] = end.frames_announced;
  link["announced_ns"] = end.announced_ns;
  link["broken"] = end.broken;
  return link;
}

}  // namespace

nb::dict snapshot_to_dict(const ff::Snapshot& snapshot) {
  nb::dict result;
  nb::list records, peer_progress, links;
  for (const auto& view : snapshot.records) records.append(record_to_dict(view));
  for (const auto& seen : snapshot.peer_progress) {
    nb::dict progress;
    progress["rank"] = seen.rank;
    progress["entered"] = seen.entered;
    progress["finished"] = seen.finished;
    progress["left"] = seen.left;
    progress["seen_ns"] = seen.seen_ns;
    peer_progress.append(progress);
  }
  for (const auto& end : snapshot.links) links.append(link_to_dict(end));
  result["records"] = records;
  result["monotonic_ns"] = snapshot.clock.monotonic_ns;
  result["realtime_ns"] = snapshot.clock.realtime_ns;
  result["submitted"] = snapshot.submitted;
  result["finished"] = snapshot.finished;
  result["dropped"] = snapshot.dropped;
  result["sightings"] = peer_progress;
  result["links"] = links;
  return result;
}

void bind_recorder(nb::module_& m) {
  using Entry = ff::Recorder::Entry;
  nb::class_<Entry>(m, "RecorderEntry")
      .def(
          "route",
          [](const Entry& entry, const std::string& path, int algorithm, std::uint64_t chunks, std::uint64_t chunk_bytes) {
            entry.route(path_from_name(path), algorithm, chunks, chunk_bytes);
          },
          nb::arg("path"), nb::arg("algorithm") = 0, nb::arg("chunks") = 0, nb::arg("chunk_bytes") = 0)
      .def("started", &Entry::started, nb::arg("now_ns"))
      .def("progress", &Entry::progress, nb::arg("chunks_done"), nb::arg("now_ns"))
      .def("saturated", &Entry::saturated, nb::arg("values"))
      .def(
          "finish", [](const Entry& entry, const std::string& failure, std::int64_t now_ns) { entry.finish(failure_from_name(failure), now_ns); },
          nb::arg("failure"), nb::arg("now_ns"));

  nb::class_<ff::Recorder>(m, "Recorder")
      .def(nb::init<std::size_t>(), nb::arg("capacity") = 1024)
      .def(
          "begin",
          [](ff::Recorder& self, std::uint64_t seq, const std::string& kind, std::uint64_t count, const std::string& dtype, const std::string& op, int root,
             const std::string& path, std::uint64_t bytes, std::int64_t submitted_ns) {
            const auto kind_of = from_name<ff::OpKind>(kind, ff::op_kind_count, ff::kind_name, "operation");
            const ff::ReduceOp reduce = op.empty() ? ff::ReduceOp::sum : ff::reduce_op_from_name(op);
            return self.begin({seq, count, kind_of, ff::dtype_from_name(dtype), root, reduce}, path_from_name(path), bytes, submitted_ns);
          },
          nb::kw_only(), nb::arg("seq"), nb::arg("kind"), nb::arg("count"), nb::arg("dtype"), nb::arg("op") = "", nb::arg("root") = -1, nb::arg("path") = "",
          nb::arg("bytes"), nb::arg("submitted_ns"), nb::keep_alive<0, 1>())
      .def(
          "begin_message",
          [](ff::Recorder& self, const std::string& direction, std::int32_t peer, std::int64_t tag, std::uint64_t seq, std::uint64_t count,
             const std::string& dtype, std::uint64_t bytes, std::int64_t submitted_ns) {
            if (direction != "send" && direction != "recv") throw std::invalid_argument("no such direction: " + direction);
            const ff::Direction way = direction == "send" ? ff::Direction::send : ff::Direction::receive;
            return self.begin(way, peer, tag, seq, count, ff::dtype_from_name(dtype), bytes, submitted_ns);
          },
          nb::kw_only(), nb::arg("direction"), nb::arg("peer"), nb::arg("tag"), nb::arg("seq"), nb::arg("count"), nb::arg("dtype"), nb::arg("bytes"),
          nb::arg("submitted_ns"), nb::keep_alive<0, 1>())
      .def("algorithm", [](ff::Recorder& self, const std::string& name) { return self.algorithm(name); }, nb::arg("name"))
      .def("snapshot", [](const ff::Recorder& self) { return snapshot_to_dict(self.snapshot()); });
}
