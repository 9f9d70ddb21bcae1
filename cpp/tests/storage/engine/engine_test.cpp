// What the engine promises beside surviving power cuts: repetition, refusals, limits, damage found, readers left in peace.
#include "fireflyer/storage/engine/engine.hpp"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "engine_calls.hpp"
#include "fireflyer/base/crc32c.hpp"
#include "logged_disk.hpp"

namespace {

using ff::ChunkEngine;
using ff::ChunkId;
using ff::EngineErrorKind;
using ff::Update;
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

void reads_any_range() {
  ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
  Data data = noise(300'001, 1);
  put(engine, chunk, 1, data);
  const auto view = engine.view(chunk);
  for (const std::uint32_t from : {0u, 1u, 4095u, 4096u, 8191u, 262'144u, 296'960u, 299'999u, 300'000u, 300'001u, 400'000u})
    for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{4097}, std::size_t{290'000}, std::size_t{400'000}}) {
      Data into(length, std::byte{0x5a});
      const std::size_t expected = from >= data.size() ? 0 : std::min(length, data.size() - from);
      CHECK(engine.read(*view, from, into) == expected);
      CHECK(std::equal(into.begin(), into.begin() + static_cast<std::ptrdiff_t>(expected), data.begin() + static_cast<std::ptrdiff_t>(expected == 0 ? 0 : from)));
    }
  std::vector<std::uint32_t> checksums(74);
  engine.checksums(*view, 0, checksums);
  CHECK(checksums[73] == ff::crc32c(0, data.data() + 73 * 4096, data.size() - 73 * 4096));
  refused(EngineErrorKind::usage, "granules are out of range", [&] { engine.checksums(*view, 1, checksums); });
}

