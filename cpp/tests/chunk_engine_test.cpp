// What the engine promises beside surviving power cuts: repetition, refusals, limits, damage found, readers left in peace.
#include "fireflyer/chunk_engine.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fireflyer/crc32c.hpp"
#include "logged_disk.hpp"

namespace {

using ff::ChunkEngine;
using ff::ChunkId;
using ff::ContentId;
using ff::EngineErrorKind;
using ff::Update;
using ff::UpdateKind;
using ff::test::LoggedDisk;
using ff::test::Random;

using Data = std::vector<std::byte>;

const ChunkId chunk{5, 7};

ff::EngineOptions options() {
  ff::EngineOptions o;
  o.group_bytes = 1 << 20;
  o.reserve = 0;
  return o;
}

Data noise(std::size_t n, std::uint64_t seed) {
  Random random{seed * 2 + 1};
  Data data(n);
  for (auto& byte : data) byte = static_cast<std::byte>(random.next() >> 21);
  return data;
}

Update update(UpdateKind kind, std::uint64_t version, std::uint32_t offset, const Data& data) {
  Update u;
  u.kind = kind;
  u.offset = offset;
  u.data = data;
  u.base = {version > 1 ? 1u : 0u, version - 1};
  u.next = {1, version};
  return u;
}

void put(ChunkEngine& engine, const ChunkId& id, std::uint64_t version, const Data& data, UpdateKind kind = UpdateKind::write, std::uint32_t offset = 0) {
  ff::Ticket ticket = 0;
  engine.stage(id, update(kind, version, offset, data), ticket);
  engine.commit(id, {1, version});
  engine.flush();
}

Data got(ChunkEngine& engine, const ChunkId& id) {
  const auto view = engine.view(id);
  CHECK(view);
  Data data(view->content().length);
  CHECK(engine.read(*view, 0, data) == data.size());
  CHECK(view->content().crc == ff::crc32c(0, data.data(), data.size()));
  return data;
}

template <class Call>
void refused(EngineErrorKind kind, const char* text, const Call& call) {
  try {
    call();
  } catch (const ff::EngineError& error) {
    if (error.kind() != kind || std::string(error.what()).find(text) == std::string::npos) std::fprintf(stderr, "said: %s\n", error.what());
    CHECK(error.kind() == kind);
    CHECK(std::string(error.what()).find(text) != std::string::npos);
    return;
  }
  std::fprintf(stderr, "not refused: %s\n", text);
  std::exit(1);
}

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
  refused(EngineErrorKind::usage, "no such granules", [&] { engine.checksums(*view, 1, checksums); });
}

