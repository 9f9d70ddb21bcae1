// Altered frames of data connections, in both directions: clients that lie to a node lose their own connection, and a node
// that lies to a client loses its reads and writes nowhere else. PROGRAM [FIRST COUNT] runs other seeds.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fireflyer/storage/client/ring.hpp"
#include "fireflyer/storage/server/server.hpp"
#include "fuzz.hpp"
#include "storage/engine/logged_disk.hpp"

namespace {

using ff::Completion;
using ff::FrameKind;
using ff::Prefix;
using ff::ReadReply;
using ff::ReadRequest;
using ff::ReadStatus;
using fuzz::Bytes;
using fuzz::Chance;

constexpr std::uint32_t chain = 3, chain_version = 9, chunk_length = 20'000;
constexpr std::int64_t forever = INT64_MAX, patience_ns = 60'000'000'000;  // beside much other work, under a sanitizer

std::pair<int, int> connected() {
  int fds[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  return {fds[0], fds[1]};
}

// As much as the other end takes.
void send_some(int fd, const Bytes& data) {
  std::size_t put = 0;
  for (int tries = 0; put < data.size() && tries < 200; ++tries) {
    const ssize_t n = ::send(fd, data.data() + put, data.size() - put, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) put += static_cast<std::size_t>(n);
    else if (n < 0 && errno != EAGAIN) return;
    else ::usleep(50);
    char heard[4096];
    while (::recv(fd, heard, sizeof heard, MSG_DONTWAIT) > 0) {
    }
  }
}

void append_frame(Chance& chance, Prefix prefix, const Bytes& body, std::size_t payload, Bytes& all) {
  prefix.body_bytes = static_cast<std::uint32_t>(body.size());
  prefix.payload_bytes = static_cast<std::uint32_t>(payload);
  if (chance.one_in(6)) chance.alter(prefix.payload_bytes);
  if (chance.one_in(10)) chance.alter(prefix.kind);
  if (chance.one_in(20)) chance.alter(prefix.reserved);
  prefix.crc = ff::frame_crc(prefix, body.data());
  if (chance.one_in(10)) chance.alter(prefix.body_bytes);
  if (chance.one_in(30)) chance.alter(prefix.crc);
  if (chance.one_in(40)) chance.alter(prefix.magic);
  fuzz::append(all, prefix);
  all.insert(all.end(), body.begin(), body.end());
  all.insert(all.end(), payload, 'p');
}

Bytes of_a_client(Chance& chance) {
  Bytes all;
  for (std::uint64_t left = 1 + chance.below(6); left > 0; --left) {
    Prefix prefix;
    Bytes body;
    std::size_t payload = 0;
    if (chance.one_in(4)) {
      prefix.kind = FrameKind::message;
      body = Bytes(chance.below(300), 'b');
      payload = chance.below(3000);
    } else {
      prefix.kind = FrameKind::reads;
      for (std::uint64_t reads = chance.below(4); reads > 0; --reads) {
        ReadRequest request{left, 1, 0, chain, chain_version, 0, chunk_length, 0};
        if (chance.one_in(3)) chance.alter(request.offset);
        if (chance.one_in(3)) chance.alter(request.length);
        if (chance.one_in(8)) chance.alter(request.index);
        if (chance.one_in(8)) chance.alter(request.chain);
        if (chance.one_in(8)) chance.alter(request.chain_version);
        if (chance.one_in(8)) chance.alter(request.file);
        fuzz::append(body, request);
      }
      if (chance.one_in(10)) body.resize(chance.below(body.size() + 9));
    }
    append_frame(chance, prefix, body, payload, all);
  }
  if (chance.one_in(5)) chance.damage(all);
  return all;
}

Bytes of_a_node(Chance& chance, std::uint64_t tag, std::uint32_t asked) {
  Bytes all;
  for (std::uint64_t left = 1 + chance.below(4); left > 0; --left) {
    Prefix prefix;
    Bytes body;
    std::size_t payload = 0;
    if (chance.one_in(5)) {
      prefix.kind = FrameKind::message;
      body = Bytes(chance.below(300), 'b');
      payload = chance.below(3000);
    } else {
      prefix.kind = FrameKind::read_reply;
      payload = chance.one_in(3) ? chance.below(asked + 9) : asked;
      ReadReply reply;
      reply.tag = chance.one_in(8) ? chance.telling(tag) : tag;
      reply.status = static_cast<ReadStatus>(chance.one_in(8) ? chance.next() : 1);
      reply.chunk_length = chunk_length;
      fuzz::append(body, reply);
      const std::size_t pieces = ff::pieces_of(0, static_cast<std::uint32_t>(payload));
      for (std::size_t i = 0; i < pieces; ++i) fuzz::append(body, static_cast<std::uint32_t>(chance.next()));
      if (chance.one_in(10)) body.resize(chance.below(body.size() + 9));
    }
    append_frame(chance, prefix, body, payload, all);
  }
  if (chance.one_in(5)) chance.damage(all);
  return all;
}

// A node that serves one chunk, and a client that is right.
class Node {
 public:
  Node() : target_(std::make_shared<ff::ChunkTarget>(7, std::make_unique<ff::test::LoggedDisk>(), options(), 1, events_)), server_(1, events_, pool_, ff::LinkPatience{}, ff::ColdBy::kernel) {
    ff::Update update;
    update.kind = ff::UpdateKind::replace;
    const std::vector<std::byte> data(chunk_length, std::byte{'d'});
    update.data = data;
    update.next = {chain_version, 1};
    ff::Lsn lsn = 0;
    target_->engine().stage({1, 0}, update, lsn);
    target_->commit({1, 0}, {chain_version, 1});
    target_->engine().flush();
    server_.publish({{chain, chain_version, true, false, forever, 77, target_}});
    right_ = ring_.add(connect(true));
  }

  int connect(bool trusted) {
    const auto [mine, theirs] = connected();
    const std::uint64_t link = server_.connect(theirs, true);
    if (trusted) server_.trust(link);
    return mine;
  }

  void drain() {
    while (!events_->take(1000).empty()) {
    }
  }

  void serves() {
    std::vector<std::byte> into(chunk_length);
    ring_.prepare(right_, {5, 1, 0, chain, chain_version, 0, chunk_length, 0}, into);
    ring_.submit();
    const auto done = ring_.wait(1, patience_ns);
    CHECK(done.size() == 1 && std::get<Completion>(done[0]).status == ReadStatus::found);
    CHECK(std::all_of(into.begin(), into.end(), [](std::byte byte) { return byte == std::byte{'d'}; }));
  }

 private:
  static ff::EngineOptions options() {
    ff::EngineOptions o;
    o.group_bytes = 1 << 20;
    o.reserve = 0;
    return o;
  }

  std::shared_ptr<ff::EventQueue> events_ = std::make_shared<ff::EventQueue>();
  std::shared_ptr<ff::BufferPool> pool_ = ff::BufferPool::create(std::size_t{8} << 20);
  std::shared_ptr<ff::ChunkTarget> target_;
  ff::ChunkServer server_;
  ff::ChunkRing ring_;
  int right_ = 0;
};

void a_lying_client(Node& node, std::uint64_t seed) {
  Chance chance(seed);
  const int fd = node.connect(chance.one_in(2));
  send_some(fd, of_a_client(chance));
  ::close(fd);
  node.drain();
}

void a_lying_node(std::uint64_t seed) {
  Chance chance(seed);
  const auto [mine, theirs] = connected();
  ff::ChunkRing ring;
  const int node = ring.add(mine);
  constexpr std::uint32_t asked = 9000;
  constexpr std::size_t guard = 64;
  std::vector<std::byte> into(asked + 2 * guard, std::byte{'g'});
  const std::uint64_t number = ring.prepare(node, {5, 1, 0, chain, chain_version, 0, asked, 0}, ff::MutableBytes(into).subspan(guard, asked));
  ring.submit();
  std::byte request[sizeof(Prefix) + sizeof(ReadRequest)];
  CHECK(::recv(theirs, request, sizeof request, MSG_WAITALL) == static_cast<ssize_t>(sizeof request));
  ReadRequest wire;
  std::memcpy(&wire, request + sizeof(Prefix), sizeof wire);
  send_some(theirs, of_a_node(chance, wire.tag, asked));
  if (chance.one_in(4)) ring.wait(0, 0);
  if (chance.one_in(8)) ring.cancel(number);
  ::close(theirs);
  while (ring.under_way() > 0) CHECK(!ring.wait(1, patience_ns).empty());
  for (std::size_t i = 0; i < guard; ++i) CHECK(into[i] == std::byte{'g'} && into[guard + asked + i] == std::byte{'g'});
}

}  // namespace

int main(int argc, char** argv) {
  const fuzz::Seeds seeds(argc, argv, 2000);
  Node node;
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    if (seed % 100 == 0) std::fprintf(stderr, "\rseed %llu", static_cast<unsigned long long>(seed));
    a_lying_client(node, seed);
    a_lying_node(seed);
    if (seed % 50 == 0) node.serves();
  }
  node.serves();
  std::puts("\naltered frames of chunk data: all well");
  return 0;
}
