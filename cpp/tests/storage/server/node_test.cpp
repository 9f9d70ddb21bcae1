// What a node does between its links and its targets: memory, messages, staging in groups, slow and failing disks; peers
// that send nonsense; and its end under load.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "check.hpp"
#include "fireflyer/storage/client/ring.hpp"
#include "fireflyer/storage/server/node.hpp"
#include "storage/engine/logged_disk.hpp"

namespace {

using ff::BufferPool;
using ff::ChunkNode;
using ff::ChunkTarget;
using ff::EventQueue;
using ff::NodeEvent;
using ff::SharedBuffer;
using ff::test::LoggedDisk;
using ff::test::Random;

using Data = std::vector<std::byte>;

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::uint32_t chain = 3, chain_version = 9;
constexpr int patience_ms = 30'000;

Data noise(std::size_t n, std::uint64_t seed) {
  Random random{seed * 2 + 1};
  Data data(n);
  for (auto& byte : data) byte = static_cast<std::byte>(random.next() >> 21);
  return data;
}

ff::EngineOptions options(bool durable = true) {
  ff::EngineOptions o;
  o.group_bytes = mib;
  o.reserve = 0;
  o.durable = durable;
  return o;
}

// What others wait at until it is open.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
  }
  void await_somebody() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_ > 0; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0;
};

// Takes events until one of the kind comes.
template <class Kind>
Kind next(EventQueue& events) {
  for (;;) {
    pollfd ready{events.descriptor(), POLLIN, 0};
    CHECK(::poll(&ready, 1, patience_ms) == 1);
    for (NodeEvent& event : events.take(1))
      if (auto* const found = std::get_if<Kind>(&event)) return std::move(*found);
  }
}

