#include "fireflyer/storage/server/server.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/storage/wire/stream.hpp"
#include "link.hpp"

namespace ff {
namespace {

constexpr std::size_t max_waiting_frames = 4096, max_waiting_bytes = std::size_t{64} << 20;  // of one link
constexpr std::uint64_t wake_id = 0, cold_id = UINT64_MAX;                                   // links begin at 1
constexpr unsigned ring_entries = 256;                                                      // submitted in one call; any number is under way

struct Arrive {
  int fd;
  std::shared_ptr<LinkShare> share;
};
struct Say {
  std::uint64_t link;
  std::vector<std::byte> frame;
  SharedBuffer data;
};
struct End {
  std::uint64_t link;
  std::string reason;
};
struct Memory {
  std::uint64_t link;
  SharedBuffer buffer;
};
struct Fetched {
  std::uint64_t link;
  ReadRequest request;
};
struct HasRoom {};
using Command = std::variant<Arrive, Say, End, Memory, Fetched, HasRoom>;

// One thread and its links.
class Loop : public std::enable_shared_from_this<Loop> {
 public:
  Loop(LinkContext context, std::function<void(std::uint64_t)> forget)
      : context_(context), forget_(std::move(forget)), epoll_(::epoll_create1(EPOLL_CLOEXEC)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (epoll_ < 0 || wake_ < 0) throw DiskError(errno, "cannot make a server thread's descriptors");
    context_.spares = &spares_;
    epoll_event event{EPOLLIN, {.u64 = wake_id}};
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  }
  ~Loop() {
    if (epoll_ >= 0) ::close(epoll_);
    if (wake_ >= 0) ::close(wake_);
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Who fetches its cold reads.
  ColdBy start(ColdBy cold_by) {
    std::promise<ColdBy> chosen;
    auto known = chosen.get_future();
    thread_ = std::thread([this, cold_by, chosen = std::move(chosen)]() mutable {
      const bool opened = cold_by == ColdBy::kernel && open_ring();
      chosen.set_value(opened ? ColdBy::kernel : ColdBy::threads);
      run();
    });
    return known.get();
  }
  void stop() {
    stop_ = true;
    wake();
    thread_.join();
    std::vector<Command> left;
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      left.swap(commands_);
    }
    for (Command& command : left)
      if (auto* const arrive = std::get_if<Arrive>(&command)) ::close(arrive->fd);
  }
  void post(Command command) {
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) return;  // nobody is there for what it says, or for the memory that it brings
      commands_.push_back(std::move(command));
      if (commands_.size() > 1) return;
    }
    wake();
  }

 private:
  void wake() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof one);
  }

  bool open_ring();
  void run();
  void obey(Command& command);
  void work(Link& link);
  void end(Link& link, const std::string& reason);
  void watch(Link& link);
  void ask_again();
  void end_patience();
  void end_stalled();
  int timeout_ms() const;
  Link* find(std::uint64_t link) {
    const auto found = links_.find(link);
    return found == links_.end() ? nullptr : found->second.get();
  }

  std::unique_ptr<ColdReads> cold_;
  Outbox::Spares spares_;
  LinkContext context_;
  std::function<void(std::uint64_t)> forget_;
  int epoll_, wake_;
  std::thread thread_;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;  // of what follows
  std::vector<Command> commands_;
  bool stopped_ = false;

  std::unordered_map<std::uint64_t, std::unique_ptr<Link>> links_;
  std::set<std::uint64_t> wait_for_events_, wait_for_memory_, wait_for_share_, hold_memory_, touched_;
  std::int64_t ask_again_ns_ = 0, end_stalled_ns_ = 0;  // when that is due, or later
};

// In the loop's own thread: the end of a ring interrupts the thread that opened it, whatever that is waiting for then.
bool Loop::open_ring() {
  auto ring = Uring::open(ring_entries);
  if (!ring) return false;
  epoll_event event{EPOLLIN, {.u64 = cold_id}};
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, ring->descriptor(), &event) != 0) return false;
  cold_ = std::make_unique<ColdReads>(std::move(ring));
  context_.cold = cold_.get();
  return true;
}

