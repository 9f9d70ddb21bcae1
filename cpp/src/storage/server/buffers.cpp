#include "fireflyer/storage/server/buffers.hpp"

#include <algorithm>
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

// Its fields are guarded by the pool's mutex.
class BufferAccount {
 public:
  explicit BufferAccount(BufferPool::Share share_given) : share(share_given) {}
  const BufferPool::Share share;
  std::size_t used_bytes = 0;
};

struct BufferPool::State {
  using Grant = std::pair<Granted, SharedBuffer>;
  struct Waiting {
    std::uint64_t place;
    std::size_t bytes;
    Account account;
    Granted granted;
  };
  using Line = std::deque<Waiting>;

  explicit State(std::size_t limit) : limit_bytes(limit) {}

  const std::size_t limit_bytes;
  const Account services = std::make_shared<BufferAccount>(Share::all);
  std::mutex mutex;
  std::size_t used_bytes = 0, kept_bytes = 0;
  std::map<std::size_t, std::vector<std::byte*>> kept;  // by size
  Line peers;                                           // of share `all`
  std::map<BufferAccount*, Line> owners;                // the others; no line is empty
  std::uint64_t last_place = 0;

  std::size_t most(Share share) const { return share == Share::all ? limit_bytes : limit_bytes / 2; }
  bool fits(std::size_t taken, const BufferAccount& account) const {
    const std::size_t limit = most(account.share);
    if (used_bytes + taken > limit) return false;
    return account.share == Share::all || account.used_bytes == 0 || account.used_bytes + taken <= limit - used_bytes;
  }
  // Nobody who was there before has to be asked.
  bool is_first(BufferAccount& account) const {
    if (!peers.empty()) return false;
    if (account.share == Share::all) return true;
    return !owners.contains(&account) && std::none_of(owners.begin(), owners.end(), [](const auto& owner) { return owner.first->used_bytes == 0; });
  }
  std::vector<Line*> lines_in_order() {
    std::vector<Line*> lines;
    for (auto& [account, line] : owners) lines.push_back(&line);
    std::sort(lines.begin(), lines.end(), [](const Line* one, const Line* other) { return one->front().place < other->front().place; });
    return lines;
  }

  void use(std::size_t taken, BufferAccount& account) {
    while (kept_bytes > 0 && used_bytes + kept_bytes + taken > limit_bytes) drop_one_kept();
    used_bytes += taken;
    account.used_bytes += taken;
  }

  void drop_one_kept() {
    const auto largest = std::prev(kept.end());
    std::free(largest->second.back());
    largest->second.pop_back();
    kept_bytes -= largest->first;
    if (largest->second.empty()) kept.erase(largest);
  }

  // With the lock, after `fits`.
  std::byte* memory(std::size_t taken, BufferAccount& account) {
    if (const auto found = kept.find(taken); found != kept.end()) {
      std::byte* const memory = found->second.back();
      found->second.pop_back();
      if (found->second.empty()) kept.erase(found);
      kept_bytes -= taken;
      use(taken, account);
      return memory;
    }
    while (kept_bytes > 0 && used_bytes + kept_bytes + taken > limit_bytes) drop_one_kept();
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(page_bytes, taken));
    if (memory == nullptr) throw std::bad_alloc();
    use(taken, account);
    return memory;
  }
};

Buffer::~Buffer() { pool_->give_back(memory_, taken_, *account_); }

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

const BufferPool::Account& BufferPool::services() const { return state_->services; }

BufferPool::Account BufferPool::new_owner() { return std::make_shared<BufferAccount>(Share::half); }

SharedBuffer BufferPool::buffer(std::size_t bytes, const Account& account) {
  const std::size_t taken = rounded(bytes);
  return SharedBuffer(new Buffer(shared_from_this(), account, state_->memory(taken, *account), bytes, taken));
}

SharedBuffer BufferPool::take(std::size_t bytes, const Account& account, Granted granted, std::uint64_t& place) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  if (s.is_first(*account) && s.fits(rounded(bytes), *account)) return buffer(bytes, account);
  place = ++s.last_place;
  State::Line& line = account->share == Share::all ? s.peers : s.owners[account.get()];
  line.push_back({place, bytes, account, std::move(granted)});
  return nullptr;
}

bool BufferPool::reserve(std::size_t bytes, BufferAccount& account) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  if (!s.peers.empty() || !s.fits(bytes, account)) return false;
  s.use(bytes, account);
  return true;
}

void BufferPool::unreserve(std::size_t bytes, BufferAccount& account) {
  State& s = *state_;
  std::vector<State::Grant> grants;
  {
    const std::lock_guard lock(s.mutex);
    s.used_bytes -= bytes;
    account.used_bytes -= bytes;
    grants = next_grants();
  }
  for (auto& [granted, buffer] : grants) granted(std::move(buffer));
}

// With the lock; the calls are made without it.
std::vector<std::pair<BufferPool::Granted, SharedBuffer>> BufferPool::next_grants() {
  State& s = *state_;
  std::vector<State::Grant> grants;
  const auto grant_first = [&](State::Line& line) {
    State::Waiting& first = line.front();
    if (!s.fits(rounded(first.bytes), *first.account)) return false;
    grants.emplace_back(std::move(first.granted), buffer(first.bytes, first.account));
    line.pop_front();
    return true;
  };
  while (!s.peers.empty())
    if (!grant_first(s.peers)) return grants;
  // One of each owner, in turns. Who has nothing yet, and finds too little, is waited for.
  for (bool again = !s.owners.empty(); again;) {
    again = false;
    for (State::Line* const line : s.lines_in_order()) {
      if (grant_first(*line)) again = true;
      else if (line->front().account->used_bytes == 0) return tidy_lines(), grants;
    }
    tidy_lines();
  }
  return grants;
}

void BufferPool::tidy_lines() {
  std::erase_if(state_->owners, [](const auto& owner) { return owner.second.empty(); });
}

void BufferPool::cancel(std::uint64_t place) {
  State& s = *state_;
  std::vector<State::Grant> grants;
  {
    const std::lock_guard lock(s.mutex);
    const auto is_it = [place](const State::Waiting& waiting) { return waiting.place == place; };
    std::erase_if(s.peers, is_it);
    for (auto& [account, line] : s.owners) std::erase_if(line, is_it);
    tidy_lines();
    grants = next_grants();
  }
  for (auto& [granted, buffer] : grants) granted(std::move(buffer));
}

SharedBuffer BufferPool::take_within(std::size_t bytes, const Account& account, std::chrono::nanoseconds patience) {
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
  if (SharedBuffer buffer = take(bytes, account, granted, place)) return buffer;
  std::unique_lock lock(grant->mutex);
  if (!grant->told.wait_for(lock, patience, [&] { return grant->buffer != nullptr; })) {
    lock.unlock();
    cancel(place);
    lock.lock();
  }
  return std::move(grant->buffer);
}

void BufferPool::give_back(std::byte* memory, std::size_t taken, BufferAccount& account) {
  State& s = *state_;
  std::vector<State::Grant> grants;
  {
    const std::lock_guard lock(s.mutex);
    s.used_bytes -= taken;
    account.used_bytes -= taken;
    s.kept[taken].push_back(memory);
    s.kept_bytes += taken;
    grants = next_grants();
    while (s.kept_bytes > s.limit_bytes / 4) s.drop_one_kept();
  }
  for (auto& [granted, buffer] : grants) granted(std::move(buffer));
}

}  // namespace ff
