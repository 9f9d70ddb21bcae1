// Whatever a power cut leaves of what was not synced: the engine opens, and is at one point of its history, not before
// the last one that it called durable. Every operation of the disk is a place for the cut. And what an engine shows after
// its process was killed stays.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fireflyer/storage/engine/engine.hpp"
#include "logged_disk.hpp"

namespace {

using ff::ChunkEngine;
using ff::ChunkId;
using ff::ContentId;
using ff::test::Image;
using ff::test::LoggedDisk;
using ff::test::Random;

using Data = std::vector<std::byte>;

struct Version {
  ContentId id;
  bool removed = false;
  Data data;
  bool operator==(const Version&) const = default;
};

// One point of the history: what the engine holds.
struct Point {
  std::map<ChunkId, Version> committed, pending;
  std::map<std::pair<std::uint64_t, std::uint32_t>, ff::CompletionRecord> requests;
  bool operator==(const Point&) const = default;
};

Version version_of(ChunkEngine& engine, const ChunkId& chunk, const ff::Content& content, bool pending) {
  Version version{content.id(), content.state == ff::ContentState::removed, {}};
  if (version.removed) return version;
  const auto view = engine.view(chunk, pending);
  CHECK(view);
  engine.verify(chunk, *view);
  version.data.resize(content.length);
  CHECK(engine.read(*view, 0, version.data) == content.length);
  return version;
}

Point point_of(ChunkEngine& engine) {
  Point point;
  for (const auto& [chunk, stat] : engine.list({}, {UINT64_MAX, UINT32_MAX}, SIZE_MAX)) {
    if (stat.committed.state != ff::ContentState::none) point.committed[chunk] = version_of(engine, chunk, stat.committed, false);
    if (stat.pending.state != ff::ContentState::none) point.pending[chunk] = version_of(engine, chunk, stat.pending, true);
  }
  for (const auto& completion : engine.requests(0, 0, SIZE_MAX)) point.requests[{completion.request.client, completion.request.channel}] = completion;
  return point;
}

ff::EngineOptions options() {
  ff::EngineOptions o;
  o.group_bytes = 256 << 10;
  o.snapshot_bytes = 24 << 10;  // a snapshot every few flushes
  o.reserve = 0;
  o.snapshot_step = 2;
  o.journal_step = 32 << 10;
  o.sync_beside = false;  // the same log every time; the journal first, so that the content has yet to arrive
  return o;
}

// Keeps a second account of what it tells the engine to do.
class Workload {
 public:
  Workload(ChunkEngine& engine, Point now, Random& random) : engine_(engine), now_(std::move(now)), random_(random) {
    points[0] = now_;
    for (const auto* versions : {&now_.committed, &now_.pending})
      for (const auto& [chunk, version] : *versions) version_ = std::max(version_, version.id.version);
    for (const auto& [channel, completion] : now_.requests) version_ = std::max(version_, completion.request.sequence);
  }

  std::map<ff::Lsn, Point> points;

  void step() {
    const ChunkId chunk{random_.below(3), static_cast<std::uint32_t>(random_.below(2))};
    if (random_.below(10) == 0) {
      adopt();
    } else if (random_.below(20) == 0) {
      const std::uint64_t client = random_.below(3) + 1;
      std::erase_if(now_.requests, [client](const auto& completion) { return completion.first.first == client; });
      note(engine_.forget_client(client));
    } else if (now_.pending.contains(chunk)) {
      finish(chunk);
    } else {
      stage(chunk);
    }
  }

 private:
  void note(ff::Lsn lsn) { points[lsn] = now_; }

  // A cut may come between the records of one call, so each is a call of its own.
  void adopt() {
    const bool reset = random_.below(3) == 0;
    const ff::Request request{random_.below(3) + 1, version_ + 1 + random_.below(3), static_cast<std::uint32_t>(random_.below(2))};
    const ff::CompletionRecord completion{request, {1, 1}, {7, random_.below(2) * version_}};
    if (reset) {
      now_.requests.clear();
      note(engine_.adopt({}, true));
    }
    keep(completion);
    note(engine_.adopt({completion}, false));
  }

  void keep(const ff::CompletionRecord& completion) {
    auto& now = now_.requests[{completion.request.client, completion.request.channel}];
    const bool newer = completion.request.sequence > now.request.sequence;
    const bool same = completion.request.sequence == now.request.sequence && (now.content.version == 0 || completion.content > now.content);
    if (newer || same) now = completion;
  }

  void finish(const ChunkId& chunk) {
    const Version version = now_.pending.at(chunk);
    now_.pending.erase(chunk);
    if (random_.below(5) == 0) {
      std::optional<ff::CompletionRecord> completion;
      if (random_.below(2) == 0) {
        completion = ff::CompletionRecord{{random_.below(3) + 1, version.id.version, static_cast<std::uint32_t>(random_.below(2))}, chunk, {}};
        auto& now = now_.requests[{completion->request.client, completion->request.channel}];
        if (completion->request.sequence >= now.request.sequence) now = *completion;
      }
      return note(engine_.drop(chunk, version.id, completion));
    }
    if (version.removed) now_.committed.erase(chunk);
    else now_.committed[chunk] = version;
    note(engine_.commit(chunk, version.id));
  }

