#include "fireflyer/chunk_server.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

namespace ff {
namespace {

constexpr std::size_t receive_bytes = max_body_bytes + sizeof(Prefix);
constexpr std::size_t buffer_bytes = std::size_t{256} << 10;     // replies that are sent together
constexpr std::size_t max_waiting_bytes = std::size_t{8} << 20;  // of replies; then requests of this connection wait in the socket
constexpr std::size_t sendfile_from_bytes = std::size_t{32} << 10;

std::int64_t now_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

using Table = std::unordered_map<std::uint32_t, PublishedChain>;
using SharedTable = std::atomic<std::shared_ptr<const Table>>;

// Bytes, or a piece of a file whose block stays as it is until it is sent.
struct Out {
  std::vector<std::byte> bytes;
  std::shared_ptr<ChunkEngine> engine;  // of the view
  std::optional<ChunkEngine::View> view;
  std::uint64_t at = 0;  // of the bytes, or in the file
  std::size_t left = 0;
};

class Connection {
 public:
  explicit Connection(int fd) : fd_(fd), in_(receive_bytes) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() { ::close(fd_); }

  int fd() const { return fd_; }
  bool blocked() const { return !out_.empty(); }

  // Answers what has come, as far as replies find room. False: the connection is over.
  bool work(const SharedTable& tables, ServerStats& stats) {
    for (;;) {
      bool starved = false;  // no whole frame is left; else it was room that ended
      while (!starved && waiting_ < max_waiting_bytes) {
        const int handled = handle_frame(tables, stats);
        if (handled < 0) return false;
        starved = handled == 0;
      }
      if (!flush()) return false;
      if (waiting_ >= max_waiting_bytes) return true;
      if (!starved) continue;
      const ssize_t n = ::recv(fd_, in_.data() + have_, in_.size() - have_, MSG_DONTWAIT);
      if (n == 0) return false;
      if (n < 0) return errno == EAGAIN || errno == EINTR;
      have_ += static_cast<std::size_t>(n);
    }
  }

 private:
  // 1: a frame was answered, 0: none is whole, -1: it is nonsense
  int handle_frame(const SharedTable& tables, ServerStats& stats) {
    if (have_ < sizeof(Prefix)) return 0;
    Prefix prefix;
    std::memcpy(&prefix, in_.data(), sizeof prefix);
    if (prefix.magic != chunk_wire_magic || prefix.kind != FrameKind::reads || prefix.payload_bytes != 0) return -1;
    if (prefix.body_bytes > max_reads_per_frame * sizeof(ReadRequest) || prefix.body_bytes % sizeof(ReadRequest) != 0) return -1;
    const std::size_t frame = sizeof prefix + prefix.body_bytes;
    if (have_ < frame) return 0;
    if (prefix.crc != frame_crc(prefix, in_.data() + sizeof prefix)) return -1;
    // Looked at when the requests are here: a role that was lost before they came is not acted on.
    const std::shared_ptr<const Table> table = tables.load();
    const std::int64_t now = now_ns();
    for (std::size_t at = sizeof prefix; at < frame; at += sizeof(ReadRequest)) {
      ReadRequest request;
      std::memcpy(&request, in_.data() + at, sizeof request);
      answer(request, *table, now, stats);
    }
    std::memmove(in_.data(), in_.data() + frame, have_ - frame);
    have_ -= frame;
    return 1;
  }

  void answer(const ReadRequest& request, const Table& table, std::int64_t now, ServerStats& stats) {
    ReadReply reply;
    reply.tag = request.tag;
    ++stats.reads;
    reply.status = ReadStatus::stale;
    const auto found = table.find(request.chain);
    if (found == table.end() || !found->second.serving) return refuse(reply, stats);
    const PublishedChain& chain = found->second;
    reply.chain_version = chain.chain_version;
    if (now >= chain.fence_until_ns || request.chain_version != chain.chain_version) return refuse(reply, stats);
    reply.status = ReadStatus::usage;
    if (request.length > max_block_bytes || request.offset > max_block_bytes) return refuse(reply, stats);
    try {
      read(request, chain, reply, stats);
    } catch (const std::exception&) {
      reply.status = ReadStatus::damaged;
      refuse(reply, stats);
    }
  }

