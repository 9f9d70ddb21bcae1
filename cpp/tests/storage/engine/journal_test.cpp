// What the journal promises beside surviving power cuts: what is damaged is told from what never arrived, no space and failing disks lose nothing.
#include "fireflyer/storage/engine/engine.hpp"

#include <algorithm>
#include <cerrno>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "engine_calls.hpp"
#include "logged_disk.hpp"

namespace {

using ff::ChunkEngine;
using ff::EngineErrorKind;
using ff::UpdateKind;
using ff::test::chunk;
using ff::test::Data;
using ff::test::got;
using ff::test::LoggedDisk;
using ff::test::noise;
using ff::test::options;
using ff::test::put;
using ff::test::Random;
using ff::test::refused;
using ff::test::update;

// A process that waited for no disk was killed, the next one waits for it: what that one shows is on the disk.
void what_a_relaxed_process_left_is_durable_once_it_is_opened_so() {
  ff::EngineOptions relaxed = options();
  relaxed.durable = false;
  auto owned = std::make_unique<LoggedDisk>();
  const LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), relaxed);
  std::vector<std::size_t> lengths{1000, 70'000, 300'001};
  for (std::uint32_t index = 0; index < lengths.size(); ++index) put(engine, {1, index}, 1, noise(lengths[index], index));
  auto left_owned = std::make_unique<LoggedDisk>(disk, disk.log.size());
  const LoggedDisk& left = *left_owned;
  ChunkEngine next(std::move(left_owned), options());
  Random random{3};
  for (int cut = 0; cut < 20; ++cut) {
    ChunkEngine after(std::make_unique<LoggedDisk>(left.after_power_cut(left.log.size(), random)), options());
    for (std::uint32_t index = 0; index < lengths.size(); ++index) CHECK(got(after, {1, index}) == noise(lengths[index], index));
  }
}

ff::test::Image written(int flushes) {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  for (int i = 0; i < flushes; ++i) put(engine, {1, static_cast<std::uint32_t>(i)}, 1, noise(100, 1));
  Random random{1};
  return disk.after_power_cut(disk.log.size(), random);
}

void lost_records_are_not_taken_for_an_early_end() {
  const auto whole = written(5);
  const auto opened = [](const ff::test::Image& image) { return std::make_unique<ChunkEngine>(std::make_unique<LoggedDisk>(image), options())->stats().chunks; };
  CHECK(opened(whole) == 5);
  auto image = whole;
  image["journal-00000000"][3 * ff::batch_align_bytes + 200] ^= std::byte{1};  // in the middle: what followed was durable
  refused(EngineErrorKind::damaged, "journal-00000000 is not what was written", [&] { opened(image); });
  image = whole;
  image["journal-00000000"][4 * ff::batch_align_bytes + 200] ^= std::byte{1};  // the last batch is torn: it was never durable
  CHECK(opened(image) == 4);
  image = whole;
  image["journal-00000000"].resize(4 * ff::batch_align_bytes + 100);
  CHECK(opened(image) == 4);
  image.erase("journal-00000000");
  refused(EngineErrorKind::damaged, "journal-00000000 is missing", [&] { opened(image); });
  image = whole;
  image["blocks-00-0000"].resize(ff::stride_bytes(0));
  refused(EngineErrorKind::damaged, "a block that does not exist", [&] { opened(image); });
}

void a_disk_that_refuses_is_believed_once() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  const Data data = noise(100, 1);
  put(engine, chunk, 1, data);
  disk.refuse = [](const ff::test::Operation& op) { return op.kind == ff::test::Operation::sync ? EIO : 0; };
  ff::Lsn lsn = 0;
  engine.stage(chunk, update(UpdateKind::write, 2, 0, data), lsn);
  const ff::Lsn before = engine.durable();
  refused(EngineErrorKind::failed, "Input/output error", [&] { engine.flush(); });
  disk.refuse = nullptr;  // a later sync that succeeds says nothing about what was lost
  refused(EngineErrorKind::failed, "Input/output error", [&] { engine.flush(); });
  refused(EngineErrorKind::failed, "Input/output error", [&] { engine.commit(chunk, {1, 2}); });
  CHECK(engine.durable() == before && got(engine, chunk) == data);
}

