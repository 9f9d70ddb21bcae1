// Memory that data pass through between the kernel and who answers: taken from a pool, given back when nobody holds it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
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
  // A buffer that libfuse received a request into: `request_buffer` gives it again. `data` lies within it.
  Memory adopt(void* buffer, std::byte* data, std::size_t size);
  void* request_buffer();  // nullptr: none is spare
  void give_buffer(void* buffer);
  void end();  // nobody waits any more

 private:
  void wait_for_room(std::size_t size);
  void left(std::size_t size);

  const std::size_t limit_bytes_;
  std::mutex mutex_;
  std::condition_variable room_;
  std::size_t out_bytes_ = 0;
  bool ended_ = false;
  std::vector<std::byte*> spare_blocks_;
  std::vector<void*> spare_buffers_;
};

}  // namespace ff