void Loop::run() {
  epoll_event events[64];
  while (!stop_) {
    const int ready = ::epoll_wait(epoll_, events, 64, timeout_ms());
    for (int i = 0; i < ready; ++i) {
      if (events[i].data.u64 == wake_id) {
        std::uint64_t count = 0;
        [[maybe_unused]] const ssize_t n = ::read(wake_, &count, sizeof count);
        continue;
      }
      if (events[i].data.u64 == cold_id) {
        cold_->take();
        continue;
      }
      Link* const link = find(events[i].data.u64);
      if (link == nullptr) continue;
      const bool gone = (events[i].events & (EPOLLHUP | EPOLLERR)) != 0;
      if (gone && link->pause() != Link::Pause::none) end(*link, "peer closed the connection");
      else work(*link);
    }
    std::vector<Command> commands;
    {
      const std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    for (Command& command : commands) obey(command);
    for (const std::uint64_t id : std::exchange(touched_, {}))
      if (Link* const link = find(id)) work(*link);
    ask_again();
    if (cold_) cold_->submit();
  }
  links_.clear();
  cold_.reset();
}

void Loop::obey(Command& command) {
  if (auto* const arrive = std::get_if<Arrive>(&command)) {
    const std::uint64_t id = arrive->share->id;
    // These may come when this loop is gone.
    const auto granted = [loop = weak_from_this(), id](SharedBuffer buffer) {
      if (const auto there = loop.lock()) there->post(Memory{id, std::move(buffer)});
    };
    const auto fetched = [loop = weak_from_this(), id](const ReadRequest& request) {
      if (const auto there = loop.lock()) there->post(Fetched{id, request});
    };
    Link& link = *links_.emplace(id, std::make_unique<Link>(arrive->fd, std::move(arrive->share), context_, Link::Later{granted, fetched})).first->second;
    link.interest = EPOLLIN;
    epoll_event event{EPOLLIN, {.u64 = id}};
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, link.fd(), &event) != 0) end(link, "the socket cannot be added to epoll");
  } else if (auto* const say = std::get_if<Say>(&command)) {
    Link* const link = find(say->link);
    if (link == nullptr) return;
    link->enqueue(say->frame, std::move(say->data));
    link->share().handed_frames -= 1;  // afterwards: who looks meanwhile counts it twice, rather than not at all
    link->share().handed_bytes -= say->frame.size();
    touched_.insert(say->link);
  } else if (auto* const ending = std::get_if<End>(&command)) {
    if (Link* const link = find(ending->link)) end(*link, ending->reason);
  } else if (auto* const memory = std::get_if<Memory>(&command)) {
    Link* const link = find(memory->link);
    if (link == nullptr) return;
    link->give_memory(std::move(memory->buffer));
    touched_.insert(memory->link);
  } else if (auto* const fetched = std::get_if<Fetched>(&command)) {
    Link* const link = find(fetched->link);
    if (link == nullptr) return;
    link->answer_fetched(fetched->request);
    touched_.insert(fetched->link);
  } else {
    touched_.merge(wait_for_events_);
    wait_for_events_.clear();
  }
}

void Loop::work(Link& link) {
  if (!link.work()) return end(link, link.reason());
  const std::uint64_t id = link.share().id;
  if (link.pause() == Link::Pause::events) wait_for_events_.insert(id);
  if (link.patience_ends_ns()) wait_for_memory_.insert(id);
  else wait_for_memory_.erase(id);
  if (link.pause() == Link::Pause::share) wait_for_share_.insert(id);
  else wait_for_share_.erase(id);
  if (link.ends_ns()) hold_memory_.insert(id);
  else hold_memory_.erase(id);
  watch(link);
}