// Of the last group only the mark behind it says that it is durable. It is in the page cache: a process that is killed leaves
// it, a power cut may not. Without it, whose content is not there counts as not written.
void the_content_of_the_last_group_is_looked_at() {
  for (const bool marked : {false, true}) {
    auto owned = std::make_unique<LoggedDisk>();
    LoggedDisk& disk = *owned;
    ChunkEngine engine(std::move(owned), options());
    put(engine, {1, 1}, 1, noise(5000, 1));
    put(engine, {1, 2}, 1, noise(5000, 2));
    auto left = std::make_unique<LoggedDisk>(disk, disk.log.size() - (marked ? 0 : 1));
    left->content("blocks-00-0000")[ff::stride_bytes(0) + 100] ^= std::byte{1};
    ChunkEngine again(std::move(left), options());
    CHECK(got(again, {1, 1}) == noise(5000, 1) && again.stat({1, 2}).has_value() == marked);
    if (marked) refused(EngineErrorKind::damaged, "not what was written", [&] { again.verify({1, 2}, *again.view({1, 2})); });
  }
}

// It may have been reported. Whoever has the other copies knows.
void what_cannot_be_read_is_not_taken_for_what_never_arrived() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  put(engine, {1, 1}, 1, noise(5000, 1));
  auto left = std::make_unique<LoggedDisk>(disk, disk.log.size() - 1);  // without the mark
  left->before_read_of = [disk = left.get()](int file) {
    if (disk->name_of(file).starts_with("blocks-")) throw ff::DiskError(EIO, "cannot read");
  };
  refused(EngineErrorKind::damaged, "lost the last write of chunk 1:1", [&] { ChunkEngine(std::move(left), options()); });
}

void a_snapshot_knows_its_journal() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ff::EngineOptions o = options();
  o.snapshot_bytes = 1;
  ChunkEngine engine(std::move(owned), o);
  ff::Lsn lsn = 0;
  put(engine, {1, 1}, 1, noise(100, 1));
  bool once = true;
  disk.before_write = [&](int file) {  // while the snapshot is written
    if (!disk.name_of(file).starts_with("snapshot-") || !std::exchange(once, false)) return;
    engine.stage({1, 2}, update(UpdateKind::write, 1, 0, noise(100, 2)), lsn);
    engine.commit({1, 2}, {1, 1});
    engine.flush();  // nobody waits for a snapshot
  };
  CHECK(engine.untidy());
  engine.tidy();
  CHECK(!once && engine.durable() >= lsn);
  Random random{1};
  auto image = disk.after_power_cut(disk.log.size(), random);
  CHECK(image.contains("snapshot-00000001"));
  CHECK(ChunkEngine(std::make_unique<LoggedDisk>(image), o).stats().chunks == 2);
  image["journal-00000001"][100] ^= std::byte{1};
  refused(EngineErrorKind::damaged, "journal-00000001 is not what was written", [&] { ChunkEngine(std::make_unique<LoggedDisk>(image), o); });
}

// What needs no block goes on while there is journal in hand, and what then still waits is not lost.
// Each opening begins a journal. A process that dies at each start does nothing else.
void openings_do_not_fill_the_disk() {
  ff::EngineOptions o = options();
  o.journal_step = 64 << 10;
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk* disk = owned.get();
  auto engine = std::make_unique<ChunkEngine>(std::move(owned), o);
  put(*engine, {1, 1}, 1, noise(100, 1));
  std::size_t most = 0;
  for (int turn = 0; turn < 30; ++turn) {
    auto left = std::make_unique<LoggedDisk>(*disk, disk->log.size());
    disk = left.get();
    engine = std::make_unique<ChunkEngine>(std::move(left), o);
    const auto names = disk->list();
    most = std::max(most, static_cast<std::size_t>(std::count_if(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("journal-"); })));
    CHECK(engine->stats().chunks == 1);
  }
  CHECK(most > 2 && most <= 9);
  put(*engine, {1, 2}, 1, noise(100, 2));
  CHECK(ChunkEngine(std::make_unique<LoggedDisk>(*disk, disk->log.size()), o).stats().chunks == 2);
}

