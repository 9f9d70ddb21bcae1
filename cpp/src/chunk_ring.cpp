#include "fireflyer/chunk_ring.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>

namespace ff {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{128} << 10;
static_assert(buffer_bytes >= sizeof(Prefix) + sizeof(ReadReply) + max_pieces * sizeof(std::uint32_t));

std::int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

struct Slot {
  bool used = false;
  std::uint32_t generation = 0;  // a late reply to an earlier user of the slot is nobody's
  int server = -1;
  ReadRequest request;
  MutableBytes into;
};

// The reply that is being received.
struct Arriving {
  ReadReply reply;
  std::uint32_t slot = 0, length = 0;
  std::size_t done = 0, checked = 0, piece = 0;
  bool sound = true;
  std::vector<std::uint32_t> checksums;
};

struct Server {
  int fd = -1;
  std::string error;
  std::vector<ReadRequest> prepared;
  std::vector<std::byte> out;
  std::size_t sent = 0;
  std::vector<std::byte> in = std::vector<std::byte>(buffer_bytes);
  std::size_t begin = 0, end = 0;
  std::optional<Arriving> arriving;
  std::vector<std::uint32_t> spare;  // checksums of the reply before
};

}  // namespace

struct ChunkRing::State {
  std::vector<Server> servers;
  std::vector<Slot> slots;
  std::vector<std::uint32_t> free;
  std::deque<Completion> completed;
  std::size_t under_way = 0;

  ~State() {
    for (const Server& server : servers)
      if (server.fd >= 0) ::close(server.fd);
  }

  void fail(int number, const std::string& why);
  void complete(std::uint32_t slot, Completion completion);
  void send_waiting(int number);
  void receive(int number);
  bool take_header(Server& server, int number);
  void check_pieces(Arriving& a, MutableBytes into);
  void finish(Server& server);
};

void ChunkRing::State::complete(std::uint32_t slot, Completion completion) {
  Slot& s = slots[slot];
  completion.tag = s.request.tag;
  completed.push_back(completion);
  s.used = false;
  ++s.generation;
  free.push_back(slot);
  --under_way;
}

void ChunkRing::State::fail(int number, const std::string& why) {
  Server& server = servers[static_cast<std::size_t>(number)];
  if (server.fd < 0) return;
  ::close(server.fd);
  server.fd = -1;
  server.error = why;
  server.arriving.reset();
  for (std::uint32_t slot = 0; slot < slots.size(); ++slot)
    if (slots[slot].used && slots[slot].server == number) complete(slot, {});
}

void ChunkRing::State::send_waiting(int number) {
  Server& server = servers[static_cast<std::size_t>(number)];
  while (server.fd >= 0 && server.sent < server.out.size()) {
    const ssize_t n = ::send(server.fd, server.out.data() + server.sent, server.out.size() - server.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) return fail(number, std::string("cannot send: ") + std::strerror(errno));
    server.sent += static_cast<std::size_t>(n);
  }
  server.out.clear();
  server.sent = 0;
}

// A whole header in the buffer begins a reply. False: more is needed, or the connection failed.
bool ChunkRing::State::take_header(Server& server, int number) {
  const std::size_t have = server.end - server.begin;
  if (have < sizeof(Prefix)) return false;
  const std::byte* const at = server.in.data() + server.begin;
  Prefix prefix;
  std::memcpy(&prefix, at, sizeof prefix);
  const bool fits = prefix.body_bytes >= sizeof(ReadReply) && prefix.body_bytes <= buffer_bytes - sizeof prefix;
  if (prefix.magic != chunk_wire_magic || prefix.kind != FrameKind::read_reply || !fits) return fail(number, "the node sent something that is not a reply"), false;
  if (have < sizeof prefix + prefix.body_bytes) return false;
  if (prefix.crc != frame_crc(prefix, at + sizeof prefix)) return fail(number, "a reply was damaged on its way"), false;
  Arriving a;
  a.checksums.swap(server.spare);
  std::memcpy(&a.reply, at + sizeof prefix, sizeof a.reply);
  a.slot = static_cast<std::uint32_t>(a.reply.tag), a.length = prefix.payload_bytes;
  const bool known = a.slot < slots.size() && slots[a.slot].used && slots[a.slot].server == number && slots[a.slot].generation == a.reply.tag >> 32;
  if (!known || a.length > slots[a.slot].request.length) return fail(number, "the node answered what was not asked"), false;
  const std::size_t pieces = pieces_of(slots[a.slot].request.offset, a.length);
  if (prefix.body_bytes != sizeof a.reply + pieces * sizeof(std::uint32_t)) return fail(number, "a reply has the wrong number of checksums"), false;
  a.checksums.resize(pieces);
  if (pieces > 0) std::memcpy(a.checksums.data(), at + sizeof prefix + sizeof a.reply, pieces * sizeof(std::uint32_t));
  server.begin += sizeof prefix + prefix.body_bytes;
  server.arriving = std::move(a);
  return true;
}

// Verifies what is complete, while it is still in the cache.
void ChunkRing::State::check_pieces(Arriving& a, MutableBytes into) {
  const std::uint32_t offset = slots[a.slot].request.offset;
  while (a.piece < a.checksums.size()) {
    const std::size_t n = std::min<std::size_t>(granule_bytes - (offset + a.checked) % granule_bytes, a.length - a.checked);
    if (a.checked + n > a.done) return;
    a.sound = a.sound && crc32c(0, into.data() + a.checked, n) == a.checksums[a.piece];
    a.checked += n;
    ++a.piece;
  }
}

