#include "fireflyer/storage/server/buffers.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace ff {
namespace {

constexpr std::size_t page_bytes = 4096;

// At most a quarter more than what is asked for, so that memory that was given back fits the next one.
std::size_t rounded(std::size_t bytes) {
  const std::size_t unit = std::max(page_bytes, std::bit_floor(std::max<std::size_t>(bytes, 1)) / 4);
  return std::max<std::size_t>(1, (bytes + unit - 1) / unit) * unit;
}

}  // namespace

struct BufferPool::State {
  using Grant = std::pair<Granted, SharedBuffer>;
  struct Waiting {
    std::uint64_t place;
    std::size_t bytes;
    Granted granted;
  };

  explicit State(std::size_t limit) : limit_bytes(limit) {}

  const std::size_t limit_bytes;
  std::mutex mutex;
  std::size_t used_bytes = 0, kept_bytes = 0;
  std::map<std::size_t, std::vector<std::byte*>> kept;  // by size
  std::array<std::deque<Waiting>, 2> lines;             // by Share
  std::uint64_t last_place = 0;

  std::deque<Waiting>& line(Share share) { return lines[static_cast<std::size_t>(share)]; }
  std::size_t most(Share share) const { return share == Share::all ? limit_bytes : limit_bytes / 2; }
  bool fits(std::size_t bytes, Share share) const { return used_bytes + rounded(bytes) <= most(share); }

  void drop_one_kept() {
    const auto largest = std::prev(kept.end());
    std::free(largest->second.back());
    largest->second.pop_back();
    kept_bytes -= largest->first;
    if (largest->second.empty()) kept.erase(largest);
  }

  // With the lock, after `fits`.
  std::byte* memory(std::size_t taken) {
    if (const auto found = kept.find(taken); found != kept.end()) {
      std::byte* const memory = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) kept.erase(found);
      kept_bytes -= taken;
      used_bytes += taken;
      return memory;
    }
    while (kept_bytes > 0 && used_bytes + kept_bytes + taken > limit_bytes) drop_one_kept();
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(page_bytes, taken));
    if (memory == nullptr) throw std::bad_alloc();
    used_bytes += taken;
    return memory;
  }
};

Buffer::~Buffer() { pool_->give_back(memory_, taken_); }

BufferPool::BufferPool(std::size_t limit_bytes) : state_(std::make_unique<State>(limit_bytes)) {}

std::shared_ptr<BufferPool> BufferPool::create(std::size_t limit_bytes) { return std::shared_ptr<BufferPool>(new BufferPool(limit_bytes)); }

BufferPool::~BufferPool() {
  while (!state_->kept.empty()) state_->drop_one_kept();
}

std::size_t BufferPool::most_bytes(Share share) const { return state_->most(share); }

std::size_t BufferPool::used_bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->used_bytes;
}

SharedBuffer BufferPool::buffer(std::size_t bytes) {
  return SharedBuffer(new Buffer(shared_from_this(), state_->memory(rounded(bytes)), bytes, rounded(bytes)));
}

SharedBuffer BufferPool::take(std::size_t bytes, Share share, Granted granted, std::uint64_t& place) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  const bool first = s.line(Share::all).empty() && (share == Share::all || s.line(share).empty());
  if (first && s.fits(bytes, share)) return buffer(bytes);
  place = ++s.last_place;
  s.line(share).push_back({place, bytes, std::move(granted)});
  return nullptr;
}

// With the lock; the calls are made without it.
std::vector<std::pair<BufferPool::Granted, SharedBuffer>> BufferPool::next_grants() {
  State& s = *state_;
  std::vector<State::Grant> grants;
  for (const Share share : {Share::all, Share::half}) {
    auto& line = s.line(share);
    while (!line.empty() && s.fits(line.front().bytes, share)) {
      grants.emplace_back(std::move(line.front().granted), buffer(line.front().bytes));
      line.pop_front();
    }
    if (!line.empty()) break;
  }
  return grants;
}

void BufferPool::cancel(std::uint64_t place) {
  std::vector<State::Grant> grants;
  {
    const std::lock_guard lock(state_->mutex);
    for (auto& line : state_->lines) std::erase_if(line, [place](const State::Waiting& waiting) { return waiting.place == place; });
    grants = next_grants();
  }
  for (auto& [granted, buffer] : grants) granted(std::move(buffer));
}

SharedBuffer BufferPool::take_within(std::size_t bytes, Share share, std::chrono::nanoseconds patience) {
  struct Grant {
    std::mutex mutex;
    std::condition_variable told;
    SharedBuffer buffer;
  };
  const auto grant = std::make_shared<Grant>();
  std::uint64_t place = 0;
  const auto granted = [grant](SharedBuffer buffer) {
    const std::lock_guard lock(grant->mutex);
    grant->buffer = std::move(buffer);
    grant->told.notify_one();
  };
  if (SharedBuffer buffer = take(bytes, share, granted, place)) return buffer;
  std::unique_lock lock(grant->mutex);
  if (!grant->told.wait_for(lock, patience, [&] { return grant->buffer != nullptr; })) {
    lock.unlock();
    cancel(place);
    lock.lock();
  }
  return std::move(grant->buffer);
}

void BufferPool::give_back(std::byte* memory, std::size_t taken) {
  State& s = *state_;
  std::vector<State::Grant> grants;
  {
    const std::lock_guard lock(s.mutex);
    s.used_bytes -= taken;
    s.kept[taken].push_back(memory);
    s.kept_bytes += taken;
    grants = next_grants();
    while (s.kept_bytes > s.limit_bytes / 4) s.drop_one_kept();
  }
  for (auto& [granted, buffer] : grants) granted(std::move(buffer));
}

}  // namespace ff
