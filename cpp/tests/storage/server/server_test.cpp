// Reads from end to end over sockets: right bytes, each refusal, damage seen by who reads, and peers that send nonsense.
#include "fireflyer/storage/server/server.hpp"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fireflyer/base/clock.hpp"
#include "fireflyer/storage/client/ring.hpp"
#include "storage/engine/logged_disk.hpp"
#include "storage/server/uring.hpp"

namespace {

using ff::BufferPool;
using ff::ChunkEngine;
using ff::ChunkRing;
using ff::ChunkServer;
using ff::ChunkTarget;
using ff::ColdBy;
using ff::Completion;
using ff::EventQueue;
using ff::ReadRequest;
using ff::ReadStatus;
using ff::test::LoggedDisk;
using ff::test::Random;

using Data = std::vector<std::byte>;

constexpr std::uint32_t chain = 3, chain_version = 9;
constexpr std::int64_t forever = INT64_MAX;

Data noise(std::size_t n, std::uint64_t seed) {
  Random random{seed * 2 + 1};
  Data data(n);
  for (auto& byte : data) byte = static_cast<std::byte>(random.next() >> 21);
  return data;
}

ff::EngineOptions options() {
  ff::EngineOptions o;
  o.group_bytes = 1 << 20;
  o.reserve = 0;
  return o;
}

void stage(ChunkTarget& target, std::uint32_t index, std::uint64_t version, const Data& data) {
  ff::Update update;
  update.kind = ff::UpdateKind::replace;
  update.data = data;
  update.next = {chain_version, version};
  ff::Lsn lsn = 0;
  target.engine().stage({1, index}, update, lsn);
}

void put(ChunkTarget& target, std::uint32_t index, std::uint64_t version, const Data& data) {
  stage(target, index, version, data);
  target.commit({1, index}, {chain_version, version});
  target.engine().flush();
}

ff::PublishedChain serving(std::shared_ptr<ChunkTarget> target) { return {chain, chain_version, true, false, forever, 77, std::move(target)}; }

// A server with its target, whose links may read everything.
struct Node {
  std::shared_ptr<EventQueue> events = std::make_shared<EventQueue>();
  std::shared_ptr<BufferPool> pool = BufferPool::create(std::size_t{8} << 20);
  std::shared_ptr<ChunkTarget> target;
  ChunkServer server;

