#include "fireflyer/collectives/p2p/exchange.hpp"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "fireflyer/base/clock.hpp"
#include "fireflyer/base/placement.hpp"
#include "fireflyer/collectives/group/work.hpp"
#include "link.hpp"

namespace ff {
namespace {

constexpr std::int64_t ms = 1'000'000;
constexpr std::int64_t poll_period_ns = 50 * ms;      // how often a thread with pending messages looks for failures
constexpr std::int64_t farewell_ns = 200 * ms;   // for last words to be delivered
constexpr std::size_t max_pending = 4096;        // calls of send and receive
constexpr std::size_t max_links = 4;             // with one peer: at most one that each of the two has made, and one being replaced

}  // namespace

Exchange::Exchange(const Group& group, const Window& window, int leader_fd, Recorder* recorder, std::vector<int> cpus, bool reads_memory)
    : group_(group), window_(window), leader_fd_(leader_fd), recorder_(recorder), cpus_(std::move(cpus)), reads_memory_(reads_memory), local_(group.local_index(group.rank)),
      period_ns_(std::clamp<std::int64_t>(group.timeout_ns / 8, ms, 1000 * ms)) {
  if (getrandom(&token_, sizeof token_, 0) != sizeof token_) throw std::system_error(errno, std::generic_category(), "cannot get random bytes");
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "cannot make an eventfd");
}

Exchange::~Exchange() { close(); }

void Exchange::link(int rank, int fd) {
  auto fresh = std::make_unique<ExchangeLink>(rank, fd);
  check_rank(rank);
  const std::lock_guard lock(mutex_);
  if (closing_) throw std::logic_error("the communicator is closed");
  Peer& peer = peers_[rank];
  if (peer.links.size() >= max_links) throw std::length_error("a rank connects too often");
  ExchangeLink& added = *fresh;
  peer.links.push_back(std::move(fresh));
  greet(added);
  if (!peer.out) peer.out = &added;
  std::deque<Flow*> unsent;
  unsent.swap(peer.unsent);
  for (Flow* flow : unsent) announce(peer, *flow);
  flush(added);
  start();
  wake();
}

bool Exchange::linked(int rank) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(rank);
  return found != peers_.end() && !found->second.links.empty();
}

std::shared_ptr<Work> Exchange::send(int to, const void* data, std::uint64_t bytes, DType dtype, std::int32_t tag) {
  return post(true, to, static_cast<char*>(const_cast<void*>(data)), bytes, dtype, tag);
}

std::shared_ptr<Work> Exchange::receive(int from, void* data, std::uint64_t bytes, DType dtype, std::int32_t tag) {
  return post(false, from, static_cast<char*>(data), bytes, dtype, tag);
}

void Exchange::check_rank(int rank) const {
  if (rank < 0 || rank >= group_.world_size() || rank == group_.rank) throw std::invalid_argument("no other rank of the group");
}

void Exchange::check_open() {
  if (closing_) throw std::logic_error("the communicator is closed");
  if (!failing_ && window_.failed()) failing_ = true;
}

std::shared_ptr<Work> Exchange::post(bool sends, int rank, char* data, std::uint64_t bytes, DType dtype, std::int32_t tag) {
  const bool from_any = !sends && rank == any_rank;
  if (!from_any) check_rank(rank);
  auto work = std::make_shared<Work>();
  const std::lock_guard lock(mutex_);
  check_open();
  if (pending_ >= max_pending) throw std::length_error("too many operations are pending");
  auto flow = std::make_unique<Flow>();
  flow->rank = rank;
  flow->sends = sends;
  flow->from_any = from_any;
  if (!sends) flow->order = receives_++;
  flow->op.kind = point_to_point;
  flow->op.seq = from_any ? any_receives_++ : sends ? peers_[rank].sent++
                                                    : peers_[rank].received++;
  flow->number = flow->op.seq;
  flow->op.count = bytes / dtype_size(dtype);
  flow->op.dtype = dtype;
  flow->op.root = tag;
  flow->data = data;
  flow->bytes = bytes;
  flow->work = work;
  flow->left = std::make_shared<std::size_t>(1);
  if (recorder_ != nullptr) {
    const std::int64_t now_ns = monotonic_ns();
    flow->entry = recorder_->begin(sends ? Direction::send : Direction::receive, rank, tag, flow->op.seq, flow->op.count, dtype, bytes, now_ns);
    if (!failing_) flow->entry.started(now_ns);
  }
  add(std::move(flow));
  settle();
  return work;
}