std::pair<int, int> connected() {
  int fds[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {fds[0], fds[1]};
}

void send_all(int fd, const Data& data) {
  for (std::size_t done = 0; done < data.size();) {
    const ssize_t n = ::send(fd, data.data() + done, data.size() - done, MSG_NOSIGNAL);
    if (n < 0) return;  // the other end may have ended it
    done += static_cast<std::size_t>(n);
  }
}

Data message(const std::string& body, const Data& payload = {}) {
  ff::Prefix prefix;
  prefix.kind = ff::FrameKind::message;
  prefix.body_bytes = static_cast<std::uint32_t>(body.size());
  prefix.payload_bytes = static_cast<std::uint32_t>(payload.size());
  prefix.crc = ff::frame_crc(prefix, body.data());
  Data all(sizeof prefix + body.size() + payload.size());
  std::memcpy(all.data(), &prefix, sizeof prefix);
  std::memcpy(all.data() + sizeof prefix, body.data(), body.size());
  if (!payload.empty()) std::memcpy(all.data() + sizeof prefix + body.size(), payload.data(), payload.size());
  return all;
}

SharedBuffer filled(BufferPool& pool, const Data& data) {
  std::uint64_t place = 0;
  SharedBuffer buffer = pool.take(data.size(), pool.services(), [](SharedBuffer) {}, place);
  CHECK(buffer != nullptr);
  std::memcpy(buffer->bytes().data(), data.data(), data.size());
  return buffer;
}

ff::StageJob replace(std::uint64_t job, std::uint32_t index, SharedBuffer data) {
  ff::StageJob made;
  made.job = job;
  made.chunk = {1, index};
  made.update.kind = ff::UpdateKind::replace;
  made.update.next = {chain_version, job};
  made.bytes = static_cast<std::uint32_t>(data->bytes().size());
  made.crc = ff::crc32c(0, data->bytes().data(), data->bytes().size());
  made.data = std::move(data);
  return made;
}

// A target on a disk that the test holds in its hands.
struct Held {
  std::shared_ptr<EventQueue> events = std::make_shared<EventQueue>();
  std::shared_ptr<BufferPool> pool = BufferPool::create(64 * mib);
  LoggedDisk* disk = nullptr;
  std::shared_ptr<ChunkTarget> target;

  explicit Held(bool durable = true, int threads = 2) {
    auto owned = std::make_unique<LoggedDisk>();
    disk = owned.get();
    target = std::make_shared<ChunkTarget>(7, std::move(owned), options(durable), threads, events);
  }
  std::size_t syncs() const {
    return static_cast<std::size_t>(std::count_if(disk->log.begin(), disk->log.end(), [](const auto& op) { return op.kind == ff::test::Operation::sync; }));
  }
};

// ---------------------------------------------------------------------------------------------- memory

void memory_is_given_in_order_and_peers_first() {
  const auto pool = BufferPool::create(8 * mib);
  CHECK(pool->most_bytes(BufferPool::Share::half) == 4 * mib);
  std::vector<int> order;
  std::vector<SharedBuffer> granted;
  std::uint64_t place = 0;
  const auto as = [&](int who) {
    return [&, who](SharedBuffer buffer) {
      order.push_back(who);
      granted.push_back(std::move(buffer));
    };
  };
  const BufferPool::Account peers = pool->services();
  // Each time of an owner who has nothing.
  const auto take = [&](std::size_t bytes, const BufferPool::Account& account, int who) { return pool->take(bytes, account, as(who), place); };
  const auto client = [] { return BufferPool::new_owner(); };
  const auto drop_granted = [&] { std::exchange(granted, {}).clear(); };
  SharedBuffer first = take(4 * mib, client(), 0);
  CHECK(first && reinterpret_cast<std::uintptr_t>(first->bytes().data()) % 4096 == 0);
  CHECK(!take(mib, client(), 1));  // clients have their half
  SharedBuffer second = take(4 * mib, peers, 2);
  CHECK(second);
  CHECK(!take(4 * mib, peers, 3));
  const std::uint64_t large = place;
  CHECK(!take(mib, peers, 4));  // it would fit soon, but others were first
  CHECK(!take(2 * mib, client(), 5));
  second.reset();
  CHECK(order == (std::vector{3}));
  drop_granted();
  CHECK(order == (std::vector{3, 4}));  // and the clients' half is full as long as `first` lives
  first.reset();
  CHECK(order == (std::vector{3, 4, 1, 5}));
  drop_granted();
  pool->cancel(large);
  CHECK(pool->used_bytes() == 0);
  SharedBuffer all = take(8 * mib, peers, 6);
  CHECK(all && !pool->take_within(1, peers, std::chrono::milliseconds(1)));
  CHECK(!take(8 * mib, peers, 7));
  CHECK(!take(1, peers, 8));
  std::thread later([&] { all.reset(); });
  CHECK(!pool->take_within(8 * mib + 1, peers, std::chrono::milliseconds(1)));
  later.join();
  CHECK(order.back() == 7);
  while (!granted.empty()) drop_granted();
  SharedBuffer some = take(5 * mib / 2, peers, 9), more = take(mib / 2, peers, 10);
  CHECK(some && more && !take(6 * mib, peers, 11) && !take(mib / 2, client(), 12));
  more.reset();
  CHECK(granted.empty());  // it is enough for the client, but a peer was first
  some.reset();
  CHECK(order.back() == 11);
  drop_granted();
  CHECK(order.back() == 12);
  drop_granted();
}

// ---------------------------------------------------------------------------------------------- targets

void one_flush_is_for_all_that_waited() {
  Held held;
  Gate gate;
  held.disk->before_sync = [&] { gate.pass(); };
  const std::size_t before = held.syncs();
  const SharedBuffer data = filled(*held.pool, noise(5000, 1));
  constexpr std::uint64_t count = 50;
  held.target->stage(replace(1, 1, data));
  gate.await_somebody();
  for (std::uint64_t job = 2; job <= count; ++job) held.target->stage(replace(job, static_cast<std::uint32_t>(job), data));
  held.target->adopt(99, {{{1, 1, 1}, {1, 1}, {1, 1}}}, false);
  while (held.target->engine().stats().pending < count) std::this_thread::yield();
  CHECK(held.events->size() == 0);  // nothing is durable, so nothing was told
  gate.open();
  std::map<std::uint64_t, int> told;
  for (std::uint64_t i = 0; i < count; ++i) ++told[next<ff::StagedEvent>(*held.events).job];
  CHECK(told.size() == count);
  held.target->close();
  CHECK(held.syncs() - before <= 6);  // content and journal, for one, for the others, and in the end
}

void a_disk_that_is_slow_to_give_space_holds_up_only_who_needs_it() {
  Held held;
  const SharedBuffer small = filled(*held.pool, noise(5000, 1)), large = filled(*held.pool, noise(300'000, 2));
  held.target->stage(replace(1, 1, small));
  next<ff::StagedEvent>(*held.events);
  Gate gate;
  held.disk->before_grow = [&] { gate.pass(); };
  held.target->stage(replace(2, 2, large));
  gate.await_somebody();
  held.target->commit({1, 1}, {chain_version, 1});
  CHECK(held.target->engine().stat({1, 1})->committed.length == 5000);
  held.target->stage(replace(3, 3, small));
  CHECK(next<ff::StagedEvent>(*held.events).job == 3);
  gate.open();
  CHECK(next<ff::StagedEvent>(*held.events).job == 2);
}

void nothing_waits_where_nothing_has_to_be_durable() {
  Held held(false);
  held.disk->before_sync = [] { CHECK(false); };
  held.target->stage(replace(1, 1, filled(*held.pool, noise(100, 1))));
  CHECK(next<ff::StagedEvent>(*held.events).content.length == 100);
  held.target->adopt(2, {}, true);
  CHECK(next<ff::AdoptedEvent>(*held.events).job == 2);
  held.disk->before_sync = nullptr;
}

void closing_fails(ChunkTarget& target, ff::EngineErrorKind kind, std::chrono::milliseconds patience = ff::close_patience) {
  std::optional<ff::EngineErrorKind> said;
  try {
    target.close(patience);
  } catch (const ff::EngineError& error) {
    said = error.kind();
  }
  CHECK(said == kind);
}

// What is told outlives the process also where nobody waits for the disk.
void what_is_told_is_with_the_system() {
  Held held(false);
  held.target->stage(replace(1, 1, filled(*held.pool, noise(100, 1))));
  next<ff::StagedEvent>(*held.events);
  {
    ff::ChunkEngine next_process(std::make_unique<LoggedDisk>(*held.disk, held.disk->log.size()), options(false));
    CHECK(next_process.stat({1, 1})->pending.length == 100);
  }
  held.target->commit({1, 1}, {chain_version, 1});
  held.disk->refuse = [](const ff::test::Operation&) { return EIO; };
  closing_fails(*held.target, ff::EngineErrorKind::failed);
}

void nobody_waits_for_a_disk_that_hangs() {
  Held held;
  Gate gate;
  held.disk->before_sync = [&] { gate.pass(); };
  held.target->stage(replace(1, 1, filled(*held.pool, noise(100, 1))));
  gate.await_somebody();
  closing_fails(*held.target, ff::EngineErrorKind::hung, std::chrono::milliseconds(20));
  const std::weak_ptr<ChunkTarget> left = std::exchange(held.target, nullptr);
  CHECK(!left.expired());
  gate.open();  // the disk answers after all
  CHECK(next<ff::StagedEvent>(*held.events).job == 1);
  while (!left.expired()) std::this_thread::yield();
}

void a_disk_that_fails_is_told_once() {
  Held held;
  const Data data = noise(9000, 1);
  held.target->stage(replace(1, 1, filled(*held.pool, data)));
  next<ff::StagedEvent>(*held.events);
  held.target->commit({1, 1}, {chain_version, 1});
  held.disk->refuse = [](const ff::test::Operation& op) { return op.kind == ff::test::Operation::sync ? EIO : 0; };
  held.target->stage(replace(2, 2, filled(*held.pool, data)));
  CHECK(next<ff::DiskFailedEvent>(*held.events).message.find("the test refuses") != std::string::npos);
  const auto failed = next<ff::StageFailedEvent>(*held.events);
  CHECK(failed.job == 2 && failed.kind == "failed");
  held.target->stage(replace(3, 3, filled(*held.pool, data)));
  while (held.events->size() == 0) std::this_thread::yield();
  CHECK(std::get<ff::StageFailedEvent>(held.events->take(1)[0]).job == 3);
  Data read(data.size());
  const auto view = held.target->engine().view({1, 1});
  CHECK(held.target->engine().read(*view, 0, read) == data.size() && read == data);
  closing_fails(*held.target, ff::EngineErrorKind::failed);
  for (const NodeEvent& event : held.events->take(100)) CHECK(!std::holds_alternative<ff::DiskFailedEvent>(event));
}

// Whatever else hinders the update, bad data come first: who sent them is asked for them again.
void bad_data_are_told_as_such() {
  Held held;
  const SharedBuffer data = filled(*held.pool, noise(9000, 1));
  const auto told = [&](ff::StageJob job) {
    job.crc ^= 1;
    held.target->stage(std::move(job));
    return next<ff::StageFailedEvent>(*held.events).kind;
  };
  ff::StageJob unaligned = replace(1, 1, data);
  unaligned.update.kind = ff::UpdateKind::write;
  unaligned.update.offset = 17;
  ff::StageJob empty = replace(1, 1, data);
  empty.data = nullptr, empty.bytes = 0, empty.crc = 0;
  CHECK(told(unaligned) == "bad_data" && told(replace(1, 1, data)) == "bad_data" && told(empty) == "bad_data");
  ff::StageJob shorter = replace(1, 1, data);
  --shorter.bytes;
  held.target->stage(shorter);
  CHECK(next<ff::StageFailedEvent>(*held.events).kind == "bad_data");
  const ff::EngineStats stats = held.target->engine().stats();
  CHECK(stats.chunks == 0 && stats.pending == 0 && stats.taken_bytes == 0);
  held.target->stage(replace(1, 1, data));
  next<ff::StagedEvent>(*held.events);
  CHECK(told(replace(1, 1, data)) == "bad_data");  // staged already
  CHECK(told(replace(2, 1, data)) == "bad_data");  // in conflict with it
}

void space_that_is_free_after_a_flush_is_used() {
  ff::EngineOptions small = options();
  small.capacity_bytes = 2 * ff::stride_bytes(0);
  const auto events = std::make_shared<EventQueue>();
  const auto pool = BufferPool::create(mib);
  ChunkTarget target(7, std::make_unique<LoggedDisk>(), small, 1, events);  // its destructor closes it
  const SharedBuffer data = filled(*pool, noise(60'000, 1));
  for (std::uint64_t job = 1; job <= 2; ++job) {
    target.stage(replace(job, 1, data));
    next<ff::StagedEvent>(*events);
    target.commit({1, 1}, {chain_version, job});
  }
  target.stage(replace(3, 1, data));  // the block of the first one is free, once that is written down
  CHECK(next<ff::StagedEvent>(*events).job == 3);
  target.stage(replace(4, 2, data));
  CHECK(next<ff::StageFailedEvent>(*events).kind == "no_space");
}

// ---------------------------------------------------------------------------------------------- slow reads

struct Serving : Held {
  ff::ChunkServer server{1, events, pool};
  ff::ChunkRing ring;
  Data data = noise(200'000, 1);

  Serving() {
    target->stage(replace(1, 1, filled(*pool, data)));
    next<ff::StagedEvent>(*events);
    target->commit({1, 1}, {chain_version, 1});
    server.publish({{chain, chain_version, true, false, INT64_MAX, 77, target}});
    disk->cold = true;
  }
  std::uint64_t link(int& mine) {
    const auto [here, there] = connected();
    mine = here;
    const std::uint64_t link = server.connect(there, true);
    server.trust(link);
    return link;
  }
  ff::Completion completed() {
    const auto done = ring.wait(1, -1);
    CHECK(done.size() == 1);
    return std::get<ff::Completion>(done[0]);
  }
};

void a_read_that_waits_for_the_disk_holds_up_nobody() {
  Serving serving;
  Gate gate;
  serving.disk->before_read = [&] { gate.pass(); };
  int mine = -1, other = -1;
  serving.link(mine);
  const std::uint64_t second = serving.link(other);
  const int node = serving.ring.add(mine);
  Data into(serving.data.size()), small(1000);
  serving.ring.prepare(node, {1, 1, 1, chain, chain_version, 0, static_cast<std::uint32_t>(into.size()), 0}, into);
  serving.ring.submit();
  gate.await_somebody();
  send_all(other, message("not held up"));
  CHECK(next<ff::MessageEvent>(*serving.events).link == second);
  CHECK(serving.ring.wait(1, 0).empty());
  gate.open();
  CHECK(serving.completed().status == ff::ReadStatus::found && into == serving.data);
  serving.ring.prepare(node, {2, 1, 1, chain, chain_version, 777, 1000, 0}, small);
  serving.ring.submit();
  CHECK(serving.completed().status == ff::ReadStatus::found && std::memcmp(small.data(), serving.data.data() + 777, 1000) == 0);
  CHECK(serving.server.stats().fetched == 2 && serving.server.stats().reads == 2);
  ::close(other);
}

void a_role_that_is_lost_while_the_disk_is_slow_is_not_acted_on() {
  Serving serving;
  Gate gate;
  serving.disk->before_read = [&] { gate.pass(); };
  int mine = -1;
  serving.link(mine);
  const int node = serving.ring.add(mine);
  Data into(100);
  serving.ring.prepare(node, {1, 1, 1, chain, chain_version, 0, 100, 0}, into);
  serving.ring.submit();
  gate.await_somebody();
  serving.server.publish({});
  gate.open();
  CHECK(serving.completed().status == ff::ReadStatus::stale);
}

// ---------------------------------------------------------------------------------------------- strangers, and the end

void nonsense_of_any_kind_ends_its_link() {
  ChunkNode node(1, 1, 4 * mib);
  Random random{11};
  for (int i = 0; i < 400; ++i) {
    Data bytes = message(std::string(random.below(3000), 'x'), noise(random.below(5000), static_cast<std::uint64_t>(i)));
    const std::size_t count = 1 + random.below(3);
    for (std::size_t k = 0; k < count; ++k) bytes[random.below(std::min<std::size_t>(bytes.size(), 60))] ^= static_cast<std::byte>(1 + random.below(255));
    const auto [mine, theirs] = connected();
    const std::uint64_t link = node.server().connect(theirs, random.below(2) == 0);
    send_all(mine, bytes);
    ::shutdown(mine, SHUT_WR);
    while (next<ff::LostEvent>(node.events()).link != link) {
    }
    ::close(mine);
  }
  CHECK(node.stats().server.links == 0 && node.stats().buffer_bytes == 0);
}

void who_stands_still_does_not_keep_memory() {
  const auto events = std::make_shared<EventQueue>();
  const auto pool = BufferPool::create(8 * mib);
  ff::ChunkServer server(1, events, pool, {.stall_ns = 100'000'000});
  const auto [mine, theirs] = connected();
  const std::uint64_t stopped = server.connect(theirs, true);
  Data half = message("update", noise(mib, 1));
  half.resize(half.size() / 2);
  send_all(mine, half);
  CHECK(next<ff::LostEvent>(*events).link == stopped && pool->used_bytes() == 0);
  const auto [other, end] = connected();
  const std::uint64_t frozen = server.connect(end, true);
  server.send(frozen, "put", filled(*pool, noise(4 * mib, 1)));
  CHECK(next<ff::LostEvent>(*events).link == frozen && pool->used_bytes() == 0);
  ::close(mine);
  ::close(other);
}

struct Directory {
  std::string path = (std::filesystem::temp_directory_path() / "ff-node-XXXXXX").string();
  Directory() { CHECK(::mkdtemp(path.data()) != nullptr); }
  ~Directory() { std::filesystem::remove_all(path); }
};

// Stages what comes, echoes it, ends links by chance.
void own(ChunkNode& node, ChunkTarget& target, const std::atomic<bool>& stop) {
  Random random{5};
  std::uint64_t job = 0;
  std::map<std::uint64_t, ff::ChunkId> chunks;
  while (!stop) {
    for (NodeEvent& event : node.events().take(64)) {
      if (auto* const came = std::get_if<ff::MessageEvent>(&event)) {
        const std::uint64_t handle = node.hold(came->data);
        if (handle != 0) {
          ++job;
          ff::StageJob made = replace(job, static_cast<std::uint32_t>(job), node.data(handle));
          chunks[job] = made.chunk;
          target.stage(std::move(made));
        }
        node.server().send(came->link, came->body, node.data(handle));
        node.release(handle);
        if (random.below(200) == 0) node.server().disconnect(came->link);
      } else if (auto* const staged = std::get_if<ff::StagedEvent>(&event)) {
        const ff::ChunkId chunk = chunks[staged->job];
        target.commit(chunk, staged->content.id());
        node.send_content(random.below(8) + 1, "content", target, chunk, staged->content.id());
      }
    }
    std::this_thread::yield();
  }
}

void talk(ChunkNode& node, std::uint64_t seed, const std::atomic<bool>& stop) {
  Random random{seed * 2 + 1};
  while (!stop) {
    const auto [mine, theirs] = connected();
    const std::uint64_t link = node.server().connect(theirs, true);
    if (random.below(2) == 0) node.server().trust(link);
    ff::ChunkRing ring;
    const int server = ring.add(mine);
    const Data data = noise(random.below(200'000) + 1, seed);
    Data into(50'000);
    bool lost = false;
    for (int i = 0; i < 50 && !stop && !lost; ++i) {
      ring.prepare_message(server, "update", data);
      const auto read = ring.prepare(server, {7, 1, static_cast<std::uint32_t>(random.below(100)), chain, chain_version, 0, 50'000, 0}, into);
      ring.submit();
      if (random.below(4) == 0) ring.cancel(read);
      for (const ff::RingEvent& event : ring.wait(1, 100'000'000)) lost = lost || std::holds_alternative<ff::LostServer>(event);
    }
  }
}

void all_at_once_and_then_the_end() {
  const Directory directory;
  for (int round = 0; round < 3; ++round) {
    ChunkNode node(2, 2, 4 * mib);
    const auto target = node.open_target(7, directory.path, options());
    node.server().publish({{chain, chain_version, true, true, INT64_MAX, 77, target}});
    std::atomic<bool> stop = false, stop_owner = false;
    std::thread owner([&] { own(node, *target, stop_owner); });
    std::vector<std::thread> clients;
    for (std::uint64_t seed = 0; seed < 4; ++seed) clients.emplace_back([&, seed] { talk(node, seed, stop); });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    while (node.stats().server.messages == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));  // nobody may have run yet
    stop = true;
    for (std::thread& client : clients) client.join();
    stop_owner = true;
    owner.join();
    node.close();
    for (NodeEvent& event : node.events().take(SIZE_MAX))
      if (const auto* const failed = std::get_if<ff::StageFailedEvent>(&event)) CHECK(failed->kind == "conflict");  // the same chunks in each round
    CHECK(node.stats().server.messages > 0 && node.stats().buffer_bytes == 0);
  }
}

}  // namespace

int main() {
  std::signal(SIGPIPE, SIG_IGN);  // as Python does: sendfile has no flag for it
  memory_is_given_in_order_and_peers_first();
  one_flush_is_for_all_that_waited();
  a_disk_that_is_slow_to_give_space_holds_up_only_who_needs_it();
  nothing_waits_where_nothing_has_to_be_durable();
  what_is_told_is_with_the_system();
  nobody_waits_for_a_disk_that_hangs();
  a_disk_that_fails_is_told_once();
  bad_data_are_told_as_such();
  space_that_is_free_after_a_flush_is_used();
  a_read_that_waits_for_the_disk_holds_up_nobody();
  a_role_that_is_lost_while_the_disk_is_slow_is_not_acted_on();
  nonsense_of_any_kind_ends_its_link();
  who_stands_still_does_not_keep_memory();
  all_at_once_and_then_the_end();
}