  void read(const ReadRequest& request, const PublishedChain& chain, ReadReply& reply, ServerStats& stats) {
    bool pending = false;
    auto view = chain.engine->view_committed({request.file, request.index}, pending);
    if (pending && !chain.answers_committed) {
      reply.status = ReadStatus::not_committed;
      reply.where = chain.tail;
      return refuse(reply, stats);
    }
    if (!view) {
      reply.status = ReadStatus::missing;
      return refuse(reply, stats);
    }
    const Content& content = view->content();
    reply.status = ReadStatus::found;
    reply.version = content.version, reply.made_in = content.made_in, reply.chunk_length = content.length;
    const std::uint32_t length = request.offset >= content.length ? 0 : std::min(request.length, content.length - request.offset);
    const std::size_t pieces = pieces_of(request.offset, length);
    const bool whole = request.offset % granule_bytes == 0 && (length % granule_bytes == 0 || request.offset + length == content.length);
    std::vector<std::uint32_t>& checksums = checksums_;
    checksums.resize(pieces);
    stats.bytes += length;
    if (whole && pieces > 0) chain.engine->checksums(*view, request.offset / granule_bytes, checksums);
    const std::size_t header = sizeof(Prefix) + sizeof reply + pieces * sizeof(std::uint32_t);
    if (whole && length >= sendfile_from_bytes && view->file().descriptor() >= 0) {
      put_header(room(header), reply, checksums, length);
      Out file;
      file.at = view->offset() + request.offset;
      file.left = length;
      file.engine = chain.engine;
      file.view = std::move(view);
      waiting_ += length;
      out_.push_back(std::move(file));
      return;
    }
    std::byte* const target = room(header + length);
    try {
      const MutableBytes data(target + header, length);
      if (!whole) {
        chain.engine->read(*view, request.offset, data);
        std::size_t done = 0;
        for (std::uint32_t& checksum : checksums) {
          const std::size_t n = std::min<std::size_t>(granule_bytes - (request.offset + done) % granule_bytes, length - done);
          checksum = crc32c(0, data.data() + done, n);
          done += n;
        }
      } else if (view->file().read(view->offset() + request.offset, data) != length) {
        throw EngineError(EngineErrorKind::damaged, "a block is behind the end of its file");
      }
    } catch (...) {
      give_back(header + length);
      throw;
    }
    put_header(target, reply, checksums, length);
  }

  void refuse(const ReadReply& reply, ServerStats& stats) {
    ++stats.refused;
    put_header(room(sizeof(Prefix) + sizeof reply), reply, {}, 0);
  }

  static void put_header(std::byte* at, const ReadReply& reply, std::span<const std::uint32_t> checksums, std::uint32_t length) {
    Prefix prefix;
    prefix.kind = FrameKind::read_reply;
    prefix.body_bytes = static_cast<std::uint32_t>(sizeof reply + checksums.size_bytes());
    prefix.payload_bytes = length;
    std::memcpy(at + sizeof prefix, &reply, sizeof reply);
    if (!checksums.empty()) std::memcpy(at + sizeof prefix + sizeof reply, checksums.data(), checksums.size_bytes());
    prefix.crc = frame_crc(prefix, at + sizeof prefix);
    std::memcpy(at, &prefix, sizeof prefix);
  }

  // Memory at the end of what is to be sent.
  std::byte* room(std::size_t bytes) {
    if (out_.empty() || out_.back().view || out_.back().bytes.size() + bytes > buffer_bytes) {
      out_.emplace_back();
      out_.back().bytes.reserve(std::max(bytes, buffer_bytes));
    }
    Out& last = out_.back();
    last.bytes.resize(last.bytes.size() + bytes);
    last.left += bytes;
    waiting_ += bytes;
    return last.bytes.data() + last.bytes.size() - bytes;
  }

  void give_back(std::size_t bytes) {
    Out& last = out_.back();
    last.bytes.resize(last.bytes.size() - bytes);
    last.left -= bytes;
    waiting_ -= bytes;
  }

  bool flush() {
    while (!out_.empty()) {
      Out& out = out_.front();
      ssize_t n = 0;
      if (out.left > 0) {
        if (out.view) {
          auto at = static_cast<off_t>(out.at);
          n = ::sendfile(fd_, out.view->file().descriptor(), &at, out.left);
          if (n == 0) return false;  // the file is shorter than its records say
        } else {
          n = ::send(fd_, out.bytes.data() + out.at, out.left, MSG_NOSIGNAL | MSG_DONTWAIT | (out_.size() > 1 ? MSG_MORE : 0));
        }
      }
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN;
      out.at += static_cast<std::uint64_t>(n);
      out.left -= static_cast<std::size_t>(n);
      waiting_ -= static_cast<std::size_t>(n);
      if (out.left == 0) out_.pop_front();
    }
    return true;
  }