void ChunkRing::State::finish(Server& server) {
  Arriving& a = *server.arriving;
  Completion completion;
  completion.status = a.sound ? a.reply.status : ReadStatus::damaged;
  completion.bytes = a.sound ? a.length : 0;
  completion.content = {a.reply.made_in, a.reply.version};
  completion.chunk_length = a.reply.chunk_length, completion.chain_version = a.reply.chain_version, completion.where = a.reply.where;
  complete(a.slot, completion);
  server.spare.swap(a.checksums);
  server.arriving.reset();
}

void ChunkRing::State::receive(int number) {
  Server& server = servers[static_cast<std::size_t>(number)];
  while (server.fd >= 0) {
    if (server.arriving) {
      Arriving& a = *server.arriving;
      const MutableBytes into = slots[a.slot].into;
      if (const std::size_t n = std::min<std::size_t>(server.end - server.begin, a.length - a.done); n > 0) {
        std::memcpy(into.data() + a.done, server.in.data() + server.begin, n);
        server.begin += n;
        a.done += n;
      }
      check_pieces(a, into);
      if (a.done == a.length) {
        finish(server);
        continue;
      }
      // The buffer is empty: the rest goes to where it belongs.
      const ssize_t n = ::recv(server.fd, into.data() + a.done, a.length - a.done, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return;
      if (n <= 0) return fail(number, n == 0 ? "the node closed the connection" : std::string("cannot receive: ") + std::strerror(errno));
      a.done += static_cast<std::size_t>(n);
      continue;
    }
    if (take_header(server, number)) continue;
    if (server.fd < 0) return;
    std::memmove(server.in.data(), server.in.data() + server.begin, server.end - server.begin);
    server.end -= server.begin;
    server.begin = 0;
    const ssize_t n = ::recv(server.fd, server.in.data() + server.end, server.in.size() - server.end, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return fail(number, n == 0 ? "the node closed the connection" : std::string("cannot receive: ") + std::strerror(errno));
    server.end += static_cast<std::size_t>(n);
  }
}

ChunkRing::ChunkRing() : state_(std::make_unique<State>()) {}
ChunkRing::~ChunkRing() = default;

int ChunkRing::add(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  state_->servers.emplace_back().fd = fd;
  return static_cast<int>(state_->servers.size()) - 1;
}

void ChunkRing::remove(int server) { state_->fail(server, "the connection was given up"); }

void ChunkRing::prepare(int server, const ReadRequest& request, MutableBytes into) {
  State& s = *state_;
  if (s.free.empty()) {
    s.free.push_back(static_cast<std::uint32_t>(s.slots.size()));
    s.slots.emplace_back();
  }
  const std::uint32_t number = s.free.back();
  s.free.pop_back();
  Slot& slot = s.slots[number];
  slot.used = true, slot.server = server, slot.request = request, slot.into = into;
  ++s.under_way;
  Server& target = s.servers[static_cast<std::size_t>(server)];
  if (target.fd < 0) return s.complete(number, {});
  ReadRequest& wire = target.prepared.emplace_back(request);
  wire.tag = std::uint64_t{slot.generation} << 32 | number;
}

void ChunkRing::submit() {
  for (std::size_t number = 0; number < state_->servers.size(); ++number) {
    Server& server = state_->servers[number];
    for (std::size_t from = 0; from < server.prepared.size(); from += max_reads_per_frame) {
      const std::size_t count = std::min(max_reads_per_frame, server.prepared.size() - from);
      Prefix prefix;
      prefix.kind = FrameKind::reads;
      prefix.body_bytes = static_cast<std::uint32_t>(count * sizeof(ReadRequest));
      prefix.crc = frame_crc(prefix, &server.prepared[from]);
      const std::size_t at = server.out.size();
      server.out.resize(at + sizeof prefix + prefix.body_bytes);
      std::memcpy(server.out.data() + at, &prefix, sizeof prefix);
      std::memcpy(server.out.data() + at + sizeof prefix, &server.prepared[from], prefix.body_bytes);
    }
    server.prepared.clear();
    state_->send_waiting(static_cast<int>(number));
  }
}

std::vector<Completion> ChunkRing::wait(std::size_t least, std::int64_t timeout_ns) {
  State& s = *state_;
  least = std::min(least, s.completed.size() + s.under_way);
  const std::int64_t deadline = timeout_ns < 0 ? INT64_MAX : now_ns() + timeout_ns;
  std::vector<pollfd> polled;
  for (bool first = true; first || s.completed.size() < least; first = false) {
    polled.clear();
    for (const Server& server : s.servers) polled.push_back({server.fd, static_cast<short>(POLLIN | (server.sent < server.out.size() ? POLLOUT : 0)), 0});
    const std::int64_t left = s.completed.size() >= least ? 0 : deadline == INT64_MAX ? -1 : std::max<std::int64_t>(0, deadline - now_ns());
    const timespec limit{left / 1'000'000'000, left % 1'000'000'000};
    const int ready = ::ppoll(polled.data(), polled.size(), left < 0 ? nullptr : &limit, nullptr);
    if (ready == 0) break;
    for (std::size_t i = 0; ready > 0 && i < polled.size(); ++i) {
      if (polled[i].revents & POLLOUT) s.send_waiting(static_cast<int>(i));
      if (polled[i].revents & (POLLIN | POLLHUP | POLLERR)) s.receive(static_cast<int>(i));
    }
  }
  std::vector<Completion> completions(s.completed.begin(), s.completed.end());
  s.completed.clear();
  return completions;
}

std::size_t ChunkRing::under_way() const { return state_->under_way; }

std::string ChunkRing::error(int server) const { return state_->servers[static_cast<std::size_t>(server)].error; }

}  // namespace ff
