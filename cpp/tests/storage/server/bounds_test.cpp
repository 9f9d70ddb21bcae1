// What one owner of links may make a node hold: replies that nobody reads, frames and payloads that do not come to their end.
// Each test compares with the bound, and with another owner who is not hindered.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fireflyer/storage/client/ring.hpp"
#include "fireflyer/storage/server/server.hpp"
#include "fireflyer/storage/wire/stream.hpp"
#include "storage/engine/logged_disk.hpp"

namespace {

using ff::BufferPool;
using ff::ChunkServer;
using ff::ChunkTarget;
using ff::EventQueue;
using ff::LostEvent;
using ff::MessageEvent;
using ff::NodeEvent;
using ff::ReadRequest;
using ff::SharedBuffer;
using ff::test::Random;

using Data = std::vector<std::byte>;

constexpr std::size_t kib = 1024, mib = 1024 * kib;
constexpr std::uint32_t chain = 3, chain_version = 9;
constexpr std::int64_t short_ns = 100'000'000;

// As long as a machine with much other work may need.
template <class Condition>
void until(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Data noise(std::size_t n) {
  Random random{5};
  Data data(n);
  for (auto& byte : data) byte = static_cast<std::byte>(random.next() >> 21);
  return data;
}

struct Directory {
  std::string path = (std::filesystem::temp_directory_path() / "ff-bounds-XXXXXX").string();
  Directory() { CHECK(::mkdtemp(path.data()) != nullptr); }
  ~Directory() { std::filesystem::remove_all(path); }
};

// One chunk on a real disk, whose file can be sent from the page cache.
struct Node {
  Directory directory;
  std::shared_ptr<EventQueue> events = std::make_shared<EventQueue>();
  std::shared_ptr<BufferPool> pool;
  std::shared_ptr<ChunkTarget> target;
  Data data;
  ChunkServer server;
  std::vector<int> descriptors;

  Node(std::size_t pool_bytes, std::size_t chunk_bytes, ff::LinkPatience patience = {})
      : pool(BufferPool::create(pool_bytes)), target(make_target()), data(noise(chunk_bytes)), server(1, events, pool, patience) {
    ff::Update update;
    update.kind = ff::UpdateKind::replace;
    update.data = data;
    update.next = {chain_version, 1};
    ff::Lsn lsn = 0;
    target->engine().stage({1, 0}, update, lsn);
    target->commit({1, 0}, {chain_version, 1});
    server.publish({{chain, chain_version, true, false, INT64_MAX, 77, target}});
  }
  ~Node() { close_all(); }
  void close_all() {
    for (const int fd : std::exchange(descriptors, {})) ::close(fd);
  }
  std::shared_ptr<ChunkTarget> make_target() const {
    ff::EngineOptions options;
    options.reserve = 0;
    options.durable = false;
    return std::make_shared<ChunkTarget>(7, ff::real_disk(directory.path), options, 1, events);
  }
  // A link of this owner, who may read everything.
  int connect(const std::string& owner, std::uint64_t* link = nullptr) {
    int fds[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    const std::uint64_t number = server.connect(fds[1], true, false, owner);
    server.grant(number, 0, 100, INT64_MAX);
    if (link != nullptr) *link = number;
    return fds[0];
  }
  int connect_and_keep(const std::string& owner) { return descriptors.emplace_back(connect(owner)); }

  template <class Kind>
  Kind next() {
    std::optional<Kind> came;
    until([&] {
      for (NodeEvent& event : events->take(1))
        if (auto* const found = std::get_if<Kind>(&event)) came = std::move(*found);
      return came.has_value();
    });
    return std::move(*came);
  }
};

void send_all(int fd, const Data& data) { CHECK(::send(fd, data.data(), data.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(data.size())); }

void receive_all(int fd, void* into, std::size_t n) { CHECK(::recv(fd, into, n, MSG_WAITALL) == static_cast<ssize_t>(n)); }

// The same read many times, in one frame.
Data frame_of_reads(std::size_t count, std::uint32_t offset, std::uint32_t length) {
  std::vector<ReadRequest> requests;
  for (std::uint64_t i = 0; i < count; ++i) requests.push_back({i, 1, 0, chain, chain_version, offset, length, 0});
  ff::Prefix prefix;
  prefix.kind = ff::FrameKind::reads;
  prefix.body_bytes = static_cast<std::uint32_t>(count * sizeof(ReadRequest));
  prefix.crc = ff::frame_crc(prefix, requests.data());
  Data frame(sizeof prefix + prefix.body_bytes);
  std::memcpy(frame.data(), &prefix, sizeof prefix);
  std::memcpy(frame.data() + sizeof prefix, requests.data(), prefix.body_bytes);
  return frame;
}

std::size_t resident_bytes() {
  std::size_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// 48 reads that begin one byte late: none of them is held as a whole, nor are they all begun; and all are answered in the end.
void a_frame_of_unaligned_reads_takes_little_memory() {
  constexpr std::size_t count = 48, chunk_bytes = 4 * mib;
  Node node(8 * mib, chunk_bytes);
  const int fd = node.connect_and_keep("ann");
  const Data frame = frame_of_reads(count, 1, chunk_bytes - 2);
  CHECK(frame.size() < 2000);
  Data got(chunk_bytes);
  const std::size_t before = resident_bytes();
  send_all(fd, frame);
  ff::Prefix prefix;
  receive_all(fd, &prefix, sizeof prefix);  // now the frame was looked at, as far as it will be while nobody reads
  CHECK(node.server.stats().reads <= 4);
  CHECK(resident_bytes() < before + 64 * mib);  // of 192 MiB that are asked for; sanitizers shadow what is used
  CHECK(node.pool->used_bytes() <= 2 * mib);
  for (std::size_t i = 0;; receive_all(fd, &prefix, sizeof prefix)) {
    Data body(prefix.body_bytes);
    receive_all(fd, body.data(), body.size());
    ff::ReadReply reply;
    std::memcpy(&reply, body.data(), sizeof reply);
    CHECK(reply.tag == i && reply.status == ff::ReadStatus::found && prefix.payload_bytes == chunk_bytes - 2);
    receive_all(fd, got.data(), chunk_bytes - 2);
    CHECK(std::memcmp(got.data(), node.data.data() + 1, chunk_bytes - 2) == 0);
    std::uint32_t first = 0, last = 0;
    std::memcpy(&first, body.data() + sizeof reply, sizeof first);
    std::memcpy(&last, body.data() + body.size() - sizeof last, sizeof last);
    CHECK(first == ff::crc32c(0, got.data(), ff::granule_bytes - 1));
    CHECK(last == ff::crc32c(0, got.data() + chunk_bytes - ff::granule_bytes - 1, ff::granule_bytes - 1));
    if (++i == count) break;
  }
  CHECK(node.server.stats().reads == count);
  until([&] { return node.pool->used_bytes() == 0; });
}

// Their edges in all positions, against the bytes that were written.
void any_large_range_is_right() {
  constexpr std::size_t chunk_bytes = 300 * kib + 777;
  Node node(8 * mib, chunk_bytes);
  ff::ChunkRing ring;
  const int server = ring.add(node.connect("ann"));
  Data into(chunk_bytes);
  for (const std::uint32_t offset : {0u, 1u, 4095u, 4096u, 4097u, 100'000u})
    for (const std::uint32_t length : {32768u, 32769u, 40'959u, 40'960u, 100'001u, 400'000u}) {
      ring.prepare(server, {offset, 1, 0, chain, chain_version, offset, length, 0}, ff::MutableBytes(into).first(std::min<std::size_t>(length, into.size())));
      ring.submit();
      const auto done = ring.wait(1, -1);
      const auto& completion = std::get<ff::Completion>(done.at(0));
      const std::size_t expected = std::min<std::size_t>(length, chunk_bytes - offset);
      CHECK(completion.status == ff::ReadStatus::found && completion.bytes == expected);
      CHECK(std::memcmp(into.data(), node.data.data() + offset, expected) == 0);
    }
}

// On 30 links: together they get what one owner may have, others read on, and who holds memory is cut off in the end.
void who_does_not_read_gets_the_share_of_one_owner() {
  constexpr std::size_t links = 30, length = 28 * kib;
  Node node(8 * mib, mib, {.unread_ns = 10 * short_ns});
  for (std::size_t i = 0; i < links; ++i) send_all(node.connect_and_keep("ann"), frame_of_reads(200, 0, length));
  until([&] { return node.server.stats().held_back > 0; });
  CHECK(node.pool->used_bytes() <= 2 * mib);  // of the users' half the half
  ff::ChunkRing ring;
  const int server = ring.add(node.connect("bob"));
  Data into(64 * length);
  for (std::uint64_t i = 0; i < 64; ++i)
    ring.prepare(server, {i, 1, 0, chain, chain_version, 0, static_cast<std::uint32_t>(length), 0}, ff::MutableBytes(into).subspan(i * length, length));
  ring.submit();
  for (std::size_t done = 0; done < 64;)
    for (const ff::RingEvent& event : ring.wait(1, -1)) {
      CHECK(std::get<ff::Completion>(event).bytes == length);
      ++done;
    }
  CHECK(std::memcmp(into.data() + 63 * length, node.data.data(), length) == 0);
  CHECK(node.pool->used_bytes() <= 4 * mib);
  CHECK(node.next<LostEvent>().reason.find("peer has not read 64 KiB of its") == 0);
  CHECK(node.server.stats().stalled > 0);
  node.close_all();
  until([&] { return node.pool->used_bytes() == 0; });
}

void half_a_frame_does_not_stay() {
  Node node(8 * mib, kib, {.stall_ns = short_ns});
  ff::Prefix prefix;
  prefix.kind = ff::FrameKind::message;
  prefix.body_bytes = 200 * kib;
  Data begun(sizeof prefix + 100);
  std::memcpy(begun.data(), &prefix, sizeof prefix);
  for (const std::size_t bytes : {std::size_t{10}, begun.size()}) {
    std::uint64_t link = 0;
    const int fd = node.descriptors.emplace_back(node.connect("ann", &link));
    send_all(fd, Data(begun.begin(), begun.begin() + static_cast<std::ptrdiff_t>(bytes)));
    const auto lost = node.next<LostEvent>();
    CHECK(lost.link == link && lost.reason == "peer began a frame and did not go on");
  }
  CHECK(node.pool->used_bytes() == 0);
}

// Who begins large payloads on many links does not keep others from sending theirs.
void payloads_of_one_owner_leave_memory_for_others() {
  Node node(8 * mib, kib);
  const auto begun = ff::message_frame("update", mib);
  for (int i = 0; i < 6; ++i) send_all(node.connect_and_keep("ann"), begun);
  until([&] { return node.pool->used_bytes() >= 2 * mib; });
  const int fd = node.connect_and_keep("bob");
  send_all(fd, begun);
  std::thread sender([fd] { send_all(fd, noise(mib)); });
  const auto message = node.next<MessageEvent>();
  sender.join();
  CHECK(message.data && std::memcmp(message.data->bytes().data(), noise(mib).data(), mib) == 0);
  CHECK(node.pool->used_bytes() == 3 * mib && node.server.stats().stalled == 0);
}

void who_has_much_holds_up_nobody_in_the_line_and_who_has_nothing_is_waited_for() {
  const auto pool = BufferPool::create(8 * mib);
  const auto ann = BufferPool::new_owner(), bob = BufferPool::new_owner(), eve = BufferPool::new_owner();
  std::vector<char> order;
  std::vector<SharedBuffer> granted;
  std::uint64_t place = 0;
  const auto take = [&](std::size_t bytes, const BufferPool::Account& account, char who) {
    return pool->take(
        bytes, account,
        [&order, &granted, who](SharedBuffer buffer) {
          order.push_back(who);
          granted.push_back(std::move(buffer));
        },
        place);
  };
  SharedBuffer first = take(mib, ann, 'a'), second = take(mib, ann, 'a');
  CHECK(first && second && !take(mib, ann, 'a'));  // there are 2 MiB, which is not more than she has
  CHECK(!pool->reserve(1, *ann));
  SharedBuffer of_bob = take(mib / 2, bob, 'b');  // not behind ann
  CHECK(of_bob && !pool->reserve(2 * mib, *bob) && pool->reserve(mib / 2, *bob));
  CHECK(!take(3 * mib / 2, eve, 'e'));  // there is 1 MiB, and she has nothing
  CHECK(!pool->reserve(1, *bob));
  pool->unreserve(mib / 2, *bob);
  CHECK(order == std::vector{'e'});
  granted.clear();
  first.reset();
  CHECK(order == (std::vector{'e', 'a'}));
  granted.clear();
  second.reset();
  of_bob.reset();
  CHECK(pool->used_bytes() == 0);
}

}  // namespace

int main() {
  who_has_much_holds_up_nobody_in_the_line_and_who_has_nothing_is_waited_for();
  a_frame_of_unaligned_reads_takes_little_memory();
  any_large_range_is_right();
  who_does_not_read_gets_the_share_of_one_owner();
  half_a_frame_does_not_stay();
  payloads_of_one_owner_leave_memory_for_others();
}