std::shared_ptr<Work> Exchange::start(const OpDescriptor& op, const std::vector<Part>& out, const std::vector<Part>& in) {
  auto work = std::make_shared<Work>();
  auto left = std::make_shared<std::size_t>(out.size() + in.size() + 1);
  for (const auto* parts : {&out, &in}) {
    for (const Part& part : *parts) check_rank(part.rank);
  }
  const std::lock_guard lock(mutex_);
  check_open();
  current_ = op;
  const auto begin = [&](bool sends, const Part& part) {
    auto flow = std::make_unique<Flow>();
    flow->rank = part.rank;
    flow->sends = sends;
    flow->op = op;
    flow->data = part.data;
    flow->bytes = part.bytes;
    flow->work = work;
    flow->left = left;
    add(std::move(flow));
  };
  for (const Part& part : in) begin(false, part);
  for (const Part& part : out) begin(true, part);
  for (auto& [rank, peer] : peers_) {  // a part that came before, and that this call does not take
    const auto stray = peer.unexpected.find(Key{true, op.seq});
    if (failing_ || stray == peer.unexpected.end() || peer.receives.count(Key{true, op.seq}) != 0) continue;
    Flow expected;
    expected.rank = rank;
    expected.op = op;
    fits(expected, stray->second.header);
  }
  if (--*left == 0) work->finish(Failure{});
  settle();
  return work;
}

void Exchange::add(std::unique_ptr<Flow> flow) {
  Flow& added = *flow;
  const std::int64_t now_ns = monotonic_ns();
  if (!failing_) start();  // may throw: before anything is remembered
  added.moved_ns = now_ns;
  if (pending_++ == 0) next_poll_ns_ = looked_ns_ = now_ns;
  activity_ns_ = now_ns;
  const int rank = added.rank;
  Flows& flows = rank == any_rank ? any_ : added.sends ? peers_[rank].sends
                                                       : peers_[rank].receives;
  flows[key_of(added)] = std::move(flow);
  if (failing_) return;
  if (rank == any_rank) {
    match_message(added);
    return wake();
  }
  Peer& peer = peers_[rank];
  if (added.sends) {
    announce(peer, added);
    if (ExchangeLink* out = peer.out) flush(*out);
  } else if (added.op.kind == point_to_point) {
    match_message(added);
  } else {
    match_part(peer, added);
  }
  const bool stuck = std::any_of(peer.links.begin(), peer.links.end(), [](const auto& link) { return link->pending(); });
  if (stuck || !pulls_.empty() || (asleep_ && pending_ > 0)) wake();
}

void Exchange::announce(Peer& peer, Flow& flow) {
  if (!peer.out) {
    peer.unsent.push_back(&flow);
    return;
  }
  const bool whole = flow.bytes < offer_bytes && flow.bytes + message_cost <= peer.credit;
  OutFrame frame;
  frame.header = header_for(whole ? ExchangeFrame::message : ExchangeFrame::offer, flow);
  if (whole) {
    peer.credit -= flow.bytes + message_cost;
    frame.header.size = static_cast<std::uint32_t>(flow.bytes);
    frame.data = flow.data;
    frame.flow = &flow;
  } else if (peer.out->local && reads_memory_) {
    frame.header.place = reinterpret_cast<std::uintptr_t>(flow.data);
  }
  flow.offered = !whole;
  flow.link = peer.out;
  peer.out->push(std::move(frame));
}