void holes_are_zeros_and_ends_move() {
  ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
  Data expected(70'000, std::byte{0});
  const Data piece = noise(500, 3);
  put(engine, chunk, 1, piece, UpdateKind::write, 69'500);
  std::copy(piece.begin(), piece.end(), expected.begin() + 69'500);
  CHECK(got(engine, chunk) == expected);
  ff::Lsn lsn = 0;
  Update cut = update(UpdateKind::truncate, 2, 0, {});
  cut.length = 69'700;
  engine.stage(chunk, cut, lsn);
  engine.commit(chunk, {1, 2});
  cut = update(UpdateKind::truncate, 3, 0, {});
  cut.length = 69'900;
  engine.stage(chunk, cut, lsn);
  engine.commit(chunk, {1, 3});
  expected.resize(69'700);
  expected.resize(69'900, std::byte{0});
  CHECK(got(engine, chunk) == expected);
  refused(EngineErrorKind::usage, "exceeds the maximum of 67108864", [&] { engine.stage(chunk, update(UpdateKind::write, 4, 64u << 20, piece), lsn); });
}

void what_does_not_fit_is_refused() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  const Data data = noise(10'000, 1);
  ff::Lsn first = 0, second = 0;
  const Update u = update(UpdateKind::write, 1, 0, data);
  engine.stage(chunk, u, first);
  CHECK(engine.flush() == first);
  const std::size_t operations = disk.log.size();
  engine.stage(chunk, u, second);
  CHECK(second <= engine.flush() && disk.log.size() == operations);
  CHECK(!engine.view(chunk) && engine.view(chunk, true));
  CHECK(engine.pending() == std::vector{chunk});
  engine.commit(chunk, {1, 1});
  CHECK(engine.pending().empty());
  CHECK(got(engine, chunk) == data);
  refused(EngineErrorKind::conflict, "is at version 1.1, the update was made for 0.0", [&] { engine.stage(chunk, u, first); });
  refused(EngineErrorKind::conflict, "has no version 1.9 pending", [&] { engine.commit(chunk, {1, 9}); });
  engine.stage(chunk, update(UpdateKind::remove, 2, 0, {}), first);
  refused(EngineErrorKind::conflict, "has version 1.2 pending", [&] { engine.stage(chunk, update(UpdateKind::write, 3, 0, data), first); });
  engine.commit(chunk, {1, 2});
  CHECK(!engine.stat(chunk) && engine.stats().chunks == 0 && engine.stats().taken_bytes > 0);
  engine.flush();
  CHECK(engine.stats().taken_bytes == 0);
}

// Data of whole granules are checked as they are written, others before. Both refuse the same, and keep nothing.
void data_that_are_not_those_of_the_update_are_refused() {
  constexpr std::uint32_t granule = ff::granule_bytes;
  const Data old = noise(300'001, 1);
  struct Case {
    UpdateKind kind;
    std::uint32_t offset;
    std::size_t bytes;
    bool fresh;  // nothing was there before
  };
  const std::vector<Case> cases{
      {UpdateKind::replace, 0, 300'001, false},
      {UpdateKind::replace, 0, 1, true},
      {UpdateKind::write, 0, 300'001, true},
      {UpdateKind::write, 3 * granule, 5000, true},
      {UpdateKind::write, 0, 75 * granule, false},
      {UpdateKind::write, 10 * granule, 3 * granule, false},
      {UpdateKind::write, 70 * granule, granule, false},
      {UpdateKind::write, 80 * granule, 100 * granule, false},
      {UpdateKind::write, 5 * granule, 5000, false},
      {UpdateKind::write, 17, 70'000, false},
      {UpdateKind::write, 70 * granule, 20'000, false},
  };
  for (const Case& one : cases) {
    ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
    if (!one.fresh) put(engine, chunk, 1, old);
    const ff::EngineStats before = engine.stats();
    const Data data = noise(one.bytes, 2);
    Update u = update(one.kind, one.fresh ? 1 : 2, one.offset, data);
    const std::uint32_t crc = ff::crc32c(0, data.data(), data.size());
    for (const std::uint32_t wrong : {crc ^ 1u, crc ^ 0x8000'0000u, ~crc}) {
      u.data_crc = wrong;
      ff::Lsn lsn = 0;
      refused(EngineErrorKind::usage, "do not match", [&] { engine.stage(chunk, u, lsn); });
      CHECK(engine.stats().taken_bytes == before.taken_bytes && engine.stats().pending == 0 && engine.stats().chunks == before.chunks);
    }
    u.data_crc = crc;
    ff::Lsn lsn = 0;
    engine.stage(chunk, u, lsn);
    u.data_crc = ~crc;  // of what is staged already, too
    refused(EngineErrorKind::usage, "do not match", [&] { engine.stage(chunk, u, lsn); });
    engine.commit(chunk, u.next);
    Data expected = one.fresh || one.kind == UpdateKind::replace ? Data{} : old;
    expected.resize(std::max(expected.size(), one.offset + data.size()));
    std::copy(data.begin(), data.end(), expected.begin() + one.offset);
    CHECK(got(engine, chunk) == expected);
  }
}

// As soon as it is written, and only where somebody will wait for it.
void the_disk_begins_with_what_is_staged() {
  for (const bool durable : {true, false}) {
    auto owned = std::make_unique<LoggedDisk>();
    LoggedDisk& disk = *owned;
    ff::EngineOptions o = options();
    o.durable = durable;
    ChunkEngine engine(std::move(owned), o);
    int begun = 0;
    disk.before_write_back = [&](int file, std::uint64_t offset, std::uint64_t bytes) {
      ++begun;
      std::uint64_t written = 0;
      for (const auto& op : disk.log)
        if (op.kind == ff::test::Operation::write && op.file == file && op.offset >= offset && op.offset + op.data.size() <= offset + bytes) written += op.data.size();
      CHECK(written == 300'001 + ff::trailer_bytes(ff::class_of(300'001)));
    };
    ff::Lsn lsn = 0;
    for (std::uint32_t index = 0; index < 3; ++index) engine.stage({1, index}, update(UpdateKind::write, 1, 0, noise(300'001, index)), lsn);
    CHECK(begun == (durable ? 3 : 0));
  }
}

void rows_stay_in_the_order_of_their_updates() {
  ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
  const auto completion = [](std::uint64_t sequence, std::uint64_t version) { return ff::CompletionRecord{{4, sequence, 1}, chunk, {1, version}}; };
  const auto kept = [&] { return *engine.request(4, 1); };
  engine.adopt({completion(5, 50), completion(4, 60)}, false);
  CHECK(kept() == completion(5, 50));
  engine.adopt({completion(5, 0)}, false);
  CHECK(kept() == completion(5, 50));
  ff::Lsn lsn = 0;
  Update u = update(UpdateKind::remove, 1, 0, {});
  u.request = ff::Request{4, 3, 1};
  engine.stage(chunk, u, lsn);
  CHECK(kept() == completion(5, 50));  // an older one changes nothing
  engine.drop(chunk, {1, 1}, completion(5, 0));
  CHECK(kept() == completion(5, 0) && !engine.stat(chunk));
  engine.adopt({completion(1, 1)}, true);
  CHECK(kept() == completion(1, 1));
  engine.forget_client(4);
  CHECK(!engine.request(4, 1));
}

void readers_keep_their_block() {
  ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
  const Data old = noise(60'000, 1);
  put(engine, chunk, 1, old);
  auto view = engine.view(chunk);
  for (std::uint64_t version = 2; version < 40; ++version) put(engine, chunk, version, noise(60'000, version));
  Data read(old.size());
  engine.read(*view, 0, read);
  CHECK(read == old);
  const std::uint64_t with_reader = engine.stats().taken_bytes;
  view.reset();
  CHECK(engine.stats().taken_bytes == with_reader - ff::stride_bytes(0));
}

void at_the_limit_updates_are_refused_and_the_rest_goes_on() {
  ff::EngineOptions small = options();
  small.capacity_bytes = 4 * ff::stride_bytes(0);
  ChunkEngine engine(std::make_unique<LoggedDisk>(), small);
  const Data data = noise(100, 1);
  for (std::uint32_t i = 0; i < 4; ++i) put(engine, {1, i}, 1, data);
  ff::Lsn lsn = 0;
  refused(EngineErrorKind::no_space, "remove files or add disks", [&] { engine.stage({1, 9}, update(UpdateKind::write, 1, 0, data), lsn); });
  CHECK(got(engine, {1, 2}) == data);
  engine.stage({1, 2}, update(UpdateKind::remove, 2, 0, {}), lsn);
  engine.commit({1, 2}, {1, 2});
  refused(EngineErrorKind::no_space, "no space", [&] { engine.stage({1, 9}, update(UpdateKind::write, 1, 0, data), lsn); });
  engine.flush();  // only now is the old block free
  put(engine, {1, 9}, 1, data);

  auto owned = std::make_unique<LoggedDisk>();
  owned->free_bytes = owned->total_bytes / 10;
  ff::EngineOptions reserved = options();
  reserved.reserve = 0.2;
  ChunkEngine full(std::move(owned), reserved);
  refused(EngineErrorKind::no_space, "no space", [&] { full.stage(chunk, update(UpdateKind::write, 1, 0, data), lsn); });

  auto large = std::make_unique<LoggedDisk>();
  large->free_bytes = large->total_bytes / 10;
  reserved.reserve_at_most_bytes = large->free_bytes / 2;
  ChunkEngine roomy(std::move(large), reserved);
  put(roomy, chunk, 1, data);
}

void small_content_takes_a_large_block_rather_than_none() {
  ff::EngineOptions one = options();
  one.capacity_bytes = ff::stride_bytes(4);
  auto owned = std::make_unique<LoggedDisk>();
  ff::test::Image image;
  const Data large = noise(ff::block_bytes(4), 3), small = noise(9000, 4);
  {
    LoggedDisk* const disk = owned.get();
    ChunkEngine engine(std::move(owned), one);
    put(engine, {1, 0}, 1, large);
    ff::Lsn lsn = 0;
    engine.stage({1, 0}, update(UpdateKind::remove, 2, 0, {}), lsn);
    engine.commit({1, 0}, {1, 2});
    engine.flush();
    put(engine, {1, 1}, 1, small);
    CHECK(got(engine, {1, 1}) == small);
    engine.verify({1, 1}, *engine.view({1, 1}));
    CHECK(engine.stats().taken_bytes == ff::stride_bytes(4));
    engine.flush();
    Random random{7};
    image = disk->after_power_cut(disk->log.size(), random);
  }
  ChunkEngine again(std::make_unique<LoggedDisk>(image), one);
  CHECK(got(again, {1, 1}) == small);
}

void blocks_leave_space_for_the_journal() {
  ff::EngineOptions o = options();
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk* const disk = owned.get();
  ChunkEngine engine(std::move(owned), o);
  disk->free_bytes = 4 * o.journal_step + ff::stride_bytes(0) - 1;
  ff::Lsn lsn = 0;
  const Data data = noise(100, 1);
  refused(EngineErrorKind::no_space, "remove files or add disks", [&] { engine.stage(chunk, update(UpdateKind::write, 1, 0, data), lsn); });
  ++disk->free_bytes;
  put(engine, chunk, 1, data);
}

void content_of_no_bytes_takes_no_block() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ff::EngineOptions few = options();
  few.max_chunks = 3;
  ChunkEngine engine(std::move(owned), few);
  const auto is_empty = [](ChunkEngine& some, const ChunkId& id) {
    CHECK(got(some, id).empty());
    const auto view = some.view(id);
    some.checksums(*view, 0, {});
    some.verify(id, *view);
  };
  put(engine, chunk, 1, {});
  put(engine, {5, 8}, 1, noise(5000, 1));
  Update cut = update(UpdateKind::truncate, 2, 0, {});
  ff::Lsn lsn = 0;
  engine.stage({5, 8}, cut, lsn);
  CHECK(engine.view({5, 8}, true)->content().length == 0);
  engine.commit({5, 8}, {1, 2});
  engine.flush();
  put(engine, {5, 9}, 1, {}, UpdateKind::replace);
  for (const std::uint32_t index : {7, 8, 9}) is_empty(engine, {5, index});
  CHECK(engine.stats().taken_bytes == 0);
  refused(EngineErrorKind::no_space, "record of another chunk beside 3", [&] { put(engine, {5, 10}, 1, {}); });
  ChunkEngine again(std::make_unique<LoggedDisk>(disk, disk.log.size()), few);
  for (const std::uint32_t index : {7, 8, 9}) is_empty(again, {5, index});
  CHECK(again.stats().taken_bytes == 0);
  const Data data = noise(100, 2);
  put(again, chunk, 2, data, UpdateKind::write, 50);
  Data expected(50, std::byte{0});
  expected.insert(expected.end(), data.begin(), data.end());
  CHECK(got(again, chunk) == expected);
  put(again, chunk, 3, {}, UpdateKind::remove);
  put(again, {5, 10}, 1, data);
  CHECK(again.stats().taken_bytes == ff::stride_bytes(0));
}

// With two lines for all of them, so that lines are lost and found again; every content is in a block that another one had.
void kept_checksums_are_those_of_the_content() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ff::EngineOptions few = options();
  few.checksum_lines = 2;
  ChunkEngine engine(std::move(owned), few);
  Random random{11};
  std::vector<std::uint64_t> versions(3);
  std::vector<Data> contents(3);
  const auto right = [&](std::uint32_t index, std::uint32_t first, std::size_t count) {
    std::vector<std::uint32_t> checksums(count);
    CHECK(engine.checksums(*engine.view({1, index}), first, checksums, false));
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t from = (first + i) * ff::granule_bytes, n = std::min(ff::granule_bytes, contents[index].size() - from);
      if (checksums[i] != ff::crc32c(0, contents[index].data() + from, n)) return false;
    }
    return true;
  };
  for (int turn = 0; turn < 400; ++turn) {
    const auto index = static_cast<std::uint32_t>(random.below(3));
    if (versions[index] == 0 || random.below(8) == 0) {
      contents[index] = noise(1 + random.below(200'000), random.next());
      put(engine, {1, index}, ++versions[index], contents[index], UpdateKind::replace);
    }
    const std::size_t granules = ff::granules_of(contents[index].size());
    const auto first = static_cast<std::uint32_t>(random.below(granules));
    CHECK(right(index, first, std::min<std::size_t>(granules - first, 1 + random.below(40))));
  }
  // One that was read wrong, and is right on the disk, is found to be right when the chunk is verified.
  contents[0] = noise(4096, 1);
  put(engine, {1, 0}, ++versions[0], contents[0], UpdateKind::replace);
  std::byte& stored = disk.content("blocks-00-0000")[engine.view({1, 0})->trailer_offset() + sizeof(ff::TrailerHeader)];
  stored ^= std::byte{1};
  CHECK(!right(0, 0, 1));
  stored ^= std::byte{1};
  CHECK(!right(0, 0, 1));
  engine.verify({1, 0}, *engine.view({1, 0}));
  CHECK(right(0, 0, 1));
  disk.cold = true;
  CHECK(right(0, 0, 1));  // kept: no look at the disk
  std::vector<std::uint32_t> one(1);
  engine.verify({1, 0}, *engine.view({1, 0}));
  CHECK(!engine.checksums(*engine.view({1, 0}), 0, one, false) && engine.checksums(*engine.view({1, 0}), 0, one));
}

void damage_is_found() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  const Data data = noise(20'000, 1);
  put(engine, chunk, 1, data);
  const auto view = engine.view(chunk);
  auto& block = disk.content("blocks-00-0000");
  const auto flipped = [&](std::size_t byte, const auto& call) {
    block[byte] ^= std::byte{4};
    call();
    block[byte] ^= std::byte{4};
  };
  Data into(4096);
  flipped(9000, [&] {
    CHECK(engine.read(*view, 0, into) == 4096);  // another granule
    refused(EngineErrorKind::damaged, "bytes 8192 and following", [&] { engine.read(*view, 9001, ff::MutableBytes(into).first(1)); });
    refused(EngineErrorKind::damaged, "repair it from another replica", [&] { engine.verify(chunk, *view); });
    ff::Lsn lsn = 0;  // damaged bytes are not copied into new content
    refused(EngineErrorKind::damaged, "not what was written", [&] { engine.stage(chunk, update(UpdateKind::write, 2, 0, Data(10)), lsn); });
  });
  flipped(ff::block_bytes(0) + 9, [&] { refused(EngineErrorKind::damaged, "the trailer of chunk 5:7", [&] { engine.verify(chunk, *view); }); });
  flipped(ff::block_bytes(0) + ff::trailer_header_bytes + 4, [&] { refused(EngineErrorKind::damaged, "", [&] { engine.verify(chunk, *view); }); });
  engine.verify(chunk, *view);
  CHECK(engine.stat(chunk)->pending.state == ff::ContentState::none && engine.stats().taken_bytes == ff::stride_bytes(0));
}

// A block that is used again, and whose last writing never reached the disk: what it still has is sound, and another chunk's.
void another_content_of_the_block_is_damage() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  const Data data = noise(20'000, 1);
  const ChunkId other{5, 8};
  ff::Lsn lsn = 0;
  put(engine, chunk, 1, data);
  const auto block = engine.stat(chunk)->committed.block();
  const Data before = disk.content("blocks-00-0000");
  engine.stage(chunk, update(UpdateKind::remove, 2, 0, {}), lsn);
  engine.commit(chunk, {1, 2});
  engine.flush();
  put(engine, other, 1, noise(20'000, 2));
  CHECK(engine.stat(other)->committed.block() == block);
  disk.content("blocks-00-0000") = before;
  const auto view = engine.view(other);
  Data into(20'000);
  refused(EngineErrorKind::damaged, "bytes 0 and following", [&] { engine.read(*view, 0, into); });
  std::vector<std::uint32_t> checksums(5);  // as a reader elsewhere gets them
  engine.checksums(*view, 0, checksums);
  for (std::size_t i = 0; i < checksums.size(); ++i) CHECK(checksums[i] != ff::crc32c(0, data.data() + i * 4096, std::min<std::size_t>(4096, 20'000 - i * 4096)));
}

// Writers of their own chunks, one who makes durable, readers of all: on the disk of this machine.
void threads() {
  std::string path = (std::filesystem::temp_directory_path() / "ff-engine-XXXXXX").string();
  CHECK(::mkdtemp(path.data()) != nullptr);
  ff::EngineOptions o = options();
  o.snapshot_bytes = 64 << 10;
  constexpr std::uint32_t writers = 3, versions = 60;
  const auto content = [](std::uint32_t writer, std::uint64_t version) { return noise(1000 + version * 700, writer * 1000 + version); };
  {
    ChunkEngine engine(ff::real_disk(path), o);
    std::atomic<std::uint32_t> left = writers;
    std::vector<std::thread> all;
    for (std::uint32_t w = 0; w < writers; ++w)
      all.emplace_back([&, w] {
        for (std::uint64_t version = 1; version <= versions; ++version) {
          ff::Lsn lsn = 0;
          engine.stage({1, w}, update(UpdateKind::replace, version, 0, content(w, version)), lsn);
          while (engine.durable() < lsn) engine.flush();
          engine.tidy();
          engine.commit({1, w}, {1, version});
        }
        --left;
      });
    all.emplace_back([&] {
      Random random{99};
      while (left > 0)
        if (const auto view = engine.view({1, static_cast<std::uint32_t>(random.below(writers))})) {
          Data data(view->content().length);
          engine.read(*view, 0, data);
          CHECK(ff::crc32c(0, data.data(), data.size()) == view->content().crc);
        }
    });
    for (auto& thread : all) thread.join();
    engine.flush();
  }
  ChunkEngine again(ff::real_disk(path), o);
  for (std::uint32_t w = 0; w < writers; ++w) CHECK(got(again, {1, w}) == content(w, versions));
  CHECK(again.stats().taken_bytes <= writers * ff::stride_bytes(0));
  std::filesystem::remove_all(path);
}

void many_records_are_found_in_order() {
  ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
  Random random{5};
  std::vector<ChunkId> ids;
  ff::Lsn lsn = 0;
  for (int i = 0; i < 3000; ++i) {
    const ChunkId id{random.below(40), static_cast<std::uint32_t>(random.below(1u << 31))};
    engine.stage(id, update(UpdateKind::remove, 1, 0, {}), lsn);
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  const auto listed = engine.list({}, {UINT64_MAX, UINT32_MAX}, SIZE_MAX);
  CHECK(listed.size() == ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK(listed[i].first == ids[i]);
  for (std::size_t i = 0; i < ids.size(); i += 2) engine.drop(ids[i], {1, 1});
  for (std::size_t i = 0; i < ids.size(); ++i) {
    CHECK(engine.stat(ids[i]).has_value() == (i % 2 == 1));
    const auto before = engine.last_before(ids[i]);
    CHECK(before ? before->first == ids[i % 2 == 1 ? i - 2 : i - 1] : i < 2);
    const auto page = engine.list(ids[i], {UINT64_MAX, UINT32_MAX}, 1);
    CHECK(page.empty() ? i + 1 == ids.size() : page[0].first == ids[i % 2 == 1 ? i : i + 1]);
  }
}

// Every third chunk stays, the others come and go in two threads; pages tell what stays once, in order.
void pages_tell_what_stays_once() {
  ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
  constexpr std::uint32_t chunks = 600, rounds = 20;
  const auto id = [](std::uint32_t i) { return ChunkId{1 + i / 200, i % 200}; };
  ff::Lsn lsn = 0;
  for (std::uint32_t i = 0; i < chunks; i += 3) engine.stage(id(i), update(UpdateKind::remove, 1, 0, {}), lsn);
  std::atomic<std::uint32_t> left = 2;
  std::vector<std::thread> all;
  for (std::uint32_t first = 1; first < 3; ++first)
    all.emplace_back([&, first] {
      ff::Lsn mine = 0;
      for (std::uint64_t round = 1; round <= rounds; ++round) {
        for (std::uint32_t i = first; i < chunks; i += 3) engine.stage(id(i), update(UpdateKind::remove, 1, 0, {}), mine);
        for (std::uint32_t i = first; i < chunks; i += 3) engine.drop(id(i), {1, 1});
      }
      --left;
    });
  do {
    std::vector<ChunkId> told;
    ChunkId from{};
    for (bool more = true; more;) {
      const auto page = engine.list(from, {UINT64_MAX, UINT32_MAX}, 7);
      for (const auto& [chunk, stat] : page) told.push_back(chunk);
      more = page.size() == 7;
      if (more) from = {told.back().file, told.back().index + 1};
    }
    CHECK(std::is_sorted(told.begin(), told.end()) && std::adjacent_find(told.begin(), told.end()) == told.end());
    for (std::uint32_t i = 0; i < chunks; i += 3) CHECK(std::binary_search(told.begin(), told.end(), id(i)));
  } while (left > 0);
  for (auto& thread : all) thread.join();
  CHECK(engine.list({}, {UINT64_MAX, UINT32_MAX}, SIZE_MAX).size() == chunks / 3);
}

// What is read for a look at the disk does not stay in memory, and what was there is not pushed out.
void looks_at_the_disk_leave_memory_alone() {
  std::string path = (std::filesystem::temp_directory_path() / "ff-disk-XXXXXX").string();
  CHECK(::mkdtemp(path.data()) != nullptr);
  const auto disk = ff::real_disk(path);
  const auto file = disk->create("file");
  const Data data = noise((1 << 20) + 777, 5);
  file->write(0, data);
  file->sync();
  const ff::FromDisk from_disk(*file);
  for (const std::size_t from : {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{70'000}, data.size() - 1, data.size()})
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{100'001}, data.size() + 5000}) {
      Data into(n);
      const std::size_t got = from_disk.read(from, into), wanted = std::min(n, data.size() - from);
      CHECK(got == wanted && std::equal(into.begin(), into.begin() + static_cast<std::ptrdiff_t>(got), data.begin() + static_cast<std::ptrdiff_t>(from)));
    }
  CHECK(file->cached(0, data.size()));
  CHECK(::posix_fadvise(file->descriptor(), 0, 0, POSIX_FADV_DONTNEED) == 0);
  if (!file->cached(0, data.size())) {  // not so where files live in memory
    Data into(data.size());
    CHECK(from_disk.read(0, into) == data.size() && into == data);
    CHECK(!file->cached(0, data.size()));
  }
  std::filesystem::remove_all(path);
}

}  // namespace

int main() {
  looks_at_the_disk_leave_memory_alone();
  reads_any_range();
  holes_are_zeros_and_ends_move();
  what_does_not_fit_is_refused();
  data_that_are_not_those_of_the_update_are_refused();
  the_disk_begins_with_what_is_staged();
  rows_stay_in_the_order_of_their_updates();
  readers_keep_their_block();
  at_the_limit_updates_are_refused_and_the_rest_goes_on();
  small_content_takes_a_large_block_rather_than_none();
  blocks_leave_space_for_the_journal();
  content_of_no_bytes_takes_no_block();
  kept_checksums_are_those_of_the_content();
  damage_is_found();
  another_content_of_the_block_is_damage();
  many_records_are_found_in_order();
  pages_tell_what_stays_once();
  threads();
}
