#include "fireflyer/storage/client/ring.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/storage/wire/stream.hpp"
#include "ring_server.hpp"

namespace ff {
namespace {

constexpr std::uint64_t wake_id = UINT64_MAX;

}  // namespace

struct ChunkRing::State {
  int epoll = ::epoll_create1(EPOLL_CLOEXEC);
  int wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // readable while events wait to be taken
  bool woken = false;
  ReadSlots slots;
  std::deque<RingEvent> events;
  std::vector<std::unique_ptr<RingServer>> servers;

  State() {
    if (epoll < 0 || wake < 0) throw DiskError(errno, "cannot make the descriptors of a ring");
    epoll_event event{EPOLLIN, {.u64 = wake_id}};
    ::epoll_ctl(epoll, EPOLL_CTL_ADD, wake, &event);
  }
  ~State() {
    servers.clear();
    if (epoll >= 0) ::close(epoll);
    if (wake >= 0) ::close(wake);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  RingServer& server(int number) {
    if (number < 0 || static_cast<std::size_t>(number) >= servers.size()) throw std::invalid_argument("there is no server " + std::to_string(number));
    return *servers[static_cast<std::size_t>(number)];
  }

  std::size_t under_way() const {
    std::size_t sum = 0;
    for (const auto& server : servers) sum += server->under_way();
    return sum;
  }

  void watch(RingServer& server, std::uint64_t number) const {
    const std::uint32_t interest = std::uint32_t{EPOLLIN} | (server.has_to_send() ? std::uint32_t{EPOLLOUT} : 0);
    if (server.broken() || interest == server.interest) return;
    epoll_event event{interest, {.u64 = number}};
    ::epoll_ctl(epoll, server.interest == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, server.fd(), &event);
    server.interest = interest;
  }

  void show_events(bool show) {
    if (show == woken) return;
    woken = show;
    std::uint64_t count = 1;
    [[maybe_unused]] const ssize_t n = show ? ::write(wake, &count, sizeof count) : ::read(wake, &count, sizeof count);
  }

  // False: a signal came, or the kernel had something to do in this thread.
  bool poll(int timeout_ms) {
    epoll_event ready[64];
    const int count = ::epoll_wait(epoll, ready, 64, timeout_ms);
    if (count < 0 && errno != EINTR) throw DiskError(errno, "cannot wait for a ring");
    for (int i = 0; i < count; ++i) {
      if (ready[i].data.u64 == wake_id) continue;
      RingServer& server = *servers[ready[i].data.u64];
      if (ready[i].events & EPOLLOUT) server.send();
      if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) server.receive();
      watch(server, ready[i].data.u64);
    }
    return count >= 0;
  }
};

ChunkRing::ChunkRing() : state_(std::make_unique<State>()) {}
ChunkRing::~ChunkRing() = default;

int ChunkRing::descriptor() const { return state_->epoll; }

int ChunkRing::add(int fd) {
  prepare_stream(fd);
  State& s = *state_;
  const int number = static_cast<int>(s.servers.size());
  RingServer& server = *s.servers.emplace_back(std::make_unique<RingServer>(number, fd, s.slots, s.events));
  s.watch(server, static_cast<std::uint64_t>(number));
  return number;
}

void ChunkRing::remove(int server) {
  state_->server(server).fail("connection closed by this client");
  state_->show_events(!state_->events.empty());
}

std::uint64_t ChunkRing::prepare(int server, const ReadRequest& request, MutableBytes into, Keep keep, bool batched) {
  RingServer& target = state_->server(server);
  const std::uint64_t number = state_->slots.open({true, false, batched, 0, server, request, into, std::move(keep)});
  target.prepare(number, request);
  state_->show_events(!state_->events.empty());
  return number;
}

void ChunkRing::prepare_message(int server, const std::string& body, Bytes data, Keep keep) {
  RingServer& target = state_->server(server);
  if (target.told_lost) throw std::invalid_argument("server " + std::to_string(server) + " was lost; connect to it again");
  target.prepare(body, data, std::move(keep));
}

void ChunkRing::submit() {
  for (std::size_t number = 0; number < state_->servers.size(); ++number) {
    RingServer& server = *state_->servers[number];
    server.frame_prepared();
    server.send();
    state_->watch(server, number);
  }
  state_->show_events(!state_->events.empty());
}

std::vector<RingEvent> ChunkRing::wait(std::size_t least, std::int64_t timeout_ns, const std::function<bool()>& interrupted) {
  State& s = *state_;
  s.show_events(false);
  const std::int64_t deadline_ns = timeout_ns < 0 ? -1 : monotonic_ns() + timeout_ns;
  for (bool first = true;; first = false) {
    const bool enough = s.events.size() >= least || s.under_way() == 0;
    if (enough && !first) break;
    int timeout_ms = enough ? 0 : -1;
    if (!enough && deadline_ns >= 0) {
      const std::int64_t left_ns = std::max<std::int64_t>(0, deadline_ns - monotonic_ns());
      if (left_ns == 0 && !first) break;
      timeout_ms = static_cast<int>(std::min<std::int64_t>((left_ns + 999'999) / 1'000'000, 1 << 30));
    }
    if (s.poll(timeout_ms) || !interrupted || !interrupted()) continue;
    s.show_events(!s.events.empty());
    return {};
  }
  std::vector<RingEvent> taken(std::make_move_iterator(s.events.begin()), std::make_move_iterator(s.events.end()));
  s.events.clear();
  for (const RingEvent& event : taken)
    if (const auto* const lost = std::get_if<LostServer>(&event)) s.server(lost->server).told_lost = true;
  return taken;
}

bool ChunkRing::cancel(std::uint64_t read) {
  const ReadSlot* const slot = state_->slots.find(read);
  if (slot == nullptr || slot->cancelled) return false;
  state_->server(slot->server).cancel(read);
  return true;
}

bool ChunkRing::has(int server) const { return server >= 0 && static_cast<std::size_t>(server) < state_->servers.size(); }

std::size_t ChunkRing::under_way() const { return state_->under_way(); }

}  // namespace ff