std::vector<Exchange::Flows*> Exchange::all_flows() {
  std::vector<Flows*> all{&any_};
  for (auto& [rank, peer] : peers_) all.insert(all.end(), {&peer.sends, &peer.receives});
  return all;
}

// Ends everything that is pending once a failure is known. Nothing of a caller's memory is used after that.
void Exchange::settle() {
  if (!failing_) return;
  const Failure failure = window_.failure();
  std::vector<std::shared_ptr<Work>> broken;
  for (Flows* flows : all_flows()) {
    for (auto& [key, flow] : *flows) {
      flow->entry.finish(failure.kind, monotonic_ns());
      broken.push_back(flow->work);
    }
    flows->clear();
  }
  for (auto& [rank, peer] : peers_) {
    peer.unsent.clear();
    peer.unexpected.clear();
    peer.waiting.clear();
    peer.posted.clear();
    peer.met.clear();
    peer.watched_send = peer.watched_receive = nullptr;
    for (auto& link : peer.links) {
      link->out.clear();
      link->streams.clear();
      link->mute = true;  // a frame may be half written
    }
  }
  any_posted_.clear();
  watched_any_ = nullptr;
  pulls_.clear();
  pending_ = 0;
  for (const auto& work : broken) work->finish(failure);
  drained_.notify_all();
}

void Exchange::give_credit(Peer& peer, std::uint64_t bytes) {
  peer.owed += bytes;
  if (peer.owed < credit_bytes / 4 || !peer.out) return;
  ExchangeHeader header = make_exchange_header(ExchangeFrame::credit, OpDescriptor{}, 0);
  header.place = peer.owed;
  peer.used -= peer.owed;
  peer.owed = 0;
  peer.out->push(OutFrame{header, {}, nullptr, nullptr});
  flush(*peer.out);
}

void Exchange::fail(int culprit, const std::string& text) {
  for (const std::int64_t until_ns = monotonic_ns() + grace_ns; !window_.failed() && monotonic_ns() < until_ns;) poll(nullptr, 0, 1);
  const std::lock_guard lock(mutex_);
  fail_with(FailureKind::peer_failed, culprit, current_ ? current_->seq : 0, text);
  settle();
}

void Exchange::fail_with(FailureKind kind, int culprit, std::uint64_t seq, const std::string& text) {
  window_.fail(Failure{kind, culprit, seq, text});
  failing_ = window_.failed();
}

std::uint64_t Exchange::moved_bytes() {
  const std::lock_guard lock(mutex_);
  return moved_bytes_;
}

void Exchange::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(wake_fd_, &one, sizeof one);  // full means that it is awake
}

void Exchange::close() {
  const std::lock_guard closing(close_mutex_);
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    closing_ = true;
    drained_.wait(lock, [this] { return pending_ == 0; });  // ends: nothing may stand still for longer than the timeout
    closed_ = stop_ = true;
    wake();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  farewell();
  shut_descriptors();
}

void Exchange::abandon() {
  closing_ = closed_ = stop_ = true;  // no lock: whoever held it at the fork is not here to give it back
  shut_descriptors();
}

void Exchange::shut_descriptors() {
  for (auto& [rank, peer] : peers_) {
    for (auto& link : peer.links) link->shut();
  }
  const int waking = std::exchange(wake_fd_, -1);  // forgotten first, as the executor's are
  if (waking >= 0) ::close(waking);
}

