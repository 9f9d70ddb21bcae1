// Memory for the data of messages: page-aligned, bounded in all, used again. Who finds none stands in line.
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

// Goes back to its pool when the last one who shares it is through.
class Buffer {
 public:
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  MutableBytes bytes() const { return {memory_, size_}; }

 private:
  friend class BufferPool;
  Buffer(std::shared_ptr<BufferPool> pool, std::byte* memory, std::size_t size, std::size_t taken)
      : pool_(std::move(pool)), memory_(memory), size_(size), taken_(taken) {}
  std::shared_ptr<BufferPool> pool_;
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

  static std::shared_ptr<BufferPool> create(std::size_t limit_bytes);
  ~BufferPool();

  std::size_t most_bytes(Share share) const;  // more than this can never be had at once
  // Nullptr: there is none now, and `granted` is called when there is, by the thread that gives it back; `place` names
  // the request. In the order of requests, those for `all` first.
  SharedBuffer take(std::size_t bytes, Share share, Granted granted, std::uint64_t& place);
  void cancel(std::uint64_t place);  // `granted` may be under way nevertheless
  SharedBuffer take_within(std::size_t bytes, Share share, std::chrono::nanoseconds patience);  // nullptr: there was none
  std::size_t used_bytes() const;

 private:
  friend class Buffer;
  explicit BufferPool(std::size_t limit_bytes);
  void give_back(std::byte* memory, std::size_t taken);
  SharedBuffer buffer(std::size_t bytes);
  std::vector<std::pair<Granted, SharedBuffer>> next_grants();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ff
