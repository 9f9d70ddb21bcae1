#include "fireflyer/storage/server/events.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ff {
namespace {

constexpr std::size_t max_events = 8192, max_waiting_body_bytes = std::size_t{32} << 20;

std::size_t body_bytes_of(const NodeEvent& event) {
  const auto* const message = std::get_if<MessageEvent>(&event);
  return message == nullptr ? 0 : message->body.size();
}

}  // namespace

EventQueue::EventQueue() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor_ < 0) throw DiskError(errno, "cannot make an event descriptor");
}

EventQueue::~EventQueue() { ::close(descriptor_); }

void EventQueue::on_room(std::function<void()> call) {
  const std::lock_guard lock(mutex_);
  on_room_ = std::move(call);
}

std::size_t EventQueue::size() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

void EventQueue::put(NodeEvent event) {
  const std::lock_guard lock(mutex_);
  body_bytes_ += body_bytes_of(event);
  events_.push_back(std::move(event));
  full_ = events_.size() >= max_events || body_bytes_ >= max_waiting_body_bytes;
  if (events_.size() > 1) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(descriptor_, &one, sizeof one);
}

std::vector<NodeEvent> EventQueue::take(std::size_t limit) {
  std::vector<NodeEvent> taken;
  std::function<void()> call;
  {
    const std::lock_guard lock(mutex_);
    while (!events_.empty() && taken.size() < limit) {
      body_bytes_ -= body_bytes_of(events_.front());
      taken.push_back(std::move(events_.front()));
      events_.pop_front();
    }
    if (events_.empty()) {
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t n = ::read(descriptor_, &count, sizeof count);
    }
    if (full_ && events_.size() <= max_events / 2 && body_bytes_ <= max_waiting_body_bytes / 2) {
      full_ = false;
      call = on_room_;
    }
  }
  if (call) call();
  return taken;
}

}  // namespace ff