// Last words are lost where a connection is closed over data that nobody read; so they are seen out first.
void Exchange::farewell() {
  std::vector<ExchangeLink*> open;
  for (auto& [rank, peer] : peers_) {
    for (auto& link : peer.links) {
      if (link->broken) continue;
      link->push(OutFrame{make_exchange_header(ExchangeFrame::goodbye, OpDescriptor{}, 0), {}, nullptr, nullptr});
      open.push_back(link.get());
    }
  }
  const std::int64_t until_ns = monotonic_ns() + farewell_ns;
  for (bool delivered = false; !delivered && monotonic_ns() < until_ns;) {
    delivered = true;
    for (ExchangeLink* link : open) {
      if (!failing_) flush(*link);
      const bool unsent = !link->mute && link->pending();
      if (!unsent) shutdown(link->fd, SHUT_WR);
      int waiting = 0;
      if (unsent || (!link->local && ioctl(link->fd, SIOCOUTQ, &waiting) == 0 && waiting > 1)) delivered = false;
      char rest[4096];
      while (recv(link->fd, rest, sizeof rest, MSG_DONTWAIT) > 0) {
      }
    }
    if (!delivered) poll(nullptr, 0, 1);
  }
}

void Exchange::start() {
  if (thread_.joinable()) return;
  thread_ = std::thread([this] { loop(); });
  place_thread(thread_, "ff-exchange", cpus_);  // refused as the executor's was, who has said so
}

void Exchange::loop() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    try {
      if (pending_ > 0 && window_.failed()) failing_ = true;
      settle();
      pull();
      sleep(lock);
      const std::int64_t now_ns = monotonic_ns();
      if (pending_ == 0 || now_ns < next_poll_ns_ || failing_) continue;
      next_poll_ns_ = now_ns + poll_period_ns;
      watch(now_ns);
    } catch (const std::exception& error) {  // memory, at worst: the others must not wait for this rank
      fail_with(FailureKind::peer_failed, group_.rank, 0, "the exchange thread of " + group_.label(group_.rank) + " failed: " + error.what());
    }
  }
}

void Exchange::sleep(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> entries{{wake_fd_, POLLIN, 0}};
  std::vector<ExchangeLink*> links;
  for (auto& [rank, peer] : peers_) {
    for (auto& link : peer.links) {
      if (link->broken || failing_) continue;
      links.push_back(link.get());
      entries.push_back({link->fd, static_cast<short>(POLLIN | (link->pending() && !link->mute ? POLLOUT : 0)), 0});
    }
  }
  std::int64_t limit_ns = -1;
  if (pending_ > 0) limit_ns = pulls_.empty() ? std::clamp<std::int64_t>(next_poll_ns_ - monotonic_ns(), 0, poll_period_ns) : 0;
  const timespec limit{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  asleep_ = limit_ns < 0;
  lock.unlock();
  const int ready = ppoll(entries.data(), entries.size(), limit_ns < 0 ? nullptr : &limit, nullptr);
  lock.lock();
  asleep_ = false;
  if (ready <= 0) return;
  if (entries[0].revents != 0) {
    std::uint64_t rings = 0;
    [[maybe_unused]] const auto got = ::read(wake_fd_, &rings, sizeof rings);
  }
  for (std::size_t i = 0; i < links.size() && !failing_; ++i) {
    const short events = entries[i + 1].revents;
    if ((events & ~POLLOUT) != 0) read(*links[i]);
    if ((events & POLLOUT) != 0 && !failing_) flush(*links[i]);
  }
}

ExchangeHeader header_for(ExchangeFrame type, const Flow& flow) {
  ExchangeHeader header = make_exchange_header(type, flow.op, flow.bytes);
  if (flow.op.kind == point_to_point) header.number = flow.number;
  return header;
}

std::string call_text(const Flow& flow) {
  const std::string peer = flow.from_any ? "any rank" : "rank " + std::to_string(flow.rank);
  const std::string what = std::string(flow.sends ? "send #" : "recv #") + std::to_string(flow.op.seq) + (flow.sends ? " to " : " from ") + peer;
  return what + " (" + std::to_string(flow.op.count) + " " + dtype_name(flow.op.dtype) + ", tag " + std::to_string(flow.op.root) + ")";
}

}  // namespace ff