void Loop::watch(Link& link) {
  const std::uint32_t interest = (link.pause() == Link::Pause::none ? std::uint32_t{EPOLLIN} : 0) | (link.has_to_send() ? std::uint32_t{EPOLLOUT} : 0);
  if (interest == link.interest) return;
  link.interest = interest;
  epoll_event event{interest, {.u64 = link.share().id}};
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, link.fd(), &event);
}

void Loop::end(Link& link, const std::string& reason) {
  const std::uint64_t id = link.share().id;
  wait_for_events_.erase(id);
  wait_for_memory_.erase(id);
  wait_for_share_.erase(id);
  hold_memory_.erase(id);
  forget_(id);
  LostEvent lost{id, reason};
  links_.erase(id);
  --context_.counts.links;
  context_.events.put(std::move(lost));
}

constexpr int patience_step_ms = 20, holding_step_ms = 500;

// What has to be looked at now and then, and not at each turn.
void Loop::ask_again() {
  if (wait_for_memory_.empty() && wait_for_share_.empty() && hold_memory_.empty()) return;
  const std::int64_t now_ns = monotonic_ns();
  if (now_ns >= ask_again_ns_) {
    ask_again_ns_ = now_ns + patience_step_ms * 1'000'000;
    end_patience();
    for (const std::uint64_t id : std::set(wait_for_share_))
      if (Link* const link = find(id)) work(*link);
  }
  if (now_ns >= end_stalled_ns_) {
    end_stalled_ns_ = now_ns + holding_step_ms * 1'000'000;
    end_stalled();
  }
}

void Loop::end_patience() {
  for (const std::uint64_t id : std::set(wait_for_memory_)) {
    Link* const link = find(id);
    if (link == nullptr || !link->patience_ends_ns() || monotonic_ns() < *link->patience_ends_ns()) continue;
    link->end_patience();
    work(*link);
  }
}

void Loop::end_stalled() {
  for (const std::uint64_t id : std::set(hold_memory_)) {
    Link* const link = find(id);
    const std::int64_t now_ns = monotonic_ns();
    if (link == nullptr || !link->ends_ns() || now_ns < *link->ends_ns()) continue;
    ++context_.counts.stalled;
    end(*link, link->stall_reason(now_ns));
  }
}

int Loop::timeout_ms() const {
  if (!wait_for_memory_.empty() || !wait_for_share_.empty() || (cold_ && cold_->queued())) return patience_step_ms;
  return hold_memory_.empty() ? -1 : holding_step_ms;
}

}  // namespace

struct ChunkServer::State {
  struct Known {
    std::shared_ptr<LinkShare> share;
    std::shared_ptr<Loop> loop;
  };

  std::shared_ptr<EventQueue> events;
  std::shared_ptr<BufferPool> pool;
  ServerCounts counts;
  SharedTable table{std::make_shared<const ReadTable>()};
  std::vector<std::shared_ptr<Loop>> loops;
  ColdBy cold_by = ColdBy::threads;
  std::mutex mutex;  // of what follows
  std::unordered_map<std::uint64_t, Known> links;
  std::unordered_map<std::string, std::weak_ptr<BufferAccount>> owners;
  std::uint64_t last = 0;
  bool closed = false;

  std::optional<Known> find(std::uint64_t link) {
    const std::lock_guard lock(mutex);
    const auto found = links.find(link);
    return found == links.end() ? std::nullopt : std::optional(found->second);
  }

  // With the lock.
  BufferPool::Account account_of(const std::string& owner) {
    if (owner.empty()) return BufferPool::new_owner();
    if (owners.size() > 2 * links.size() + 64) std::erase_if(owners, [](const auto& one) { return one.second.expired(); });
    std::weak_ptr<BufferAccount>& known = owners[owner];
    auto account = known.lock();
    if (!account) known = account = BufferPool::new_owner();
    return account;
  }
};