void holes_are_zeros_and_ends_move() {
  ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
  Data expected(70'000, std::byte{0});
  const Data piece = noise(500, 3);
  put(engine, chunk, 1, piece, UpdateKind::write, 69'500);
  std::copy(piece.begin(), piece.end(), expected.begin() + 69'500);
  CHECK(got(engine, chunk) == expected);
  ff::Ticket ticket = 0;
  Update cut = update(UpdateKind::truncate, 2, 0, {});
  cut.length = 69'700;
  engine.stage(chunk, cut, ticket);
  engine.commit(chunk, {1, 2});
  cut = update(UpdateKind::truncate, 3, 0, {});
  cut.length = 69'900;
  engine.stage(chunk, cut, ticket);
  engine.commit(chunk, {1, 3});
  expected.resize(69'700);
  expected.resize(69'900, std::byte{0});
  CHECK(got(engine, chunk) == expected);
  refused(EngineErrorKind::usage, "is above 67108864", [&] { engine.stage(chunk, update(UpdateKind::write, 4, 64u << 20, piece), ticket); });
}

void what_does_not_fit_is_refused() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  const Data data = noise(10'000, 1);
  ff::Ticket first = 0, second = 0;
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
      {UpdateKind::replace, 0, 300'001, false},           {UpdateKind::replace, 0, 1, true},
      {UpdateKind::write, 0, 300'001, true},              {UpdateKind::write, 3 * granule, 5000, true},
      {UpdateKind::write, 0, 75 * granule, false},        {UpdateKind::write, 10 * granule, 3 * granule, false},
      {UpdateKind::write, 70 * granule, granule, false},  {UpdateKind::write, 80 * granule, 100 * granule, false},
      {UpdateKind::write, 5 * granule, 5000, false},      {UpdateKind::write, 17, 70'000, false},
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
      ff::Ticket ticket = 0;
      refused(EngineErrorKind::usage, "are not those", [&] { engine.stage(chunk, u, ticket); });
      CHECK(engine.stats().taken_bytes == before.taken_bytes && engine.stats().pending == 0 && engine.stats().chunks == before.chunks);
    }
    u.data_crc = crc;
    ff::Ticket ticket = 0;
    engine.stage(chunk, u, ticket);
    u.data_crc = ~crc;  // of what is staged already, too
    refused(EngineErrorKind::usage, "are not those", [&] { engine.stage(chunk, u, ticket); });
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
    ff::Ticket ticket = 0;
    for (std::uint32_t index = 0; index < 3; ++index) engine.stage({1, index}, update(UpdateKind::write, 1, 0, noise(300'001, index)), ticket);
    CHECK(begun == (durable ? 3 : 0));
  }
}

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

void rows_stay_in_the_order_of_their_updates() {
  ChunkEngine engine(std::make_unique<LoggedDisk>(), options());
  const auto row = [](std::uint64_t sequence, std::uint64_t version) { return ff::RequestRow{{4, sequence, 1}, chunk, {1, version}}; };
  const auto kept = [&] { return *engine.request(4, 1); };
  engine.adopt({row(5, 50), row(4, 60)}, false);
  CHECK(kept() == row(5, 50));
  engine.adopt({row(5, 0)}, false);
  CHECK(kept() == row(5, 50));
  ff::Ticket ticket = 0;
  Update u = update(UpdateKind::remove, 1, 0, {});
  u.request = ff::Request{4, 3, 1};
  engine.stage(chunk, u, ticket);
  CHECK(kept() == row(5, 50));  // an older one changes nothing
  engine.drop(chunk, {1, 1}, row(5, 0));
  CHECK(kept() == row(5, 0) && !engine.stat(chunk));
  engine.adopt({row(1, 1)}, true);
  CHECK(kept() == row(1, 1));
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
  ff::Ticket ticket = 0;
  refused(EngineErrorKind::no_space, "remove files or add disks", [&] { engine.stage({1, 9}, update(UpdateKind::write, 1, 0, data), ticket); });
  CHECK(got(engine, {1, 2}) == data);
  engine.stage({1, 2}, update(UpdateKind::remove, 2, 0, {}), ticket);
  engine.commit({1, 2}, {1, 2});
  refused(EngineErrorKind::no_space, "no space", [&] { engine.stage({1, 9}, update(UpdateKind::write, 1, 0, data), ticket); });
  engine.flush();  // only now is the old block free
  put(engine, {1, 9}, 1, data);

  auto owned = std::make_unique<LoggedDisk>();
  owned->free_bytes = owned->total_bytes / 10;
  ff::EngineOptions reserved = options();
  reserved.reserve = 0.2;
  ChunkEngine full(std::move(owned), reserved);
  refused(EngineErrorKind::no_space, "no space", [&] { full.stage(chunk, update(UpdateKind::write, 1, 0, data), ticket); });
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
    ff::Ticket ticket = 0;
    engine.stage({1, 0}, update(UpdateKind::remove, 2, 0, {}), ticket);
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
  ff::Ticket ticket = 0;
  const Data data = noise(100, 1);
  refused(EngineErrorKind::no_space, "remove files or add disks", [&] { engine.stage(chunk, update(UpdateKind::write, 1, 0, data), ticket); });
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
  ff::Ticket ticket = 0;
  engine.stage({5, 8}, cut, ticket);
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
    ff::Ticket ticket = 0;  // damaged bytes are not copied into new content
    refused(EngineErrorKind::damaged, "not what was written", [&] { engine.stage(chunk, update(UpdateKind::write, 2, 0, Data(10)), ticket); });
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
  ff::Ticket ticket = 0;
  put(engine, chunk, 1, data);
  const auto block = engine.stat(chunk)->committed.block();
  const Data before = disk.content("blocks-00-0000");
  engine.stage(chunk, update(UpdateKind::remove, 2, 0, {}), ticket);
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
  refused(EngineErrorKind::damaged, "a block that is not there", [&] { opened(image); });
}

void a_disk_that_refuses_is_believed_once() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ChunkEngine engine(std::move(owned), options());
  const Data data = noise(100, 1);
  put(engine, chunk, 1, data);
  disk.refuse = [](const ff::test::Operation& op) { return op.kind == ff::test::Operation::sync ? EIO : 0; };
  ff::Ticket ticket = 0;
  engine.stage(chunk, update(UpdateKind::write, 2, 0, data), ticket);
  const ff::Ticket before = engine.durable();
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
  refused(EngineErrorKind::damaged, "does not read what was written of chunk 1:1 last", [&] { ChunkEngine(std::move(left), options()); });
}

void a_snapshot_knows_its_journal() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  ff::EngineOptions o = options();
  o.snapshot_bytes = 1;
  ChunkEngine engine(std::move(owned), o);
  ff::Ticket ticket = 0;
  put(engine, {1, 1}, 1, noise(100, 1));
  bool once = true;
  disk.before_write = [&](int file) {  // while the snapshot is written
    if (!disk.name_of(file).starts_with("snapshot-") || !std::exchange(once, false)) return;
    engine.stage({1, 2}, update(UpdateKind::write, 1, 0, noise(100, 2)), ticket);
    engine.commit({1, 2}, {1, 1});
    engine.flush();  // nobody waits for a snapshot
  };
  CHECK(engine.untidy());
  engine.tidy();
  CHECK(!once && engine.durable() >= ticket);
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
  ff::Ticket ticket = 0;
  const Data data = noise(100, 1);
  for (std::uint32_t i = 0; i < 20; ++i) put(engine, {1, i}, 1, data);
  full = true;
  std::uint32_t written = 20;
  const auto write = [&] { engine.stage({1, written}, update(UpdateKind::write, 1, 0, data), ticket); };
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
  engine.stage({1, 0}, update(UpdateKind::remove, 2, 0, {}), ticket);
  engine.commit({1, 0}, {1, 2});
  CHECK(engine.flush() > ticket);
  bool waited = false;
  for (std::uint32_t i = 1; i < 20 && !waited; ++i) {  // in the end all of it is used
    engine.stage({1, i}, update(UpdateKind::remove, 2, 0, {}), ticket);
    engine.commit({1, i}, {1, 2});
    try {
      engine.flush();
    } catch (const ff::EngineError& error) {
      CHECK(error.kind() == EngineErrorKind::no_space);
      waited = true;
    }
  }
  CHECK(waited && engine.durable() < ticket);
  {
    Random random{1};
    auto left = std::make_unique<LoggedDisk>(disk.after_power_cut(disk.log.size(), random));
    left->refuse = disk.refuse;
    ChunkEngine reader(std::move(left), o);  // a full disk is no reason not to read
    CHECK(got(reader, {1, 19}) == data);
    refused(EngineErrorKind::no_space, "free some on the disk", [&] { reader.stage({1, 99}, update(UpdateKind::write, 1, 0, data), ticket); });
  }
  full = false;
  CHECK(engine.flush() >= ticket);
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
  ff::Ticket ticket = 0;
  engine.stage(chunk, update(UpdateKind::write, 1, 0, noise(100, 1)), ticket);
  disk.before_sync = [] { throw std::bad_alloc(); };
  refused(EngineErrorKind::failed, "bad_alloc", [&] { engine.flush(); });
  disk.before_sync = nullptr;
  refused(EngineErrorKind::failed, "bad_alloc", [&] { engine.flush(); });
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
          ff::Ticket ticket = 0;
          engine.stage({1, w}, update(UpdateKind::replace, version, 0, content(w, version)), ticket);
          while (engine.durable() < ticket) engine.flush();
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
  ff::Ticket ticket = 0;
  for (int i = 0; i < 3000; ++i) {
    const ChunkId id{random.below(40), static_cast<std::uint32_t>(random.below(1u << 31))};
    engine.stage(id, update(UpdateKind::remove, 1, 0, {}), ticket);
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
  what_a_relaxed_process_left_is_durable_once_it_is_opened_so();
  rows_stay_in_the_order_of_their_updates();
  readers_keep_their_block();
  at_the_limit_updates_are_refused_and_the_rest_goes_on();
  small_content_takes_a_large_block_rather_than_none();
  blocks_leave_space_for_the_journal();
  content_of_no_bytes_takes_no_block();
  kept_checksums_are_those_of_the_content();
  damage_is_found();
  another_content_of_the_block_is_damage();
  lost_records_are_not_taken_for_an_early_end();
  a_disk_that_refuses_is_believed_once();
  the_content_of_the_last_group_is_looked_at();
  what_cannot_be_read_is_not_taken_for_what_never_arrived();
  a_snapshot_knows_its_journal();
  openings_do_not_fill_the_disk();
  without_space_for_more_journal();
  without_space_for_a_snapshot();
  whatever_fails_in_a_flush_ends_it();
  many_records_are_found_in_order();
  threads();
}