void without_space_for_more_journal() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ff::EngineOptions o = options();
  o.journal_step = 8 * ff::batch_align_bytes;
  ChunkEngine engine(std::move(owned), o);
  bool full = false;
  disk.refuse = [&](const ff::test::Operation& op) { return full && op.kind == ff::test::Operation::grow ? ENOSPC : 0; };
  ff::Lsn lsn = 0;
  const Data data = noise(100, 1);
  for (std::uint32_t i = 0; i < 20; ++i) put(engine, {1, i}, 1, data);
  full = true;
  std::uint32_t written = 20;
  const auto write = [&] { engine.stage({1, written}, update(UpdateKind::write, 1, 0, data), lsn); };
  for (; written < 40; ++written) {
    try {
      write();
    } catch (const ff::EngineError& error) {
      CHECK(error.kind() == EngineErrorKind::no_space);
      break;
    }
    engine.flush();
  }
  CHECK(written < 30);
  for (std::uint32_t i = 20; i < written; ++i) engine.commit({1, i}, {1, 1});
  engine.flush();
  engine.stage({1, 0}, update(UpdateKind::remove, 2, 0, {}), lsn);
  engine.commit({1, 0}, {1, 2});
  CHECK(engine.flush() > lsn);
  bool waited = false;
  for (std::uint32_t i = 1; i < 20 && !waited; ++i) {  // in the end all of it is used
    engine.stage({1, i}, update(UpdateKind::remove, 2, 0, {}), lsn);
    engine.commit({1, i}, {1, 2});
    try {
      engine.flush();
    } catch (const ff::EngineError& error) {
      CHECK(error.kind() == EngineErrorKind::no_space);
      waited = true;
    }
  }
  CHECK(waited && engine.durable() < lsn);
  {
    Random random{1};
    auto left = std::make_unique<LoggedDisk>(disk.after_power_cut(disk.log.size(), random));
    left->refuse = disk.refuse;
    ChunkEngine reader(std::move(left), o);  // a full disk is no reason not to read
    CHECK(got(reader, {1, 19}) == data);
    refused(EngineErrorKind::no_space, "free some on the disk", [&] { reader.stage({1, 99}, update(UpdateKind::write, 1, 0, data), lsn); });
  }
  full = false;
  CHECK(engine.flush() >= lsn);
  write();
}

void without_space_for_a_snapshot() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ff::EngineOptions o = options();
  o.snapshot_bytes = 8 * ff::batch_align_bytes;
  ChunkEngine engine(std::move(owned), o);
  int refusals = 0, left = 3;
  disk.refuse = [&](const ff::test::Operation& op) {
    const bool meant = op.kind == ff::test::Operation::grow && disk.name_when_locked(op.file).starts_with("snapshot-") && left > 0;
    if (meant) --left, ++refusals;
    return meant ? ENOSPC : 0;
  };
  for (std::uint32_t i = 0; i < 60; ++i) {
    put(engine, {1, i}, 1, noise(100, i));
    engine.tidy();
  }
  CHECK(refusals == 3 && left == 0);
  Random random{1};
  const auto image = disk.after_power_cut(disk.log.size(), random);
  CHECK(image.lower_bound("snapshot-") != image.end());
  CHECK(ChunkEngine(std::make_unique<LoggedDisk>(image), o).stats().chunks == 60);
}

void whatever_fails_in_a_flush_ends_it() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  ff::Lsn lsn = 0;
  engine.stage(chunk, update(UpdateKind::write, 1, 0, noise(100, 1)), lsn);
  disk.before_sync = [] { throw std::bad_alloc(); };
  refused(EngineErrorKind::failed, "bad_alloc", [&] { engine.flush(); });
  disk.before_sync = nullptr;
  refused(EngineErrorKind::failed, "bad_alloc", [&] { engine.flush(); });
}

}  // namespace

int main() {
  what_a_relaxed_process_left_is_durable_once_it_is_opened_so();
  lost_records_are_not_taken_for_an_early_end();
  a_disk_that_refuses_is_believed_once();
  the_content_of_the_last_group_is_looked_at();
  what_cannot_be_read_is_not_taken_for_what_never_arrived();
  a_snapshot_knows_its_journal();
  openings_do_not_fill_the_disk();
  without_space_for_more_journal();
  without_space_for_a_snapshot();
  whatever_fails_in_a_flush_ends_it();
}