ChunkServer::ChunkServer(int threads, std::shared_ptr<EventQueue> events, std::shared_ptr<BufferPool> pool, LinkPatience patience, ColdBy cold_by)
    : state_(std::make_shared<State>()) {
  State& s = *state_;
  s.events = std::move(events);
  s.pool = std::move(pool);
  const auto forget = [&s](std::uint64_t link) {
    const std::lock_guard lock(s.mutex);
    s.links.erase(link);
  };
  for (int i = 0; i < threads; ++i) s.loops.push_back(std::make_shared<Loop>(LinkContext{s.table, *s.events, *s.pool, s.counts, patience}, forget));
  s.events->on_room([weak = std::weak_ptr(state_)] {
    if (const auto state = weak.lock())
      for (const auto& loop : state->loops) loop->post(HasRoom{});
  });
  s.cold_by = cold_by;
  for (const auto& loop : s.loops)
    if (loop->start(cold_by) == ColdBy::threads) s.cold_by = ColdBy::threads;
}

ChunkServer::~ChunkServer() { close(); }

void ChunkServer::close() {
  State& s = *state_;
  {
    const std::lock_guard lock(s.mutex);
    if (std::exchange(s.closed, true)) return;
  }
  for (const auto& loop : s.loops) loop->stop();
  const std::lock_guard lock(s.mutex);
  s.links.clear();
  s.counts.links = 0;
  s.table.store(std::make_shared<const ReadTable>());
}

void ChunkServer::publish(const std::vector<PublishedChain>& chains) {
  auto table = std::make_shared<ReadTable>();
  for (const PublishedChain& chain : chains) (*table)[chain.chain] = chain;
  state_->table.store(std::move(table));
}

std::uint64_t ChunkServer::connect(int fd, bool reads, bool trusted, const std::string& owner) {
  State& s = *state_;
  prepare_stream(fd);
  const std::lock_guard lock(s.mutex);
  if (s.closed) {
    ::close(fd);
    throw std::invalid_argument("the native storage node is closed");
  }
  const std::uint64_t id = ++s.last;
  const auto& loop = s.loops[id % s.loops.size()];
  const auto share = std::make_shared<LinkShare>(id, reads, s.account_of(owner));
  if (trusted) share->rights.trust();
  s.links[id] = {share, loop};
  ++s.counts.links;
  loop->post(Arrive{fd, share});
  return id;
}

void ChunkServer::disconnect(std::uint64_t link) {
  if (const auto known = state_->find(link)) known->loop->post(End{link, "connection closed by this node"});
}

void ChunkServer::grant(std::uint64_t link, std::uint64_t file_from, std::uint64_t file_to, std::int64_t until_ns) {
  if (const auto known = state_->find(link)) known->share->rights.grant(file_from, file_to, until_ns);
}

void ChunkServer::trust(std::uint64_t link) {
  if (const auto known = state_->find(link)) known->share->rights.trust();
}

void ChunkServer::send(std::uint64_t link, const std::string& body, SharedBuffer data) {
  const auto known = state_->find(link);
  if (!known) return;
  LinkShare& share = *known->share;
  auto frame = message_frame(body, data ? data->bytes().size() : 0);
  const bool full = share.handed_frames + share.waiting_pieces >= max_waiting_frames || share.handed_bytes + share.waiting_bytes + frame.size() > max_waiting_bytes;
  if (full) return known->loop->post(End{link, "peer does not read what is sent to it"});
  share.handed_frames += 1;
  share.handed_bytes += frame.size();
  known->loop->post(Say{link, std::move(frame), std::move(data)});
}

ColdBy ChunkServer::cold_by() const { return state_->cold_by; }

ServerStats ChunkServer::stats() const {
  const ServerCounts& c = state_->counts;
  return {c.links, c.reads, c.fetched, c.read_bytes, c.refused, c.messages, c.dropped, c.held_back, c.stalled};
}

}  // namespace ff
