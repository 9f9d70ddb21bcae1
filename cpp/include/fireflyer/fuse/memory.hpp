// Memory that data pass through between the kernel and who answers: taken from a pool, given back when nobody holds it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace ff {

// Bytes that somebody may still fill or read; they stay as long as one of these is there.
struct Memory {
  std::shared_ptr<std::byte> keep;
  std::byte* data = nullptr;
  std::size_t size = 0;
};

class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  explicit MemoryPool(std::size_t limit_bytes) : limit_bytes_(limit_bytes) {}
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Waits while more than the limit is out, but for whoever comes when nothing is.
  Memory take(std::size_t size);
  // The same without waiting, when there is room.
  std::optional<Memory> try_take(std::size_t size);
  // Of the limit.
  static std::size_t cost_of(std::size_t size);
  // Called whenever there is more room, by whoever gave memory back; it gives none back itself. When this returns, what
  // was to be called before is not called any more.
  void on_room(std::function<void()> call);
  // A buffer that libfuse received a request into: `request_buffer` gives it again. `data` lies within it.
  Memory adopt(void* buffer, std::byte* data, std::size_t size);
  void* request_buffer();  // nullptr: none is spare
  void give_buffer(void* buffer);
  void end();  // nobody waits any more

 private:
  bool has_room(std::size_t size) const { return ended_ || out_bytes_ == 0 || out_bytes_ + size <= limit_bytes_; }
  void wait_for_room(std::size_t size);
  void left(std::size_t size);
  void tell_room();
  Memory taken(std::size_t size);

  std::shared_mutex tell_mutex_;
  std::function<void()> tell_;
  const std::size_t limit_bytes_;
  std::mutex mutex_;
  std::condition_variable room_;
  std::size_t out_bytes_ = 0;
  bool ended_ = false;
  std::vector<std::byte*> spare_blocks_;
  std::vector<void*> spare_buffers_;
};

}  // namespace ff