  int fd_;
  std::vector<std::byte> in_;
  std::size_t have_ = 0;
  std::deque<Out> out_;
  std::size_t waiting_ = 0;  // bytes of out_
  std::vector<std::uint32_t> checksums_;
};

}  // namespace

struct ChunkServer::State {
  struct Loop {
    int epoll = -1, wake = -1;
    std::thread thread;
    std::mutex mutex;  // of what follows
    std::vector<int> arrived;
    ServerStats stats;
  };

  SharedTable table{std::make_shared<const Table>()};
  std::vector<std::unique_ptr<Loop>> loops;
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> stop = false;

  void run(Loop& loop);
  static void wake(const Loop& loop) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(loop.wake, &one, sizeof one);
  }
};

void ChunkServer::State::run(Loop& loop) {
  std::map<int, std::unique_ptr<Connection>> connections;
  ServerStats stats;
  epoll_event events[64];
  while (!stop) {
    const int ready = ::epoll_wait(loop.epoll, events, 64, -1);
    for (int i = 0; i < ready; ++i) {
      const int fd = events[i].data.fd;
      if (fd == loop.wake) {
        std::uint64_t count = 0;
        [[maybe_unused]] const ssize_t n = ::read(loop.wake, &count, sizeof count);
        continue;
      }
      const auto at = connections.find(fd);
      if (at == connections.end()) continue;
      const bool was_blocked = at->second->blocked();
      if (!at->second->work(table, stats)) {
        connections.erase(at);
        continue;
      }
      if (at->second->blocked() == was_blocked) continue;
      epoll_event event{at->second->blocked() ? EPOLLIN | EPOLLOUT : EPOLLIN, {.fd = fd}};
      ::epoll_ctl(loop.epoll, EPOLL_CTL_MOD, fd, &event);
    }
    const std::lock_guard lock(loop.mutex);
    for (const int fd : loop.arrived) {
      connections[fd] = std::make_unique<Connection>(fd);
      epoll_event event{EPOLLIN, {.fd = fd}};
      ::epoll_ctl(loop.epoll, EPOLL_CTL_ADD, fd, &event);
    }
    loop.arrived.clear();
    stats.connections = connections.size();
    loop.stats = stats;
  }
}

ChunkServer::ChunkServer(int threads) : state_(std::make_unique<State>()) {
  for (int i = 0; i < threads; ++i) {
    auto& loop = *state_->loops.emplace_back(std::make_unique<State::Loop>());
    loop.epoll = ::epoll_create1(EPOLL_CLOEXEC);
    loop.wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (loop.epoll < 0 || loop.wake < 0) throw DiskError(errno, "cannot make a server thread's descriptors");
    epoll_event event{EPOLLIN, {.fd = loop.wake}};
    ::epoll_ctl(loop.epoll, EPOLL_CTL_ADD, loop.wake, &event);
    loop.thread = std::thread([this, &loop] { state_->run(loop); });
  }
}

ChunkServer::~ChunkServer() {
  state_->stop = true;
  for (auto& loop : state_->loops) {
    State::wake(*loop);
    if (loop->thread.joinable()) loop->thread.join();
    for (const int fd : loop->arrived) ::close(fd);
    ::close(loop->epoll);
    ::close(loop->wake);
  }
}

void ChunkServer::publish(std::vector<PublishedChain> chains) {
  auto table = std::make_shared<Table>();
  for (const PublishedChain& chain : chains) (*table)[chain.chain] = chain;
  state_->table.store(std::move(table));
}

void ChunkServer::serve(int fd) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  State::Loop& loop = *state_->loops[state_->next++ % state_->loops.size()];
  const std::lock_guard lock(loop.mutex);
  loop.arrived.push_back(fd);
  State::wake(loop);
}

ServerStats ChunkServer::stats() const {
  ServerStats sum;
  for (const auto& loop : state_->loops) {
    const std::lock_guard lock(loop->mutex);
    sum.reads += loop->stats.reads, sum.bytes += loop->stats.bytes;
    sum.refused += loop->stats.refused, sum.connections += loop->stats.connections;
  }
  return sum;
}

}  // namespace ff