  explicit Node(std::unique_ptr<ff::Disk> disk = std::make_unique<LoggedDisk>(), int threads = 1, ColdBy cold_by = ColdBy::kernel)
      : target(std::make_shared<ChunkTarget>(7, std::move(disk), options(), 1, events)), server(threads, events, pool, ff::LinkPatience{}, cold_by) {}
};

std::pair<int, int> connected() {
  int fds[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {fds[0], fds[1]};
}

int connect_to(Node& node) {
  const auto [mine, theirs] = connected();
  node.server.trust(node.server.connect(theirs, true));
  return mine;
}

ReadRequest request(std::uint32_t index, std::uint32_t offset, std::uint32_t length, std::uint64_t tag = 5) {
  return {tag, 1, index, chain, chain_version, offset, length, 0};
}

Completion one(ChunkRing& ring, int server, const ReadRequest& r, ff::MutableBytes into) {
  ring.prepare(server, r, into);
  ring.submit();
  const auto done = ring.wait(1, 60'000'000'000);  // beside much other work, under a sanitizer
  CHECK(done.size() == 1 && ring.under_way() == 0);
  const Completion& completion = std::get<Completion>(done[0]);
  CHECK(completion.tag == r.tag);
  return completion;
}

struct Directory {
  std::string path = (std::filesystem::temp_directory_path() / "ff-server-XXXXXX").string();
  Directory() { CHECK(::mkdtemp(path.data()) != nullptr); }
  ~Directory() { std::filesystem::remove_all(path); }
};

// On a real disk whole granules go by sendfile, on the logged one by buffers.
void any_range_is_right(std::unique_ptr<ff::Disk> disk) {
  Node world(std::move(disk), 2);
  const Data contents[] = {noise(5000, 1), noise(1'000'001, 2), {}};
  for (std::uint32_t i = 0; i < std::size(contents); ++i) put(*world.target, i, 1, contents[i]);
  world.server.publish({serving(world.target)});
  ChunkRing ring;
  const int servers[] = {ring.add(connect_to(world)), ring.add(connect_to(world)), ring.add(connect_to(world))};
  Random random{3};
  std::vector<Data> memory;
  std::vector<ReadRequest> asked;
  for (std::uint64_t i = 0; i < 600; ++i) {
    const bool aligned = random.below(2) == 0;
    const auto index = static_cast<std::uint32_t>(random.below(20) == 0 ? 2 : random.below(2)), length = static_cast<std::uint32_t>(random.below(300'000));
    ReadRequest r = request(index, static_cast<std::uint32_t>(random.below(1'010'000)), length, i);
    if (aligned) r.offset &= ~4095u, r.length &= ~4095u;
    if (random.below(4) == 0) r.offset = static_cast<std::uint32_t>(random.below(6000));
    asked.push_back(r);
    memory.emplace_back(r.length);
  }
  for (std::size_t i = 0; i < asked.size(); ++i) {
    ring.prepare(servers[i % 3], asked[i], memory[i]);
    if (i % 50 == 0) ring.submit();
  }
  ring.submit();
  for (std::size_t done = 0; done < asked.size();)
    for (const ff::RingEvent& event : ring.wait(1, -1)) {
      const Completion& c = std::get<Completion>(event);
      const ReadRequest& r = asked[c.tag];
      const Data& whole = contents[r.index];
      const std::size_t expected = r.offset >= whole.size() ? 0 : std::min<std::size_t>(r.length, whole.size() - r.offset);
      CHECK(c.status == ReadStatus::found && c.bytes == expected && c.chunk_length == whole.size() && c.content == (ff::ContentId{chain_version, 1}));
      CHECK(expected == 0 || std::memcmp(memory[c.tag].data(), whole.data() + r.offset, expected) == 0);
      CHECK(c.crc == ff::crc32c(0, memory[c.tag].data(), expected));
      ++done;
    }
  CHECK(world.server.stats().reads == asked.size());
}

// Takes what is synced out of the page cache. False: this file system keeps it there.
bool forget_pages(const std::string& path) {
  bool gone = true;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (!entry.path().filename().string().starts_with("blocks-")) continue;
    const int fd = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    char byte = 0;
    const iovec part{&byte, 1};
    gone = gone && ::preadv2(fd, &part, 1, 0, RWF_NOWAIT) < 0 && errno == EAGAIN;
    ::close(fd);
  }
  return gone;
}

// Many reads at once of what is on the disk only; then the server ends while others are under way.
void cold_reads_are_right(ColdBy cold_by) {
  const Directory directory;
  Node world(ff::real_disk(directory.path), 1, cold_by);
  if (world.server.cold_by() != cold_by) return;  // this kernel has only threads, and they are tested as well
  constexpr std::uint32_t chunks = 8, bytes = 600'000;
  std::vector<Data> contents;
  for (std::uint32_t i = 0; i < chunks; ++i) put(*world.target, i, 1, contents.emplace_back(noise(bytes, i)));
  const bool cold = forget_pages(directory.path);
  world.server.publish({serving(world.target)});
  ChunkRing ring;
  const int node = ring.add(connect_to(world));
  Random random{7};
  std::vector<Data> memory;
  std::vector<ReadRequest> asked;
  for (std::uint64_t i = 0; i < 300; ++i) {
    const auto length = static_cast<std::uint32_t>(i % 10 == 0 ? bytes : 1 + random.below(9000));
    asked.push_back(request(static_cast<std::uint32_t>(random.below(chunks)), static_cast<std::uint32_t>(i % 10 == 0 ? 0 : random.below(bytes - length)), length, i));
    memory.emplace_back(length);
  }
  for (std::size_t i = 0; i < asked.size(); ++i) ring.prepare(node, asked[i], memory[i]);
  ring.submit();
  for (std::size_t done = 0; done < asked.size();)
    for (const ff::RingEvent& event : ring.wait(1, -1)) {
      const Completion& c = std::get<Completion>(event);
      const ReadRequest& r = asked[c.tag];
      CHECK(c.status == ReadStatus::found && c.bytes == r.length);
      CHECK(std::memcmp(memory[c.tag].data(), contents[r.index].data() + r.offset, r.length) == 0);
      ++done;
    }
  CHECK(!cold || world.server.stats().fetched > 0);
  forget_pages(directory.path);
  for (std::size_t i = 0; i < asked.size(); ++i) ring.prepare(node, asked[i], memory[i]);
  ring.submit();
  ring.wait(1, -1);
  world.server.close();
}

// In threads of their own: the filter stays with the thread, and with those that it makes.
void a_kernel_that_refuses_leaves_it_to_threads() {
  for (const unsigned error : {ENOSYS, EPERM, ENOMEM})
    std::thread([error] {
      sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                              BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
      const sock_fprog program{std::size(filter), filter};
      if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) return;
      const Node world(std::make_unique<LoggedDisk>(), 2, ColdBy::kernel);
      CHECK(world.server.cold_by() == ColdBy::threads);
    }).join();
}

// The kernel keeps what does not fit into the ring of results.
void no_result_of_a_ring_is_lost() {
  const auto ring = ff::Uring::open(4);
  if (!ring) return;
  const Directory directory;
  const Data data = noise(4096, 1);
  const int file = ::open((directory.path + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK(file >= 0 && ::write(file, data.data(), data.size()) == static_cast<ssize_t>(data.size()));
  constexpr std::uint64_t reads = 100;
  Data memory(reads * data.size());
  std::uint64_t asked = 0, tags = 0;
  const auto take = [&] {
    ring->take([&](std::uint64_t tag, int result) {
      CHECK(result == static_cast<int>(data.size()));
      tags += tag;
    });
  };
  while (asked < reads) {
    if (ring->read(file, 0, ff::MutableBytes(memory).subspan(asked * data.size(), data.size()), asked + 1)) ++asked;
    else ring->submit();
    if (ring->queued() && asked % 50 == 0) take();
  }
  ring->submit();
  while (tags < reads * (reads + 1) / 2 && ring->wait(10'000)) take();
  CHECK(tags == reads * (reads + 1) / 2 && !ring->wait(0));
  for (std::uint64_t i = 0; i < reads; ++i) CHECK(std::memcmp(memory.data() + i * data.size(), data.data(), data.size()) == 0);
  ::close(file);
}

void what_is_published_is_obeyed() {
  Node world;
  const Data data = noise(100, 1);
  put(*world.target, 0, 1, data);
  stage(*world.target, 0, 2, noise(50, 2));
  ChunkRing ring;
  const int node = ring.add(connect_to(world));
  Data into(100);
  const auto status = [&](ff::PublishedChain published, std::uint32_t index = 0) {
    world.server.publish({std::move(published)});
    return one(ring, node, request(index, 0, 100), into);
  };
  ff::PublishedChain published = serving(world.target);
  CHECK(status(published).status == ReadStatus::not_committed && status(published).where == 77);
  CHECK(status(published, 4).status == ReadStatus::missing);
  published.answers_committed = true;
  CHECK(status(published).status == ReadStatus::found && into == data);
  published.fence_until_ns = 1;
  CHECK(status(published).status == ReadStatus::stale);
  published.fence_until_ns = forever;
  published.chain_version = chain_version + 1;
  CHECK(status(published).status == ReadStatus::stale && status(published).chain_version == chain_version + 1);
  published.chain_version = chain_version;
  published.serving = false;
  CHECK(status(published).status == ReadStatus::stale);
  world.server.publish({});
  CHECK(one(ring, node, request(0, 0, 100), into).status == ReadStatus::stale);
  world.server.publish({serving(world.target)});
  CHECK(one(ring, node, {1, 1, 0, chain, chain_version, 0xffffffff, 1, 0}, into).status == ReadStatus::usage);
}

void damage_is_seen() {
  auto owned = std::make_unique<LoggedDisk>();
  LoggedDisk& disk = *owned;
  Node world(std::move(owned));
  put(*world.target, 0, 1, noise(9000, 1));
  disk.content("blocks-00-0000")[5000] ^= std::byte{1};
  world.server.publish({serving(world.target)});
  ChunkRing ring;
  const int node = ring.add(connect_to(world));
  Data into(9000);
  CHECK(one(ring, node, request(0, 0, 4096), into).status == ReadStatus::found);
  CHECK(one(ring, node, request(0, 0, 9000), into).status == ReadStatus::damaged);  // found by the reader
  CHECK(one(ring, node, request(0, 8192, 808), into).status == ReadStatus::found);
  CHECK(one(ring, node, request(0, 4999, 2), into).status == ReadStatus::damaged);    // found by the server, which tells
  CHECK(one(ring, node, request(0, 8192, 808), into).status == ReadStatus::damaged);  // and remembers
  CHECK(one(ring, node, request(0, 4999, 2), into).status == ReadStatus::damaged);
  const auto told = world.events->take(10);
  CHECK(told.size() == 1 && std::get<ff::DamageEvent>(told[0]).chunk == (ff::ChunkId{1, 0}));
  put(*world.target, 0, 2, noise(9000, 2));
  CHECK(one(ring, node, request(0, 0, 9000), into).status == ReadStatus::found);
}

void send_all(int fd, const void* data, std::size_t n) { CHECK(::send(fd, data, n, MSG_NOSIGNAL) == static_cast<ssize_t>(n)); }

Data frame(ff::Prefix prefix, const Data& body, bool right = true) {
  prefix.body_bytes = prefix.body_bytes != 0 ? prefix.body_bytes : static_cast<std::uint32_t>(body.size());
  Data all(sizeof prefix + body.size());
  if (prefix.body_bytes == body.size()) prefix.crc = ff::frame_crc(prefix, body.data()) + (right ? 0 : 1);
  std::memcpy(all.data(), &prefix, sizeof prefix);
  if (!body.empty()) std::memcpy(all.data() + sizeof prefix, body.data(), body.size());
  return all;
}

bool closed(int fd) {
  char byte = 0;
  const bool end = ::recv(fd, &byte, 1, 0) <= 0;
  ::close(fd);
  return end;
}

void a_client_that_sends_nonsense_loses_its_own_connection() {
  Node world;
  const Data data = noise(100, 1);
  put(*world.target, 0, 1, data);
  world.server.publish({serving(world.target)});
  ChunkRing ring;
  const int node = ring.add(connect_to(world));
  const auto refused = [&](const Data& bytes) {
    const int fd = connect_to(world);
    send_all(fd, bytes.data(), bytes.size());
    CHECK(closed(fd));
    Data into(100);
    CHECK(one(ring, node, request(0, 0, 100), into).status == ReadStatus::found && into == data);
  };
  ff::Prefix prefix;
  prefix.kind = ff::FrameKind::reads;
  refused(noise(300, 4));
  refused(frame(prefix, Data(40), false));
  refused(frame(prefix, Data(39)));
  prefix.body_bytes = 0xfffffff0;
  refused(frame(prefix, {}));
  prefix.body_bytes = 0;
  prefix.payload_bytes = 1;
  refused(frame(prefix, Data(40)));
  prefix.payload_bytes = 0;
  prefix.kind = ff::FrameKind::read_reply;
  refused(frame(prefix, Data(40)));
  const int half = connect_to(world);  // and one that stops in the middle holds up nobody
  send_all(half, &prefix, 10);
  Data into(100);
  CHECK(one(ring, node, request(0, 0, 100), into).status == ReadStatus::found);
  ::close(half);
}

void a_node_that_sends_nonsense_loses_its_reads_and_no_memory() {
  const auto answered = [](const std::function<Data(std::uint64_t tag)>& reply) {
    const auto [mine, theirs] = connected();
    ChunkRing ring;
    const int node = ring.add(mine);
    Data into(200, std::byte{0x5a});
    ring.prepare(node, request(0, 0, 100), ff::MutableBytes(into).first(100));
    ring.submit();
    Data asked(sizeof(ff::Prefix) + sizeof(ReadRequest));
    CHECK(::recv(theirs, asked.data(), asked.size(), MSG_WAITALL) == static_cast<ssize_t>(asked.size()));
    ReadRequest wire;
    std::memcpy(&wire, asked.data() + sizeof(ff::Prefix), sizeof wire);
    const Data bytes = reply(wire.tag);
    if (!bytes.empty()) send_all(theirs, bytes.data(), bytes.size());
    ::close(theirs);
    const auto done = ring.wait(1, 60'000'000'000);  // beside much other work, under a sanitizer
    CHECK(!done.empty() && std::get<Completion>(done[0]).tag == 5);
    CHECK(std::all_of(into.begin() + 100, into.end(), [](std::byte byte) { return byte == std::byte{0x5a}; }));
    std::string reason;
    for (const ff::RingEvent& event : done)
      if (const auto* const lost = std::get_if<ff::LostServer>(&event)) reason = lost->reason;
    CHECK(ring.under_way() == 0);
    return std::pair(std::get<Completion>(done[0]).status, reason);
  };
  const auto reply_of = [](std::uint64_t tag, std::uint32_t payload, std::size_t checksums, const Data& data) {
    ff::Prefix prefix;
    prefix.kind = ff::FrameKind::read_reply;
    prefix.payload_bytes = payload;
    ff::ReadReply reply;
    reply.tag = tag;
    reply.status = ReadStatus::found;
    Data body(sizeof reply + 4 * checksums);
    std::memcpy(body.data(), &reply, sizeof reply);
    Data all = frame(prefix, body);
    all.insert(all.end(), data.begin(), data.end());
    return all;
  };
  using std::string;
  const auto failed = [](const std::pair<ReadStatus, string>& got, const char* text) {
    CHECK(got.first == ReadStatus{} && got.second.find(text) != string::npos);
  };
  failed(answered([](std::uint64_t) { return Data{}; }), "closed the connection");
  failed(answered([](std::uint64_t) { return noise(500, 1); }), "an invalid reply");
  failed(answered([&](std::uint64_t tag) { return reply_of(tag + 1, 100, 1, {}); }), "a request that was not sent");
  failed(answered([&](std::uint64_t tag) { return reply_of(tag + (1ull << 32), 100, 1, {}); }), "a request that was not sent");
  failed(answered([&](std::uint64_t tag) { return reply_of(tag, 101, 1, Data(101)); }), "a request that was not sent");
  failed(answered([&](std::uint64_t tag) { return reply_of(tag, 100, 2, Data(100)); }), "wrong number of checksums");
  failed(answered([&](std::uint64_t tag) {
           Data bytes = reply_of(tag, 100, 1, Data(100));
           bytes[60] ^= std::byte{1};
           return bytes;
         }),
         "damaged in transit");
  failed(answered([&](std::uint64_t tag) { return reply_of(tag, 100, 1, Data(40)); }), "closed the connection");
  CHECK(answered([&](std::uint64_t tag) { return reply_of(tag, 100, 1, Data(100, std::byte{1})); }).first == ReadStatus::damaged);
}

void a_reader_that_does_not_read_holds_up_nobody() {
  Node world;
  put(*world.target, 0, 1, noise(1 << 20, 1));
  world.server.publish({serving(world.target)});
  const int lazy = connect_to(world);
  Data requests(200 * sizeof(ReadRequest));
  for (std::size_t i = 0; i < 200; ++i) {
    const ReadRequest r = request(0, 0, 1 << 20);
    std::memcpy(requests.data() + i * sizeof r, &r, sizeof r);
  }
  ff::Prefix prefix;
  prefix.kind = ff::FrameKind::reads;
  const Data bytes = frame(prefix, requests);
  send_all(lazy, bytes.data(), bytes.size());
  ChunkRing ring;
  const int node = ring.add(connect_to(world));
  Data into(1 << 20);
  CHECK(one(ring, node, request(0, 0, 1 << 20), into).bytes == 1 << 20);
  ::close(lazy);
}

void signals_do_not_end_a_wait() {
  static std::atomic<int> handled = 0;
  struct sigaction act{}, before{};
  act.sa_handler = [](int) { ++handled; };
  CHECK(::sigaction(SIGUSR1, &act, &before) == 0);
  Node world;
  ChunkRing ring;
  const auto [mine, theirs] = connected();
  const std::uint64_t link = world.server.connect(theirs, true);
  const int node = ring.add(mine);
  ring.prepare_message(node, "a question", {});
  ring.submit();
  constexpr int signals = 200;
  const auto asker = ::pthread_self();
  std::thread sender([&] {
    for (int i = 1; i <= signals; ++i) {
      CHECK(::pthread_kill(asker, SIGUSR1) == 0);
      while (handled < i) std::this_thread::yield();
    }
    world.server.send(link, "an answer", nullptr);
  });
  const auto heard = ring.wait(1, -1);
  sender.join();
  CHECK(heard.size() == 1 && std::get<ff::ReceivedMessage>(heard[0]).body == "an answer");

  ring.prepare_message(node, "another one", {});
  ring.submit();
  std::atomic<bool> over = false;
  std::thread again([&] {
    while (!over) {
      const int seen = handled;
      CHECK(::pthread_kill(asker, SIGUSR1) == 0);
      while (!over && handled == seen) std::this_thread::yield();
    }
  });
  const std::int64_t begin_ns = ff::monotonic_ns(), patience_ns = 50'000'000;
  CHECK(ring.wait(1, patience_ns).empty() && ff::monotonic_ns() - begin_ns >= patience_ns);
  int asked = 0;
  CHECK(ring.wait(1, -1, [&asked] { return ++asked == 3; }).empty() && asked == 3);
  over = true;
  again.join();
  world.server.send(link, "late", nullptr);
  CHECK(ring.wait(1, -1).size() == 1);
  CHECK(::sigaction(SIGUSR1, &before, nullptr) == 0);
}

// A ring that has ended says so to the thread that opened it; that must not be one that waits for something else.
void the_end_of_a_server_disturbs_nobody() {
  Node world;
  put(*world.target, 0, 1, noise(5000, 1));
  world.server.publish({serving(world.target)});
  ChunkRing ring;
  const int node = ring.add(connect_to(world));
  Data into(5000);
  int interrupted = 0;
  for (int i = 0; i < 100; ++i) {
    { const Node other; }
    ring.prepare(node, request(0, 0, 5000), into);
    ring.submit();
    CHECK(ring.wait(1, -1, [&interrupted] { return ++interrupted > 0; }).size() == 1 && interrupted == 0);
  }
}

}  // namespace

int main() {
  const Directory directory;
  any_range_is_right(ff::real_disk(directory.path));
  any_range_is_right(std::make_unique<LoggedDisk>());
  cold_reads_are_right(ColdBy::kernel);
  cold_reads_are_right(ColdBy::threads);
  a_kernel_that_refuses_leaves_it_to_threads();
  std::thread(no_result_of_a_ring_is_lost).join();
  signals_do_not_end_a_wait();
  the_end_of_a_server_disturbs_nobody();
  what_is_published_is_obeyed();
  damage_is_seen();
  a_client_that_sends_nonsense_loses_its_own_connection();
  a_node_that_sends_nonsense_loses_its_reads_and_no_memory();
  a_reader_that_does_not_read_holds_up_nobody();
}
