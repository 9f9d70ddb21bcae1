// Memory for the data of messages: page-aligned, bounded in all, used again. Who finds none stands in line. What is held
// elsewhere for a peer, as replies that it does not read, is reserved here, so that one bound holds for both.
//
// Accounts are of owners, whatever number of links they have. Those of share `half` get more while they have less than is
// free of that half; an empty one gets what there is. So no owner has all, and none needs to know of the others.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "fireflyer/storage/engine/disk.hpp"

namespace ff {

class BufferPool;
class BufferAccount;

// Goes back to its pool when the last one who shares it is through.
class Buffer {
 public:
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  MutableBytes bytes() const { return {memory_, size_}; }

 private:
  friend class BufferPool;
  Buffer(std::shared_ptr<BufferPool> pool, std::shared_ptr<BufferAccount> account, std::byte* memory, std::size_t size, std::size_t taken)
      : pool_(std::move(pool)), account_(std::move(account)), memory_(memory), size_(size), taken_(taken) {}
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<BufferAccount> account_;
  std::byte* memory_;
  std::size_t size_, taken_;
};

using SharedBuffer = std::shared_ptr<Buffer>;

// Thread-safe.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Who only brings work in gets half, so that there is always memory for those who carry it on.
  enum class Share {
    half,
    all
  };
  using Granted = std::function<void(SharedBuffer)>;
  using Account = std::shared_ptr<BufferAccount>;

  static std::shared_ptr<BufferPool> create(std::size_t limit_bytes);
  ~BufferPool();

  const Account& services() const;  // of this node and its peers: share `all`
  static Account new_owner();       // share `half`; of one pool only

  std::size_t most_bytes(Share share) const;  // more than this can never be had at once
  // Nullptr: there is none now, and `granted` is called when there is, by the thread that gives it back; `place` names
  // the request. Those for `all` first, in the order of requests; then the others in order, except that who has more
  // than a fair share does not hold up those behind it.
  SharedBuffer take(std::size_t bytes, const Account& account, Granted granted, std::uint64_t& place);
  void cancel(std::uint64_t place);  // `granted` may be under way nevertheless
  SharedBuffer take_within(std::size_t bytes, const Account& account, std::chrono::nanoseconds patience);  // nullptr: there was none
  // For what is not a buffer, and small: not behind those of share `half` who wait. False: not now, and nobody calls.
  bool reserve(std::size_t bytes, BufferAccount& account);
  void unreserve(std::size_t bytes, BufferAccount& account);
  std::size_t used_bytes() const;  // what is reserved, too

 private:
  friend class Buffer;
  explicit BufferPool(std::size_t limit_bytes);
  void give_back(std::byte* memory, std::size_t taken, BufferAccount& account);
  SharedBuffer buffer(std::size_t bytes, const Account& account);
  std::vector<std::pair<Granted, SharedBuffer>> next_grants();
  void tidy_lines();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ff
