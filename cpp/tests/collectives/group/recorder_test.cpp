// The flight recorder: what it keeps, what it thins out, and that readers may look at any time.
#include "fireflyer/collectives/group/recorder.hpp"

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

ff::OpDescriptor op(std::uint64_t seq) { return {seq, 1000 + seq, ff::OpKind::allreduce, ff::DType::bf16, -1, ff::ReduceOp::max}; }

void keeps_what_it_is_told() {
  ff::Recorder recorder(4);
  const int tree = recorder.algorithm("double tree");
  CHECK(tree == 1 && recorder.algorithm("double tree") == 1 && recorder.algorithm("ring") == 2 && recorder.algorithm("") == 0);
  const auto entry = recorder.begin(op(7), ff::Path::unknown, 2014, 100);
  CHECK(recorder.snapshot().records.at(0).state == ff::RecordState::queued);
  entry.route(ff::Path::pipeline, tree, 3);
  entry.started(5000);
  entry.progress(1, 7500);
  entry.progress(1, 8000);  // no progress
  entry.progress(3, 9500);
  entry.saturated(5);
  entry.saturated(2);
  entry.finish(ff::FailureKind::peer_failed, 12000);
  entry.finish(ff::FailureKind::none, 13000);  // it has ended
  const auto shot = recorder.snapshot();
  const auto& view = shot.records.at(0);
  CHECK(view.op == op(7) && view.bytes == 2014 && view.path == ff::Path::pipeline && view.algorithm == "double tree");
  CHECK(view.state == ff::RecordState::failed && view.failure == ff::FailureKind::peer_failed);
  CHECK(view.submitted_ns == 100 && view.started_ns == 5000 && view.progress_ns == 9500 && view.finished_ns == 12000);
  CHECK(view.chunks == 3 && view.chunks_done == 3 && view.saturated == 7 && view.samples.size() == 2);
  CHECK(view.samples[0].chunk == 1 && view.samples[0].ns == 7000 && view.samples[1].chunk == 3 && view.samples[1].ns == 9000);
  CHECK(shot.submitted == 8 && shot.dropped == 0 && shot.clock.monotonic_ns > 0 && shot.clock.realtime_ns > 1'000'000'000'000'000'000);
}

void keeps_what_has_not_ended() {
  ff::Recorder recorder(3);
  const auto hung = recorder.begin(op(0), ff::Path::small, 8, 1);
  hung.started(2);
  for (std::uint64_t seq = 1; seq < 20; ++seq) recorder.begin(op(seq), ff::Path::small, 8, 1).finish(ff::FailureKind::none, 3);
  auto shot = recorder.snapshot();
  CHECK(shot.records.size() == 3 && shot.records[0].op.seq == 0 && shot.records[1].op.seq == 18 && shot.records[2].op.seq == 19);
  const auto one = recorder.begin(op(20), ff::Path::small, 8, 1), two = recorder.begin(op(21), ff::Path::small, 8, 1);
  const auto none = recorder.begin(op(22), ff::Path::small, 8, 1);
  CHECK(one && two && !none);
  none.started(5);
  none.finish(ff::FailureKind::none, 6);  // a record it has not, but it counts
  shot = recorder.snapshot();
  CHECK(shot.dropped == 1 && shot.submitted == 23 && shot.finished == 23 && shot.records.size() == 3);
  one.finish(ff::FailureKind::none, 7);
  const auto next = recorder.begin(op(23), ff::Path::small, 8, 1);
  CHECK(next);
  one.progress(9, 9);  // of an older record: does nothing
  CHECK(recorder.snapshot().records.back().op.seq == 23 && recorder.snapshot().records.back().chunks_done == 0);
}

void thins_samples_evenly() {
  ff::Recorder recorder(1);
  for (const std::uint64_t chunks : {31u, 32u, 33u, 64u, 1000u, 100000u}) {
    const auto entry = recorder.begin(op(0), ff::Path::direct, 8, 1);
    entry.route(ff::Path::direct, 0, chunks);
    entry.started(0);
    for (std::uint64_t chunk = 1; chunk <= chunks; ++chunk) entry.progress(chunk, static_cast<std::int64_t>(chunk) * 1000);
    entry.finish(ff::FailureKind::none, 1);
    const auto samples = recorder.snapshot().records.at(0).samples;
    CHECK(samples.size() >= std::min<std::uint64_t>(chunks, ff::max_samples / 2) && samples.size() <= ff::max_samples);
    const std::uint64_t stride = samples[1].chunk - samples[0].chunk;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      CHECK(samples[i].chunk == 1 + i * stride && samples[i].ns == static_cast<std::int64_t>(samples[i].chunk) * 1000);
    }
    CHECK(samples.back().chunk + stride > chunks);
  }
}

void records_messages() {
  ff::Recorder recorder(8);
  recorder.begin(ff::Direction::receive, 3, 42, 5, 100, ff::DType::f64, 800, 9).started(10);
  const auto shot = recorder.snapshot();
  const auto& view = shot.records.at(0);
  CHECK(view.direction == ff::Direction::receive && view.peer == 3 && view.tag == 42 && view.op.seq == 5 && view.path == ff::Path::exchange);
  CHECK(view.op.count == 100 && view.bytes == 800 && view.state == ff::RecordState::running && shot.submitted == 0);
}

// Under TSan this shows that nothing races; everywhere, that no reader sees half of one record and half of another.
void may_be_read_while_it_is_written() {
  ff::Recorder recorder(4);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int writer = 0; writer < 2; ++writer) {
    threads.emplace_back([&, writer] {
      for (std::uint64_t i = 0; i < 20000; ++i) {
        const std::uint64_t seq = i * 2 + static_cast<std::uint64_t>(writer);
        const auto entry = recorder.begin(op(seq), ff::Path::small, seq, static_cast<std::int64_t>(seq));
        entry.started(static_cast<std::int64_t>(seq));
        entry.progress(seq + 1, static_cast<std::int64_t>(seq));
        entry.finish(ff::FailureKind::none, static_cast<std::int64_t>(seq));
      }
      over.store(true);
    });
  }
  std::uint64_t last = 0;
  while (!over.load()) {
    const auto shot = recorder.snapshot();
    CHECK(shot.submitted >= last);
    last = shot.submitted;
    for (const auto& view : shot.records) {
      CHECK(view.op == op(view.op.seq) && view.bytes == view.op.seq && view.submitted_ns == static_cast<std::int64_t>(view.op.seq));
      if (view.state == ff::RecordState::done) CHECK(view.chunks_done == view.op.seq + 1 && view.finished_ns == view.submitted_ns);
    }
  }
  for (auto& thread : threads) thread.join();
  CHECK(recorder.snapshot().records.size() == 4 && recorder.snapshot().submitted == 40000);
}

void needs_room() {
  try {
    ff::Recorder recorder(0);
    CHECK(false);
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

int main() {
  keeps_what_it_is_told();
  keeps_what_has_not_ended();
  thins_samples_evenly();
  records_messages();
  may_be_read_while_it_is_written();
  needs_room();
}