  void stage(const ChunkId& chunk) {
    ff::Update update;
    const bool present = now_.committed.contains(chunk);
    update.kind = static_cast<ff::UpdateKind>(random_.below(4));
    update.base = present ? now_.committed[chunk].id : ContentId{};
    update.next = {7, ++version_};
    if (random_.below(2) == 0) update.request = ff::Request{random_.below(3) + 1, version_, static_cast<std::uint32_t>(random_.below(2))};
    const bool empty = random_.below(6) == 0;
    update.offset = empty ? 0 : static_cast<std::uint32_t>(random_.below(9000));
    update.length = empty ? 0 : static_cast<std::uint32_t>(random_.below(70'000));
    Data fresh(empty ? 0 : random_.below(12'000));
    for (auto& byte : fresh) byte = static_cast<std::byte>(random_.next() >> 40);
    update.data = fresh;
    Version version{update.next, update.kind == ff::UpdateKind::remove, present ? now_.committed[chunk].data : Data{}};
    switch (update.kind) {
      case ff::UpdateKind::write:
        version.data.resize(std::max<std::size_t>(version.data.size(), update.offset + fresh.size()));
        std::copy(fresh.begin(), fresh.end(), version.data.begin() + update.offset);
        break;
      case ff::UpdateKind::truncate: version.data.resize(update.length); break;
      case ff::UpdateKind::replace: version.data = fresh; break;
      case ff::UpdateKind::remove: version.data.clear(); break;
    }
    now_.pending[chunk] = version;
    if (update.request) keep({*update.request, chunk, update.next});
    ff::Lsn lsn = 0;
    engine_.stage(chunk, update, lsn);
    note(lsn);
  }

  ChunkEngine& engine_;
  Point now_;
  Random& random_;
  std::uint64_t version_ = 0;
};

// The process is killed, the next one shows what it finds, and then the power is cut: nothing of that may be gone.
void killed_then_cut(const LoggedDisk& disk, std::size_t count, Random& random) {
  auto owned = std::make_unique<LoggedDisk>(disk, count);
  LoggedDisk& left = *owned;
  ChunkEngine next(std::move(owned), options());
  const Point shown = point_of(next);
  ChunkEngine after(std::make_unique<LoggedDisk>(left.after_power_cut(left.log.size(), random)), options());
  CHECK(point_of(after) == shown);
}

// Runs a workload on `disk`, then cuts the power at every operation; `depth`: how often it goes on from what was left.
void run(const Image& start, Random& random, int steps, int depth) {
  auto owned = std::make_unique<LoggedDisk>(start);
  LoggedDisk& disk = *owned;
  std::vector<std::pair<std::size_t, ff::Lsn>> durable{{0, 0}};
  std::map<ff::Lsn, Point> points;
  {
    ChunkEngine engine(std::move(owned), options());
    Workload work(engine, point_of(engine), random);
    const auto flush = [&] {
      const ff::Lsn lsn = engine.flush();
      durable.emplace_back(disk.log.size(), lsn);
    };
    bool inside = false;
    disk.before_write = [&](int file) {  // updates and flushes go on while a snapshot is written
      if (inside || !disk.name_of(file).starts_with("snapshot-") || random.below(2) == 0) return;
      inside = true;
      work.step();
      if (random.below(3) == 0) flush();
      inside = false;
    };
    for (int i = 0; i < steps; ++i) {
      work.step();
      if (random.below(3) != 0) continue;
      flush();
      engine.tidy();
    }
    if (random.below(2) == 0) engine.end();
    points = work.points;
    CHECK(points.rbegin()->second == point_of(engine));

    for (std::size_t cut = 0; cut <= disk.log.size(); ++cut) {
      ff::Lsn least = 0;
      for (const auto& [operations, lsn] : durable)
        if (operations <= cut) least = lsn;
      const Image image = disk.after_power_cut(cut, random);
      ChunkEngine again(std::make_unique<LoggedDisk>(image), options());
      const Point found = point_of(again);
      bool known = false;
      for (auto point = points.lower_bound(least); point != points.end() && !known; ++point) known = point->second == found;
      if (!known) std::fprintf(stderr, "cut after operation %zu of %zu, durable up to %lu\n", cut, disk.log.size(), static_cast<unsigned long>(least));
      CHECK(known);
      if (random.below(4) == 0) killed_then_cut(disk, cut, random);
      if (depth > 0 && random.below(40) == 0) run(image, random, steps / 3, depth - 1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1, count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 6;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Random random{seed * 0x9e3779b97f4a7c15u | 1u};
    for (int i = 0; i < 10; ++i) random.next();
    run({}, random, 60, 2);
  }
}
